"""
Graphs that update themselves: `graph(..., auto_dispatch_capture=True)`, then `NPUGraph.update`.

Theory of operation
-------------------
During such a capture every operator with lengths on the host becomes a task group of its own, behind a wait for an
external event of its own. An update replaces the lengths of all groups, on one stream for all graphs of the
process, and records each group's event when the group is done. So a replay wants exactly one update; which of the
two comes first does not matter.

The stream of updates knows nothing of the replay before, and may overtake it: that replay would take the lengths
of its successor, which then waits for ever. To prevent it is the caller's task, before each pair of an update and
a replay: `npu_graph.graph_dispatch_mode.update_stream.wait_stream(current_stream())`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from . import operators
from .device import Stream, current_stream, stream
from .events import ExternalEvent
from .operator import operator
from .task_update import (
    TaskGroup,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
)


@attrs.frozen
class Handler:
    """
    How an operator is updated.

    Args:
        call: Calls it with the arguments that were captured, but other lengths.
        lengths: Where each of its parameters with lengths on the host is: the index of a positional argument, or
            the name of a keyword.
    """

    call: Callable[..., Any]
    lengths: dict[str, int | str]


HANDLERS: dict[OpOverload, Handler] = {
    operators._fused_infer_out: Handler(
        operators._fused_infer_out,
        {name: name for name in ("actual_seq_lengths", "actual_seq_lengths_kv")},
    ),
    # By its Python front, which takes a tensor of lengths too.
    operators._paged_attention: Handler(operators._npu_paged_attention, {"context_lens": 7}),
}


@attrs.define
class Record:
    """
    A captured operator, with the arguments of its last update.
    """

    event: ExternalEvent
    group: TaskGroup
    handler: Handler
    args: list[Any]
    kwargs: dict[str, Any]

    def update(self, lengths: Mapping[str, Any], update_stream: Stream) -> None:
        """
        Submit the operator with other *lengths*; those that it has not are left alone.
        """
        for name in lengths.keys() & self.handler.lengths.keys():
            place = self.handler.lengths[name]
            if isinstance(place, int):
                self.args[place] = lengths[name]
            else:
                self.kwargs[place] = lengths[name]
        graph_task_update_begin(update_stream, self.group)
        try:
            self.handler.call(*self.args, **self.kwargs)
        finally:
            graph_task_update_end(update_stream)
        self.event.record(update_stream)


class GraphDispatchMode(TorchDispatchMode):
    """
    Captures operators so that they can be updated, and updates them.
    """

    update_stream: ClassVar[Stream] = Stream()

    def __init__(self) -> None:
        super().__init__()
        self.graph_dispatch_records: list[Record] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        body = operator(func).body
        if body is not None:  # its parts may be updated
            with self:
                return body(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            return func(*args, **kwargs)
        capturing = current_stream()
        event = ExternalEvent()
        event.wait(capturing)
        event.reset(capturing)
        graph_task_group_begin(capturing)
        result = func(*args, **kwargs)
        group = graph_task_group_end(capturing)
        (task,) = group.task_group  # it does not keep alive what the captured function drops
        self.graph_dispatch_records.append(Record(event, group, handler, list(task.args), dict(task.kwargs)))
        return result

    def update_capture_record(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """
        Submit other lengths to the stream of updates.

        Args:
            cpu_update_input: Lengths by parameter, for each captured operator in order, or one for all of them.

        Raises:
            RuntimeError: Their number is another, or no operator has such a parameter; nothing is submitted.
        """
        records = self.graph_dispatch_records
        known = [frozenset(record.handler.lengths) for record in records]
        inputs = list(cpu_update_input)
        if len(inputs) == 1:
            # Operators of several kinds take from it what they have.
            known = [frozenset[str]().union(*known)] * len(records)
            inputs *= len(records)
        if len(inputs) != len(records):
            raise RuntimeError(
                f"{len(records)} operators were captured for updates, but cpu_update_input is for {len(inputs)}"
            )
        for lengths, names in zip(inputs, known, strict=True):
            unknown = sorted(lengths.keys() - names)
            if unknown:
                raise RuntimeError(f"cpu_update_input has {unknown}; the captured operators have {sorted(names)}")
        with stream(self.update_stream):
            for record, lengths in zip(records, inputs, strict=True):
                record.update(lengths, self.update_stream)
