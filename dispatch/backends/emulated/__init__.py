"""
A `torch.npu` on CPU tensors: the same names with the same semantics, in the *inline* schedule, where every
operation has run when its call returns.
"""

from .device import (
    Stream,
    current_stream,
    default_stream,
    device,
    is_current_stream_capturing,
    stream,
    synchronize,
)
from .graphs import (
    NPUGraph,
    graph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    weak_ref_tensor,
)
from .operator import register_composite

__all__ = [
    "NPUGraph",
    "Stream",
    "current_stream",
    "default_stream",
    "device",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "is_current_stream_capturing",
    "register_composite",
    "stream",
    "synchronize",
    "weak_ref_tensor",
]
