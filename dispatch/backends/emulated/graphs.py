"""
Graphs on the emulated device, with the names and semantics of `torch.npu`.

Graphs that share a memory pool reuse one another's memory: what a graph returned and nobody held on to when a
later graph was captured, that later graph may overwrite whenever it is replayed. Here the reuse is played: a
weakly held output of one graph becomes NaN when a graph captured after its last owner had gone is replayed.
"""

import itertools
import weakref
from types import TracebackType
from typing import Any, Self

import attrs
import torch

from .device import Stream, device
from .device import stream as _stream
from .recorder import Recorder, Task, UpdateRecorder, alias, poison

MempoolId = tuple[int, int]

_mempool_ids = itertools.count(1)


@attrs.define(eq=False)
class Block:
    """
    Memory of a weakly held output; `owner` is the tensor the captured function returned.
    """

    tensor: torch.Tensor
    owner: "weakref.ref[torch.Tensor]"


@attrs.define(eq=False)
class Mempool:
    """
    Memory shared by graphs: its weakly held outputs, and those that still hold their graph's last results.
    """

    blocks: set[Block] = attrs.field(factory=set)
    fresh: set[Block] = attrs.field(factory=set)


_mempools: dict[MempoolId, Mempool] = {}
_owners: "weakref.WeakValueDictionary[int, NPUGraph]" = weakref.WeakValueDictionary()
"""Address of a storage: the graph that made it."""


def graph_pool_handle() -> MempoolId:
    """
    A new memory pool that graphs can share.
    """
    return (0, next(_mempool_ids))


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """
    Another tensor on the memory of *tensor* that does not keep it from being reused by later graphs.
    """
    graph = _owner(tensor)
    if graph is not None:
        graph.hold_weakly(tensor)
    result: torch.Tensor = alias(tensor)
    return result


def _owner(tensor: torch.Tensor) -> "NPUGraph | None":
    """
    The graph whose operations made the memory of *tensor*; nobody reuses what was there before.
    """
    address = _address(tensor)
    capturing: NPUGraph | None = device.capturing
    if capturing is not None and any(_address(made) == address for made in capturing.recorder.fresh):
        return capturing
    return _owners.get(address)


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


class NPUGraph:
    """
    A captured sequence of operations.
    """

    def __init__(self) -> None:
        self._tasks: list[Task] | None = None
        self._recorder: Recorder | None = None
        self._pool: MempoolId | None = None
        self._memory = Mempool()
        self._made: list[torch.Tensor] = []
        self._victims: frozenset[Block] = frozenset()
        self._blocks: set[Block] = set()
        self._holds_stream = False

    def capture_begin(self, pool: MempoolId | None = None, capture_error_mode: str = "global") -> None:
        """
        Start to capture on the current stream.

        Raises:
            RuntimeError: It cannot start; the text says why.
        """
        if self._tasks is not None:
            raise RuntimeError("This NPUGraph instance already owns a captured graph. Call reset() first.")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode: {capture_error_mode}")
        device.refuse_while_capturing("begin another capture")
        if device.current_stream is device.default_stream:
            raise RuntimeError("NPU graphs must be captured on a non-default stream.")
        device.acquire_stream()
        self._holds_stream = True
        self._pool = pool or (next(_mempool_ids), 0)
        self._memory = _mempools.setdefault(self._pool, Mempool())
        self._victims = frozenset(block for block in self._memory.blocks if block.owner() is None)
        self._recorder = Recorder()
        device.capturing = self
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """
        Stop to capture; the results become unspecified until the first replay.
        """
        self._tasks = self._stop().tasks
        for tensor in self._made:
            poison(tensor)

    def replay(self) -> None:
        """
        Run the captured operations.

        Raises:
            RuntimeError: There are none.
        """
        if self._tasks is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        fresh = self._memory.fresh
        for block in fresh & self._victims:
            poison(block.tensor)
            fresh.discard(block)
        with torch.inference_mode():
            for task in self._tasks:
                task.run()
        fresh.update(self._blocks)

    def reset(self) -> None:
        """
        Drop the captured operations and give back what they held; also after a capture that failed.
        """
        if self._recorder is not None:
            self._stop()
        self._tasks = None
        for tensor in self._made:
            _owners.pop(_address(tensor), None)
        self._made = []
        self._memory.blocks -= self._blocks
        self._memory.fresh -= self._blocks
        self._blocks = set()
        if self._holds_stream:
            device.release_stream()
            self._holds_stream = False

    def pool(self) -> MempoolId:
        """
        The handle of the memory pool.
        """
        if self._tasks is None or self._pool is None:
            raise RuntimeError("Called NPUGraph::pool() without a preceding successful capture.")
        return self._pool

    @property
    def num_tasks(self) -> int:
        """
        Operations a replay runs.
        """
        return len(self._tasks or ())

    def hold_weakly(self, tensor: torch.Tensor) -> None:
        """
        Note that *tensor*, an output, is kept by nobody but its present owners.
        """
        block = Block(alias(tensor), weakref.ref(tensor))
        self._blocks.add(block)
        self._memory.blocks.add(block)

    @property
    def recorder(self) -> Recorder:
        """
        What notes the operations while capturing.
        """
        if self._recorder is None:
            raise RuntimeError("graph task groups can only be used while the stream is capturing")
        return self._recorder

    def _stop(self) -> Recorder:
        recorder = self._recorder
        if recorder is None:
            raise RuntimeError("Called NPUGraph::capture_end without capture_begin.")
        recorder.__exit__(None, None, None)
        self._recorder = None
        device.capturing = None
        self._made = recorder.fresh
        for tensor in self._made:
            _owners[_address(tensor)] = self
        return recorder

    def __del__(self) -> None:
        self.reset()


