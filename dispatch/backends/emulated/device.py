"""
The emulated device: streams, the schedule by which they advance, and what graphs may hold.

Theory of operation
-------------------
The host submits commands to streams. A stream is a queue: its commands run in order. What runs when, between
streams and relative to the host, is the schedule's business:

* `Inline` runs whatever can run before the submitting call returns. A command that waits for an event not yet
  recorded stays in its queue, with all that follows, until the record comes.
* `Explore` lets the device run behind the host. After every submission it makes a number of steps, on streams
  picked by a seed; the same seed gives the same run. What depends on luck on a device depends on the seed here.

When the host waits (`synchronize`), the schedule must empty the queues. If it cannot, nobody is left who could
record the missing event, and that is a deadlock: the error says who waits for what.
"""

import itertools
import random
from collections import deque
from typing import Any, Protocol

import attrs
from torch.utils._python_dispatch import _disable_current_modes

from .faults import DeadlockError, FaultError

STREAM_LIMITS = {
    "legacy-1800": 2048 - 248,
    "a2-a3": 1984,
    "310p": 1024,
    "200i": 512,
    "hdk25.5": 32 * 1024,
}
"""
Streams that graphs can hold, by device and driver: 2048 with 248 kept back (vllm-ascend up to 0.20), the maxima of
CANN's aclrtCreateStream, and what binding queues in software allows (HDK 25.5 and later).
"""

_NO_STREAM = (
    "{what} failed, error code is 207008: the stream resource is insufficient "
    "(ACL_ERROR_RT_NO_STREAM_RESOURCE, EL0009); graphs hold {held} of {limit} streams"
)
_NO_STREAM_OLD = (
    "{what} failed, error code is 207005 (0x7020023): Alloc sq cq fail, stream_id={held}; "
    "graphs hold {held} of {limit} streams"
)


class Command(Protocol):
    """
    An entry of a stream's queue.
    """

    def blocked_on(self) -> str | None:
        """
        What it waits for; None if it can advance.
        """
        ...

    def advance(self) -> bool:
        """
        Do one thing; return whether it was the last.
        """
        ...

    def run_through(self) -> bool:
        """
        Do all that can be done; return whether nothing is left.
        """
        ...


@attrs.define
class Call:
    """
    A command that calls a function, waiting for nothing.

    Args:
        function: What it calls.
        records: The external event that it records, if it does.
    """

    function: Any
    records: Any = None

    def blocked_on(self) -> str | None:
        return None

    def advance(self) -> bool:
        self.function()
        return True

    run_through = advance


class Stream:
    """
    A queue of commands of the device.
    """

    _ids = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.stream_id = next(self._ids)
        self.queue: deque[Command] = deque()

    def submit(self, command: Command) -> None:
        """
        Append *command*; the emulation's own, not a method of `torch.npu.Stream`.
        """
        _device.schedule.submit(self, command)

    def wait_event(self, event: Any) -> None:
        """
        Let later commands wait for the last record of *event* made so far.
        """
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """
        Let later commands wait for all that *stream* holds now.
        """
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """
        Record *event*, or a new one, when all that the stream holds now has run.
        """
        from .events import Event

        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """
        Let the host wait for the stream.

        Raises:
            RuntimeError: A graph is being captured.
        """
        _device.synchronize("synchronize a stream", self)

    def query(self) -> bool:
        """
        Whether everything submitted has run.
        """
        _device.refuse_while_capturing("query a stream")
        return not self.queue

    def __repr__(self) -> str:
        return f"stream {self.stream_id}"


class Inline:
    """
    Everything that can run has run when the submitting call returns.
    """

    def __init__(self) -> None:
        self._settling = False

    def submit(self, stream: Stream, command: Command) -> None:
        if not stream.queue and command.run_through():
            # The usual case; only where a stream is stuck can something have been set free.
            if _device.busy:
                self.drain()
            return
        stream.queue.append(command)
        _device.busy[stream] = None
        self.drain()

    def drain(self) -> None:
        """
        Run what can run.
        """
        if self._settling:
            return
        self._settling = True
        try:
            moved = True
            while moved:
                moved = False
                for stream in list(_device.busy):
                    while stream.queue and stream.queue[0].blocked_on() is None:
                        moved = True
                        if stream.queue[0].run_through():
                            stream.queue.popleft()
                    if not stream.queue:
                        del _device.busy[stream]
        finally:
            self._settling = False


class Explore:
    """
    The device runs behind the host, by a seed.

    Args:
        seed: Picks which stream advances, and how far behind the host the device is.
        host_reads: Whether the host reads memory without asking the device, as vLLM does with CPU tensors.
    """

    def __init__(self, seed: int, *, host_reads: bool = False) -> None:
        self.host_reads = host_reads
        self._random = random.Random(seed)
        # How many steps follow a submission differs by seed, from "almost none" to "almost all".
        self._eagerness = self._random.choice((0.0, 0.3, 0.7, 0.95))
        self._weights: dict[Stream, float] = {}

    def submit(self, stream: Stream, command: Command) -> None:
        stream.queue.append(command)
        _device.busy[stream] = None
        while self._random.random() < self._eagerness and self._step():
            pass

    def drain(self) -> None:
        """
        Run what can run.
        """
        while self._step():
            pass

    def pick(self, choices: list[Any]) -> Any:
        """
        One of *choices*.
        """
        return choices[0] if len(choices) == 1 else self._random.choice(choices)

    def _step(self) -> bool:
        ready = [stream for stream in _device.busy if stream.queue[0].blocked_on() is None]
        if not ready:
            return False
        # Streams differ in speed, so that one can run far ahead of another.
        weights = [self._weights.setdefault(s, self._random.choice((0.05, 1.0, 20.0))) for s in ready]
        stream = self._random.choices(ready, weights)[0]
        # The program's modes are for what the program calls, not for what the device does meanwhile.
        with _disable_current_modes():
            finished = stream.queue[0].advance()
        if finished:
            stream.queue.popleft()
            if not stream.queue:
                del _device.busy[stream]
        return True


