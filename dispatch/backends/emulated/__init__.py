"""
A `torch.npu` on CPU tensors: the same names with the same semantics.

`hardware` (the state of the device), `explore` (the schedule that runs it behind the host), `register_composite`
(what graphs trace into) and `weak_ref_tensor` (for which vllm-ascend has a C++ operator) are the emulation's own.
"""

from .device import (
    Stream,
    current_stream,
    default_stream,
    hardware,
    is_current_stream_capturing,
    stream,
    synchronize,
)
from .events import Event, ExternalEvent
from .explore import explore
from .graphs import NPUGraph, graph
from .mempool import empty_cache, graph_pool_handle, mem_get_info, weak_ref_tensor
from .operator import register_composite
from .task_update import (
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
)

__all__ = [
    "Event",
    "ExternalEvent",
    "NPUGraph",
    "Stream",
    "current_stream",
    "default_stream",
    "empty_cache",
    "explore",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "hardware",
    "is_current_stream_capturing",
    "mem_get_info",
    "register_composite",
    "stream",
    "synchronize",
    "weak_ref_tensor",
]
