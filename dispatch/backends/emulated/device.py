"""The emulated device: its streams, and what is going on in it."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from .faults import DeadlockError, FaultError
from .limits import NO_STREAM, NO_STREAM_OLD, Limits
from .schedule import Call, Command, Explore, Inline


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
        hardware.schedule.submit(self, command)

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
        hardware.synchronize("synchronize a stream", lambda: not self.queue)

    def query(self) -> bool:
        """
        Whether everything submitted has run.
        """
        hardware.refuse_while_capturing("query a stream")
        return not self.queue

    def __repr__(self) -> str:
        return f"stream {self.stream_id}"


class Device:
    """
    State of the one device of this process.
    """

    def __init__(self) -> None:
        self.limits = Limits()
        self.schedule: Inline | Explore = Inline()
        self.default_stream = Stream()
        self.current_stream = self.default_stream
        self.capturing: Any = None
        """The graph being captured, of type `NPUGraph`."""
        self.streams_held = 0
        self.host_synchronizations = 0
        """How often the program made the host wait."""
        self.faults: list[FaultError] = []
        """Found by an exploring schedule; the next synchronization raises the first."""

    @property
    def busy(self) -> dict[Stream, None]:
        """
        Streams whose queues are not empty.
        """
        return self.schedule.busy

    def acquire_stream(self, what: str) -> None:
        """
        Take a stream for a graph.

        Raises:
            RuntimeError: None is left; the text is CANN's.
        """
        if self.streams_held >= self.limits.streams:
            text = NO_STREAM_OLD if self.limits.old_driver else NO_STREAM
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

    def synchronize(self, what: str, is_done: Callable[[], bool] | None = None) -> None:
        """
        Let the host wait, at the program's request.
        """
        self.refuse_while_capturing(what)
        self.host_synchronizations += 1
        self.drain(is_done)

    def drain(self, is_done: Callable[[], bool] | None = None) -> None:
        """
        Run everything submitted. Where the emulation calls this itself, it stands for a data dependency that a
        device has and CPU tensors have not; it is no synchronization of the program's.

        Args:
            is_done: Whether what is waited for has come; None waits for everything.

        Raises:
            FaultError: The program uses the device wrongly.
        """
        self.schedule.drain()
        if self.faults:
            faults, self.faults = self.faults, []
            raise faults[0]
        if self.busy if is_done is None else not is_done():
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


hardware = Device()
"""The device of this process; the emulation's own, not a name of `torch.npu`."""


def current_stream(device: Any = None) -> Stream:
    """
    The stream that commands are submitted to.
    """
    return hardware.current_stream


def default_stream(device: Any = None) -> Stream:
    """
    The stream that is current when none was chosen; nothing can be captured on it.
    """
    return hardware.default_stream


class _CurrentStream:
    """
    A context; a class, for a generator would cost three times as much on the step path.
    """

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream or hardware.current_stream

    def __enter__(self) -> None:
        self._previous = hardware.current_stream
        hardware.current_stream = self._stream

    def __exit__(self, *exc_info: object) -> None:
        hardware.current_stream = self._previous


def stream(stream: Stream | None) -> _CurrentStream:
    """
    Context in which *stream* is the current one; None changes nothing.
    """
    return _CurrentStream(stream)


def synchronize(device: Any = None) -> None:
    """
    Let the host wait for the device.
    """
    hardware.synchronize("synchronize the device")


def is_current_stream_capturing() -> bool:
    """
    Whether operations submitted to the current stream are captured instead of run.
    """
    graph = hardware.capturing
    return graph is not None and hardware.current_stream in graph.lanes