@attrs.define
class Limits:
    """
    What the device has to give.

    Args:
        streams: Streams that graphs can hold, see `STREAM_LIMITS`.
        old_driver: Whether exhaustion is reported as by drivers before error 207008 existed.
        memory_bytes: Memory in all.
        auto_reset: Whether an external event resets itself when a wait is satisfied (CANN with value events).
    """

    streams: int = STREAM_LIMITS["a2-a3"]
    old_driver: bool = False
    memory_bytes: int = 64 << 30
    auto_reset: bool = True


class Device:
    """
    State of the one device of this process.
    """

    def __init__(self) -> None:
        self.limits = Limits()
        self.schedule: Inline | Explore = Inline()
        self.default_stream = Stream()
        self.current_stream = self.default_stream
        self.busy: dict[Stream, None] = {}
        """Streams whose queues are not empty, in the order in which they filled."""
        self.capturing: Any = None
        """The graph being captured, of type `NPUGraph`."""
        self.streams_held = 0
        self.host_synchronizations = 0
        """How often the program made the host wait."""
        self.faults: list[FaultError] = []
        """Found by an exploring schedule; the next synchronization raises the first."""

    @property
    def stream_limit(self) -> int:
        """
        Streams that graphs can hold.
        """
        return self.limits.streams

    @stream_limit.setter
    def stream_limit(self, streams: int) -> None:
        self.limits.streams = streams

    def acquire_stream(self, what: str) -> None:
        """
        Take a stream for a graph.

        Raises:
            RuntimeError: None is left; the text is CANN's.
        """
        if self.streams_held >= self.limits.streams:
            text = _NO_STREAM_OLD if self.limits.old_driver else _NO_STREAM
            raise RuntimeError(text.format(what=what, held=self.streams_held, limit=self.limits.streams))
        self.streams_held += 1

    def release_streams(self, count: int) -> None:
        """
        Give a graph's streams back.
        """
        self.streams_held -= count

    def refuse_while_capturing(self, what: str) -> None:
        """
        Raise what the device raises when the host asks for something that cannot be captured.
        """
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def synchronize(self, what: str, stream: Stream | None = None) -> None:
        """
        Let the host wait, at the program's request.
        """
        self.refuse_while_capturing(what)
        self.host_synchronizations += 1
        self.drain(stream)

    def drain(self, stream: Stream | None = None) -> None:
        """
        Run everything submitted. Where the emulation calls this itself, it stands for a data dependency that a
        device has and CPU tensors have not; it is no synchronization of the program's.

        Args:
            stream: The stream that must come to its end; all, if None.

        Raises:
            FaultError: The program uses the device wrongly.
        """
        self.schedule.drain()
        if self.faults:
            faults, self.faults = self.faults, []
            raise faults[0]
        if self.busy if stream is None else stream.queue:
            waiting = "; ".join(f"{s} waits for {s.queue[0].blocked_on()}" for s in self.busy)
            behind = {
                f"; the record of {command.records} is queued behind that on {s}": None
                for s in self.busy
                for command in s.queue
                if isinstance(command, Call) and f"{command.records}, recorded" in waiting
            }
            self.forget()
            raise DeadlockError(f"deadlock: {waiting}{''.join(behind) or '; no record of it is queued'}")

    def forget(self) -> None:
        """
        Drop what was submitted and not run, and what was found: the program is lost.
        """
        self.faults.clear()
        for stream in self.busy:
            stream.queue.clear()
        self.busy.clear()


device = _device = Device()
"""The device of this process; the emulation's own, not a name of `torch.npu`."""


def current_stream(device: Any = None) -> Stream:
    """
    The stream that commands are submitted to.
    """
    return _device.current_stream


def default_stream(device: Any = None) -> Stream:
    """
    The stream that is current when none was chosen; nothing can be captured on it.
    """
    return _device.default_stream


class stream:  # noqa: N801 -- the name of torch.npu
    """
    Context in which *stream* is the current one.
    """

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._previous = _device.current_stream
        _device.current_stream = self._stream

    def __exit__(self, *exc_info: object) -> None:
        _device.current_stream = self._previous


def synchronize(device: Any = None) -> None:
    """
    Let the host wait for the device.
    """
    _device.synchronize("synchronize the device")


def is_current_stream_capturing() -> bool:
    """
    Whether operations submitted to the current stream are captured instead of run.
    """
    graph = _device.capturing
    return graph is not None and _device.current_stream in graph.lanes
