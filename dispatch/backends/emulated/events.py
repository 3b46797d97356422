"""Events: what streams wait for."""

import itertools
from typing import Any

import attrs

from .device import Stream, current_stream, hardware
from .faults import LostRecordError
from .schedule import Call


class Event:
    """
    A mark in a stream that other streams, or the host, can wait for.
    """

    _ids = itertools.count()

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.event_id = next(self._ids)
        self._submitted = 0
        self._done = 0
        self._captured: Any = None

    def record(self, stream: Stream | None = None) -> None:
        """
        Mark what *stream* holds now.
        """
        stream = stream or current_stream()
        graph = hardware.capturing
        if graph is not None and stream in graph.lanes:
            self._captured = graph.record_mark(stream)
            return
        self._captured = None
        self._submitted += 1
        number = self._submitted
        stream.submit(Call(lambda: self._fire(number)))

    def wait(self, stream: Stream | None = None) -> None:
        """
        Let *stream* wait for the last mark made so far.
        """
        stream = stream or current_stream()
        graph = hardware.capturing
        if self._captured is not None and graph is not None and self._captured in graph.recorder.items:
            graph.wait_mark(stream, self._captured)
            return
        if graph is not None and stream in graph.lanes:
            raise RuntimeError(f"a capturing stream cannot wait for uncaptured work: {self}")
        if self._captured is not None:
            raise RuntimeError(f"only its capture can wait for an event recorded in it: {self}")
        if self._submitted:
            stream.submit(_Wait(self, self._submitted))

    def query(self) -> bool:
        """
        Whether the last mark was reached.
        """
        hardware.refuse_while_capturing("query an event")
        return self._done >= self._submitted

    def synchronize(self) -> None:
        """
        Let the host wait for the last mark.
        """
        number = self._submitted
        hardware.synchronize("synchronize an event", lambda: self.reached(number))

    def _fire(self, number: int) -> None:
        self._done = max(self._done, number)

    def reached(self, number: int) -> bool:
        """
        Whether mark *number* was reached.
        """
        return self._done >= number

    def __repr__(self) -> str:
        return f"event {self.event_id}"


@attrs.define
class _Wait:
    event: Event
    number: int

    def is_ready(self) -> bool:
        return self.event.reached(self.number)

    def blocked_on(self) -> str:
        return f"{self.event}, mark {self.number}"

    advance = run_through = is_ready


class ExternalEvent:
    """
    A flag on the device, by which a stream outside a graph lets the graph go on; `wait` may precede `record`.

    With value events (`Limits.auto_reset`) a satisfied wait clears the flag and `reset` does nothing; before,
    the flag stands until it is reset. Either way it is one flag: two records without a wait between are one.
    """

    _ids = itertools.count()

    def __init__(self) -> None:
        self.event_id = next(self._ids)
        self.graph = ""
        """Which graph waits for it; the emulation's own."""
        self.num_records = 0
        self._set_by = 0
        """The record that set the flag; 0 if it is clear."""
        self._consumed = 0
        self._awaited = False

    def record(self, stream: Stream | None = None) -> None:
        """
        Set the flag when all that *stream* holds now has run.
        """
        stream = stream or current_stream()
        self._awaited = False
        graph = hardware.capturing
        if graph is not None and stream in graph.lanes:
            graph.note_call(stream, self.set)
        else:
            stream.submit(Call(self.set, self))

    def wait(self, stream: Stream | None = None) -> None:
        """
        Let *stream* wait until the flag is set.

        Raises:
            RuntimeError: It is waited for already.
        """
        if self._awaited and hardware.limits.auto_reset:
            raise RuntimeError(
                "External event: A single record operation cannot be associated with multiple wait operations."
            )
        self._awaited = True
        stream = stream or current_stream()
        graph = hardware.capturing
        if graph is not None and stream in graph.lanes:
            graph.note_wait(stream, self)
            self.graph = f" of {graph.name}"
        else:
            stream.submit(_ExternalWait(self))

    def reset(self, stream: Stream | None = None) -> None:
        """
        Clear the flag when all that *stream* holds now has run.
        """
        stream = stream or current_stream()
        if hardware.limits.auto_reset:
            return
        graph = hardware.capturing
        if graph is not None and stream in graph.lanes:
            graph.note_call(stream, self.clear)
        else:
            stream.submit(Call(self.clear))

    @property
    def is_set(self) -> bool:
        """
        Whether a wait is satisfied now; the emulation's own.
        """
        return self._set_by > 0

    def set(self) -> None:
        """
        Execute a record; the emulation's own.
        """
        self.num_records += 1
        if self._set_by > self._consumed:
            hardware.faults.append(
                LostRecordError(
                    f"record {self.num_records} of {self} is lost: record {self._set_by} has not been waited for, "
                    "and an event recorded twice is recorded once"
                )
            )
        self._set_by = self.num_records

    def consume(self) -> None:
        """
        Execute a satisfied wait; the emulation's own.
        """
        self._consumed = self._set_by
        if hardware.limits.auto_reset:
            self._set_by = 0

    def clear(self) -> None:
        """
        Execute a reset; the emulation's own.
        """
        if self._set_by > self._consumed:
            hardware.faults.append(
                LostRecordError(
                    f"record {self._set_by} of {self} is lost: it came after the wait it was not meant for, and "
                    "the reset behind that wait erased it"
                )
            )
        self._set_by = 0

    def __repr__(self) -> str:
        return f"external event {self.event_id}{self.graph}"


@attrs.define
class _ExternalWait:
    event: ExternalEvent

    def is_ready(self) -> bool:
        return self.event.is_set

    def blocked_on(self) -> str:
        return f"{self.event}, recorded {self.event.num_records} times so far"

    def advance(self) -> bool:
        self.event.consume()
        return True

    def run_through(self) -> bool:
        return self.is_ready() and self.advance()
