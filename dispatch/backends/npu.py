"""Captures, replays and updates graphs through a `torch.npu` namespace, real or emulated."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map_only

from ..pool import Graph


@attrs.frozen
class UpdatableTask:
    """
    A captured operator: its task group, and the event that the graph waits for before it.
    """

    group: Any
    event: Any


class NpuBackend:
    """
    One memory pool and one update stream on the device that *npu* stands for.

    Args:
        npu: `torch.npu`, or `aclgraph_dispatch.backends.emulated`.
        weak_ref_tensor: Makes a tensor that does not own the memory of another one.
    """

    def __init__(self, npu: Any, weak_ref_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.npu = npu
        self.mempool = npu.graph_pool_handle()
        self.update_stream = npu.Stream()
        self._weak_ref_tensor = weak_ref_tensor

    @property
    def is_capturing(self) -> bool:
        """
        Whether operations issued now become part of a graph.
        """
        capturing: bool = self.npu.is_current_stream_capturing()
        return capturing

    def capture(self, run: Callable[[], Any], *, release_output: bool) -> tuple[Graph, Any, Any]:
        """
        Capture what *run* does.

        Args:
            run: Called once; its result, tensors in any nesting, is the graph's output.
            release_output: Let go of the output within the capture: no later graph of the pool reads it.
        """
        graph = self.npu.NPUGraph()
        try:
            with self.npu.graph(graph, pool=self.mempool):
                output = run()
                if release_output:
                    output = self._weak_ref(output)
        except BaseException:
            graph.reset()
            raise
        # The pool keeps the output weakly, so that later graphs may reuse its memory; the caller gets the
        # tensors themselves, which must live until the graphs captured next have read them.
        return graph, self._weak_ref(output), output

    def synchronize(self) -> None:
        """
        Let the host wait for the current stream; for debugging, never on the step path.
        """
        self.npu.current_stream().synchronize()

    def record_task(self, run: Callable[[], None]) -> UpdatableTask:
        """
        Capture a wait for an update, then the one operator that *run* issues; return its handle.
        """
        stream = self.npu.current_stream()
        event = self.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        self.npu.graph_task_group_begin(stream)
        run()
        return UpdatableTask(self.npu.graph_task_group_end(stream), event)

    def order_updates(self) -> None:
        """
        Let updates to come wait for the replays submitted so far to the current stream.
        """
        self.update_stream.wait_stream(self.npu.current_stream())

    def update_task(self, handle: UpdatableTask, run: Callable[[], None]) -> None:
        """
        Replace the arguments of a captured operator by those that *run* issues it with.
        """
        with self.npu.stream(self.update_stream):
            self.npu.graph_task_update_begin(self.update_stream, handle.group)
            try:
                run()
            except BaseException:
                # The update must be closed, which fails too, for lack of the operator; the first error counts.
                with suppress(RuntimeError):
                    self.npu.graph_task_update_end(self.update_stream)
                raise
            self.npu.graph_task_update_end(self.update_stream)
            handle.event.record(self.update_stream)

    def release_task(self, handle: UpdatableTask) -> None:
        """
        Let the graph go on without an update.
        """
        handle.event.record(self.update_stream)

    def _weak_ref(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, self._weak_ref_tensor, output)
