"""
Graphs on the emulated device, with the names and semantics of `torch.npu`.

Theory of operation
-------------------
A capture starts on one stream, and other streams join it by waiting for an event recorded in it. What is noted
on a stream of the capture forms a *lane*; events recorded and awaited within the capture are *marks* between
lanes. All lanes must have rejoined the first when the capture ends. Each lane holds a stream of the device until
the graph is reset.

A replay is one command of the stream it is issued on. Inline, the tasks run in the order in which they were
noted, which respects all marks; an exploring schedule advances the lanes independently.

Graphs that share a memory pool reuse one another's memory: what a graph returned and nobody held on to when a
later graph was captured, that later graph may overwrite whenever it is replayed. Here the reuse is played: a
weakly held output of one graph becomes NaN when a graph captured after its last owner had gone is replayed, and
an exploring schedule reports who reads it afterwards.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

import torch

from . import super_kernel
from .auto_dispatch import GraphDispatchMode
from .device import Stream, hardware, synchronize
from .device import stream as _stream
from .events import ExternalEvent
from .faults import FreedInputError
from .mempool import Block, Mempool, MempoolId, address_of, empty_cache, mempools, own_pool, owners
from .recorder import Recorder, Task, aliases, poison
from .replay import (
    ExploredReplay,
    InlineReplay,
    Item,
    Mark,
    MarkWait,
    Note,
    Segment,
    Wait,
    segments,
    unjoined,
)
from .schedule import Explore


class NPUGraph:
    """
    A captured sequence of operations.
    """

    _ids = itertools.count()

    def __init__(self) -> None:
        self.name = f"graph {next(self._ids)}"
        self.lanes: dict[Stream, None] = {}
        """Streams that take part in the capture, the first one first."""
        self.num_replays = 0
        self.capture_seconds = 0.0
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode = GraphDispatchMode()
        self._items: list[Item] | None = None
        self._segments: list[Segment] = []
        self._recorder: Recorder | None = None
        self._pool: MempoolId | None = None
        self._memory = Mempool()
        self._victims: frozenset[Block] = frozenset()
        self._blocks: set[Block] = set()
        self._inputs: list[tuple[int, torch.Tensor]] = []
        """Memory that it did not make, by address."""
        self._made: list[torch.Tensor] = []
        self._sizes: dict[int, int] = {}
        """Bytes of the memory that it made, by address."""
        self._num_streams = 0
        self._start = 0.0

    def capture_begin(self, pool: MempoolId | None = None, capture_error_mode: str = "global") -> None:
        """
        Start to capture on the current stream.

        Raises:
            RuntimeError: It cannot start; the text says why.
        """
        if self._items is not None:
            raise RuntimeError(
                "This NPUGraph instance already owns a captured graph. "
                "To capture a new graph, create a new instance."
            )
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got "
                f"{capture_error_mode}"
            )
        hardware.refuse_while_capturing("begin another capture")
        if hardware.current_stream is hardware.default_stream:
            raise RuntimeError("NPU graphs must be captured on a non-default stream.")
        self._start = time.perf_counter()
        self._join(hardware.current_stream, "aclmdlRICaptureBegin")
        self._pool = pool or own_pool()
        self._memory = mempools.setdefault(self._pool, Mempool())
        self._victims = self._memory.dropped()
        self._recorder = Recorder()
        hardware.capturing = self
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """
        Stop to capture; the results become unspecified until the first replay.

        Raises:
            RuntimeError: It must end on the stream it began on, and all streams that joined must be back.
        """
        first = next(iter(self.lanes), None)
        recorder = self._stop()
        try:
            self._finish(recorder, first)
        except BaseException:
            self.reset()
            raise

    def _finish(self, recorder: Recorder, first: Stream | None) -> None:
        if hardware.current_stream is not first:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if recorder.group_start is not None:
            raise RuntimeError("capture ended within a task group: graph_task_group_end is missing")
        stray = unjoined(recorder.items, first)
        if stray:
            raise RuntimeError(
                f"capture ended with unjoined work on {', '.join(map(str, stray))}: a stream that waited for the "
                "capturing stream must be waited for by it before the end"
            )
        self._segments = segments(recorder.items)
        self._items = recorder.items
        self._sizes = {address_of(t): t.untyped_storage().nbytes() for t in recorder.fresh}
        tasks = [item for item in recorder.items if isinstance(item, Task)]
        # Arguments of task groups are looked at when they are used: every replay gets them anew.
        reads = [(address_of(t), t) for task in tasks if task.group is None for t in task.reads]
        self._inputs = [(address, tensor) for address, tensor in reads if address not in self._sizes]
        for task in tasks:
            for tensor in task.reads:
                aliases.add(tensor)
        self._memory.graphs.add(self)
        for tensor in recorder.fresh:
            poison(tensor)
        self.capture_seconds = time.perf_counter() - self._start

    def replay(self) -> None:
        """
        Submit the captured operations to the current stream.

        Raises:
            RuntimeError: There are none.
            FreedInputError: Memory that they read was given up (explored only).
        """
        if self._items is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        hardware.refuse_while_capturing("replay a graph")
        self.num_replays += 1
        if isinstance(hardware.schedule, Explore):
            self.refuse_freed(self._inputs)
            hardware.current_stream.submit(ExploredReplay(self, self._items, hardware.schedule))
            if hardware.schedule.host_reads and not any(wait for wait, _ in self._segments):
                # The operators that follow are the host's here, and read what this graph writes.
                hardware.drain()
        else:
            hardware.current_stream.submit(InlineReplay(self, self._segments))

    def reset(self) -> None:
        """
        Drop the captured operations and give back what they held; also after a capture that failed.
        """
        if self._recorder is not None:
            self._stop()
        self._items = None
        self._segments = []
        self._inputs = []
        for tensor in self._made:
            owners.pop(address_of(tensor), None)
        self._made = []
        self._memory.forget(self._blocks)
        self._memory.graphs.discard(self)
        self._blocks = set()
        self._sizes = {}
        self.lanes = {}
        hardware.release_streams(self._num_streams)
        self._num_streams = 0

    def pool(self) -> MempoolId:
        """
        The handle of the memory pool.
        """
        if self._items is None or self._pool is None:
            raise RuntimeError("Called NPUGraph::pool() without a preceding successful capture.")
        return self._pool

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """
        Submit the lengths of a replay, see `auto_dispatch`.

        Raises:
            RuntimeError: It was captured without automatic dispatch, or they do not fit what was captured.
        """
        if not self.auto_dispatch_capture:
            raise RuntimeError("NPUGraph.update needs a graph captured with auto_dispatch_capture=True")
        self.graph_dispatch_mode.update_capture_record(cpu_update_input)

    def super_kernel_optimize(
        self, optimize_options: dict[str, Any] | None = None, debug_options: dict[str, Any] | None = None
    ) -> None:
        """
        Check the options; nothing else changes, for nothing takes time here.

        Raises:
            RuntimeError: There is no such option, or it is of another type.
        """
        if optimize_options is not None:
            super_kernel.check("optimize_options", optimize_options, super_kernel.OPTIMIZE)
        if debug_options is not None:
            super_kernel.check("debug_options", debug_options, super_kernel.DEBUG)

    def debug_dump(self, debug_path: str) -> None:
        """
        Write the captured operations to *debug_path*, one a line.
        """
        if self._items is None:
            raise RuntimeError("Called NPUGraph::debug_dump without a preceding successful capture.")
        with open(debug_path, "w", encoding="utf-8") as file:
            file.writelines(f"{item.lane}: {item}\n" for item in self._items)

    @property
    def kept_bytes(self) -> int:
        """
        Bytes of outputs.
        """
        return sum(self._sizes.get(address, 0) for address in {address_of(block.tensor) for block in self._blocks})

    @property
    def transient_bytes(self) -> int:
        """
        Bytes of intermediate results, shared with the other graphs of the memory pool.
        """
        return sum(self._sizes.values()) - self.kept_bytes

    @property
    def num_tasks(self) -> int:
        """
        Operators a replay runs.
        """
        return sum(isinstance(item, Task) for item in self._items or ())

    @property
    def overloads(self) -> list[Any]:
        """
        The operators a replay runs, in order.
        """
        return [item.overload for item in self._items or () if isinstance(item, Task)]

    def hold_weakly(self, block: Block) -> None:
        """
        Note an output that is kept by nobody but its present owners.
        """
        self._blocks.add(block)
        self._memory.blocks.add(block)

    def made(self, address: int) -> bool:
        """
        Whether the capture going on made the memory at *address*.
        """
        return any(address_of(tensor) == address for tensor in self.recorder.fresh)

    @property
    def recorder(self) -> Recorder:
        """
        What notes the operations while capturing.
        """
        assert self._recorder is not None
        return self._recorder

    def note_wait(self, stream: Stream, event: ExternalEvent) -> None:
        """
        Note that *stream* waits for an external event.
        """
        self.recorder.items.append(Wait(stream, event))

    def note_call(self, stream: Stream, function: Callable[[], None]) -> None:
        """
        Note a record or reset of an external event.
        """
        self.recorder.items.append(Note(stream, function))

    def record_mark(self, stream: Stream) -> Mark:
        """
        Note a record of an event within the capture.
        """
        mark = Mark(stream)
        self.recorder.items.append(mark)
        return mark

    def wait_mark(self, stream: Stream, mark: Mark) -> None:
        """
        Note that *stream* waits for *mark*; it joins the capture thereby.

        Raises:
            RuntimeError: No stream is left for it.
        """
        if stream not in self.lanes:
            self._join(stream, "New capture stream")
        self.recorder.items.append(MarkWait(stream, mark))

    def begin_replay(self) -> None:
        """
        Let a replay take the memory of dropped outputs.
        """
        self._memory.overwrite(self._victims, self._blocks, self)

    def end_replay(self) -> None:
        """
        Its outputs hold results now.
        """
        self._memory.fresh |= self._blocks

    def _join(self, stream: Stream, what: str) -> None:
        hardware.acquire_stream(what)
        self._num_streams += 1
        self.lanes[stream] = None

    def _stop(self) -> Recorder:
        recorder = self._recorder
        if recorder is None:
            raise RuntimeError("Called NPUGraph::capture_end without capture_begin.")
        recorder.__exit__(None, None, None)
        self._recorder = None
        hardware.capturing = None
        self._made = recorder.fresh  # kept, so that no address in `owners` is given to anybody else
        for tensor in self._made:
            owners[address_of(tensor)] = self
        return recorder

    def refuse_freed(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
        """
        Raise if the memory of one of *tensors*, given with its address, is held by graphs only.
        """
        for address, tensor in dict(tensors).items():
            storage = tensor.untyped_storage()
            # Its users: graphs through their aliases, this very handle, and whoever else still owns it.
            if torch._C._storage_Use_Count(storage._cdata) <= aliases.count(address) + 1:
                raise FreedInputError(
                    f"{self} reads a tensor of shape {tuple(tensor.shape)} that was freed since its capture: its "
                    "owner was rebound to another tensor; update it in place instead"
                )

    def __repr__(self) -> str:
        return f"{self.name} of {self.num_tasks} operators"

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
        if graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self._graph = npu_graph
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        self._pool = pool
        self._stream = stream or graph.default_capture_stream
        self._mode = capture_error_mode
        self._context: Any = None

    def __enter__(self) -> None:
        if self._graph.auto_dispatch_capture and self._graph.graph_dispatch_mode.graph_dispatch_records:
            # torch_npu keeps them through a reset, and would update what is gone.
            raise RuntimeError("this NPUGraph instance has records of an earlier capture: create a new instance")
        synchronize()
        empty_cache()
        self._context = _stream(self._stream)
        self._context.__enter__()
        try:
            self._graph.capture_begin(self._pool, capture_error_mode=self._mode)
        except BaseException:
            self._context.__exit__(None, None, None)
            raise
        if self._graph.auto_dispatch_capture:
            # After the recorder, so that operators come here first.
            self._graph.graph_dispatch_mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._graph.auto_dispatch_capture:
            self._graph.graph_dispatch_mode.__exit__(None, None, None)
        try:
            # What went wrong within the capture counts more than that the capture cannot be ended well.
            with suppress(RuntimeError) if kind is not None else nullcontext():
                self._graph.capture_end()
        finally:
            self._context.__exit__(None, None, None)
