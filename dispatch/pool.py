"""The captured graphs of one engine."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from .errors import CaptureError, ReplayError
from .params import AttentionParams, TaskBackend
from .step_plan import BatchDescriptor, RuntimeMode


class Graph(Protocol):
    """
    A captured graph, as `torch.npu` and `torch.cuda` have it.
    """

    def replay(self) -> None:
        """
        Run it.
        """
        ...

    def reset(self) -> None:
        """
        Give back what it holds.
        """
        ...


class Backend(TaskBackend, Protocol):
    """
    A device that captures graphs and can replace arguments in them.
    """

    def capture(self, run: Callable[[], Any], *, release_output: bool) -> tuple[Graph, Any, Any]:
        """
        Capture *run*; return the graph, its output held weakly, and the output itself.
        """
        ...

    def synchronize(self) -> None:
        """
        Let the host wait; for debugging only.
        """
        ...


@attrs.frozen(cache_hash=True)
class GraphKey:
    """
    Which graph: the whole descriptor, and which of the model's pieces (0 for a FULL graph).
    """

    descriptor: BatchDescriptor
    piece: int = 0


@attrs.define(eq=False)
class PooledGraph:
    """
    A graph of the pool.

    Args:
        key: Which one.
        graph: The device's graph; None after its release.
        output: What a replay writes, held weakly: valid until another graph of the pool is replayed.
        addresses: Where its inputs lay at capture.
    """

    key: GraphKey
    graph: Graph | None
    output: Any
    addresses: list[int]

    def replay(self, addresses: list[int]) -> Any:
        """
        Run the graph and return its output.

        Args:
            addresses: Where the inputs lie now. A graph reads where they lay at capture, whatever is passed.

        Raises:
            ReplayError: An input lies elsewhere, or the graph was released.
        """
        if self.graph is None:
            raise ReplayError(f"the graph of {self.key} was released; capture it again before it is replayed")
        if addresses != self.addresses:
            moved = [i for i, (a, b) in enumerate(zip(addresses, self.addresses, strict=False)) if a != b]
            msg = (
                f"inputs of a graph must lie where they lay at its capture: input {moved or 'count'} of "
                f"{self.key} moved, {self.addresses} -> {addresses}; keep them in persistent buffers"
            )
            raise ReplayError(msg)
        self.graph.replay()
        return self.output


class GraphPool:
    """
    Holds captured graphs. (What vLLM calls "graph pool" is the handle of their memory: `mempool` here.)
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.params = AttentionParams(backend)
        self._graphs: dict[GraphKey, PooledGraph] = {}

    def capture(
        self, key: GraphKey, run: Callable[[], Any], *, addresses: list[int], release_output: bool = False
    ) -> tuple[PooledGraph, Any]:
        """
        Capture *run* as the graph of *key*; return the graph and the output of the capture.

        Args:
            key: Which graph it becomes.
            run: What to capture.
            addresses: Where its inputs lie.
            release_output: No graph captured later reads the output.

        Raises:
            CaptureError: There is such a graph already, or the device failed; nothing is held for it then.
        """
        if key in self._graphs:
            raise CaptureError(f"a graph is captured once: {key} exists; release it first")
        try:
            graph, weak_output, output = self.backend.capture(run, release_output=release_output)
        except BaseException as exc:
            self.params.forget(key.descriptor)
            if not isinstance(exc, RuntimeError):
                raise  # a mistake in *run*, not of the device
            raise CaptureError(f"capturing {key} failed: {exc}") from exc
        pooled = self._graphs[key] = PooledGraph(key, graph, weak_output, addresses)
        return pooled, output

    def release(self, descriptor: BatchDescriptor) -> None:
        """
        Release all graphs of *descriptor*, and what was recorded to refresh them.
        """
        self.params.forget(descriptor)
        for key in [key for key in self._graphs if key.descriptor == descriptor]:
            pooled = self._graphs.pop(key)
            assert pooled.graph is not None
            pooled.graph.reset()
            pooled.graph = None

    def clear(self) -> None:
        """
        Release all graphs.
        """
        for descriptor in self.num_graphs():
            self.release(descriptor)

    def num_graphs(self) -> Counter[BatchDescriptor]:
        """
        Graphs held, by descriptor: one for FULL, one a piece for PIECEWISE.
        """
        return Counter(key.descriptor for key in self._graphs)

    def num_graphs_by_mode(self, role: str = "target") -> dict[RuntimeMode, int]:
        """
        Graphs held for the model of *role*, by mode.
        """
        return dict(Counter(key.descriptor.mode for key in self._graphs if key.descriptor.role == role))