class graph:  # noqa: N801 -- the name of torch.npu
    """
    Context in which operations are captured into *npu_graph*.
    """

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: MempoolId | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if auto_dispatch_capture:
            raise NotImplementedError("auto_dispatch_capture is not emulated")
        if graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self._graph = npu_graph
        self._pool = pool
        self._stream = stream or graph.default_capture_stream
        self._mode = capture_error_mode
        self._context: Any = None

    def __enter__(self) -> Self:
        self._context = _stream(self._stream)
        self._context.__enter__()
        try:
            self._graph.capture_begin(self._pool, capture_error_mode=self._mode)
        except BaseException:
            self._context.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._context.__exit__(None, None, None)


@attrs.frozen(eq=False)
class TaskGroup:
    """
    Handle of captured operations whose arguments can be replaced.
    """

    task_group: tuple[Task, ...]


def graph_task_group_begin(stream: Stream) -> None:
    """
    Start a group in the graph being captured on *stream*.
    """
    recorder = _capturing()
    recorder.group_start = len(recorder.tasks)


def graph_task_group_end(stream: Stream) -> TaskGroup:
    """
    End the group.
    """
    recorder = _capturing()
    if recorder.group_start is None:
        raise RuntimeError("graph_task_group_end without graph_task_group_begin")
    group = TaskGroup(tuple(recorder.tasks[recorder.group_start :]))
    recorder.group_start = None
    return group


_updates: dict[int, UpdateRecorder] = {}


def graph_task_update_begin(stream: Stream, handle: TaskGroup) -> None:
    """
    Start to replace the arguments of a group: the operators called until `graph_task_update_end` must be those
    captured, and are not run.
    """
    device.refuse_while_capturing("update a task")
    if stream.stream_id in _updates:
        raise RuntimeError("graph_task_update_begin while an update is open on this stream")
    _updates[stream.stream_id] = UpdateRecorder(handle.task_group)
    _updates[stream.stream_id].__enter__()


def graph_task_update_end(stream: Stream) -> None:
    """
    Replace the arguments, in the order of *stream*: inline, at once.

    Raises:
        RuntimeError: Other operators were called than captured, in number or in kind.
    """
    update = _updates.pop(stream.stream_id, None)
    if update is None:
        raise RuntimeError("graph_task_update_end without graph_task_update_begin")
    update.__exit__(None, None, None)
    update.apply()


def _capturing() -> Recorder:
    if device.capturing is None:
        raise RuntimeError("graph task groups can only be used while the stream is capturing")
    recorder: Recorder = device.capturing.recorder
    return recorder
