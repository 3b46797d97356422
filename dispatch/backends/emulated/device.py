"""The emulated device: its streams, and how many of them graphs may hold."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEFAULT_STREAM_LIMIT = 1984
"""Streams of an Atlas A2 or A3 (CANN, aclrtCreateStream)."""

NO_STREAM_RESOURCE = (
    "aclmdlRICaptureBegin failed, error code is 207008: the stream resource is insufficient "
    "(ACL_ERROR_RT_NO_STREAM_RESOURCE, EL0009); {held} of {limit} streams are held by captured graphs"
)


class Stream:
    """
    A queue of operations. Inline, every operation has run when its call returns, so waiting is free.
    """

    _ids = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.stream_id = next(self._ids)

    def wait_stream(self, stream: "Stream") -> None:
        """
        Let later operations wait for all that *stream* holds now.
        """

    def synchronize(self) -> None:
        """
        Let the host wait for the stream.

        Raises:
            RuntimeError: A graph is being captured.
        """
        device.refuse_while_capturing("synchronize a stream")

    def query(self) -> bool:
        """
        Whether everything submitted has run.
        """
        device.refuse_while_capturing("query a stream")
        return True

    def __repr__(self) -> str:
        return f"Stream({self.stream_id})"


class Device:
    """
    State of the one device of this process.
    """

    def __init__(self) -> None:
        self.default_stream = Stream()
        self.current_stream = self.default_stream
        self.capturing: Any = None
        """The graph being captured, of type `NPUGraph`."""
        self.stream_limit = DEFAULT_STREAM_LIMIT
        self.streams_held = 0

    def acquire_stream(self) -> None:
        """
        Take a stream for a graph.

        Raises:
            RuntimeError: None is left, with the text CANN gives.
        """
        if self.streams_held >= self.stream_limit:
            raise RuntimeError(NO_STREAM_RESOURCE.format(held=self.streams_held, limit=self.stream_limit))
        self.streams_held += 1

    def release_stream(self) -> None:
        """
        Give a graph's stream back.
        """
        self.streams_held -= 1

    def refuse_while_capturing(self, what: str) -> None:
        """
        Raise what the device raises when the host asks for something that cannot be captured.
        """
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


device = Device()


def current_stream(device_index: Any = None) -> Stream:
    """
    The stream that operations are submitted to.
    """
    return device.current_stream


def default_stream(device_index: Any = None) -> Stream:
    """
    The stream that is current when none was chosen; nothing can be captured on it.
    """
    return device.default_stream


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """
    Make *stream* the current one.
    """
    previous = device.current_stream
    device.current_stream = stream
    try:
        yield
    finally:
        device.current_stream = previous


def synchronize(device_index: Any = None) -> None:
    """
    Let the host wait for the device.
    """
    device.refuse_while_capturing("synchronize the device")


def is_current_stream_capturing() -> bool:
    """
    Whether operations submitted now are captured instead of run.
    """
    return device.capturing is not None
