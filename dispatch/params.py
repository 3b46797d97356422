"""
The parameters of attention that a FULL graph cannot read from memory.

An attention operator takes lengths from the host. A graph has them baked in as they were at capture, so they
are replaced before every replay: each captured operator is issued again, under a task update, with the step's
own metadata. Records are kept by the whole descriptor. Two graphs with equal numbers of tokens are two graphs.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import attrs

from .errors import ReplayError
from .step_plan import BatchDescriptor

Issue = Callable[[Any], None]
"""Issues one attention operator with the metadata given."""


class TaskBackend(Protocol):
    """
    A device that can replace the arguments of captured operators.
    """

    def record_task(self, run: Callable[[], None]) -> Any:
        """
        Capture the operator that *run* issues; return its handle.
        """
        ...

    def update_task(self, handle: Any, run: Callable[[], None]) -> None:
        """
        Replace its arguments by those that *run* issues it with.
        """
        ...


@attrs.frozen
class AttentionTask:
    """
    One captured attention operator.
    """

    layer_name: str
    handle: Any
    issue: Issue


class AttentionParams:
    """
    Records attention operators at capture and refreshes them before replay.
    """

    def __init__(self, backend: TaskBackend) -> None:
        self.backend = backend
        self._tasks: defaultdict[BatchDescriptor, list[AttentionTask]] = defaultdict(list)

    def record(self, descriptor: BatchDescriptor, layer_name: str, issue: Issue, metadata: Any) -> None:
        """
        Capture the attention of one layer as part of the graph of *descriptor*.
        """
        handle = self.backend.record_task(partial(issue, metadata))
        self._tasks[descriptor].append(AttentionTask(layer_name, handle, issue))

    def refresh(self, descriptor: BatchDescriptor, metadata: Mapping[str, Any]) -> None:
        """
        Give the graph of *descriptor* the parameters of this step.

        Args:
            descriptor: The graph to be replayed next.
            metadata: By layer name, what the layer's operator is issued with.

        Raises:
            ReplayError: A layer of the graph has no metadata.
        """
        for task in self._tasks[descriptor]:
            layer_metadata = metadata.get(task.layer_name)
            if layer_metadata is None:
                raise ReplayError(f"no attention metadata for {task.layer_name} in a replay of {descriptor}")
            self.backend.update_task(task.handle, partial(task.issue, layer_metadata))

    def forget(self, descriptor: BatchDescriptor) -> None:
        """
        Drop what was recorded for *descriptor*, whose graph is released or failed to be captured.
        """
        self._tasks.pop(descriptor, None)
