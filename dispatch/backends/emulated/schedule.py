"""
When the commands of streams run.

Theory of operation
-------------------
The host submits commands to streams. A stream is a queue: its commands run in order. What runs when, between
streams and relative to the host, is the schedule's business:

* `Inline` runs whatever can run before the submitting call returns. A command that waits for an event not yet
  recorded stays in its queue, with all that follows, until the record comes.
* `Explore` lets the device run behind the host. After every submission it makes a number of steps, on streams
  picked by a seed; the same seed gives the same run. What depends on luck on a device depends on the seed here.

When the host waits, the schedule must empty the queues. If it cannot, nobody is left who could record the missing
event, and that is a deadlock (see `Device.drain`).
"""

import random
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from .device import Stream


class Command(Protocol):
    """
    An entry of a stream's queue.
    """

    def is_ready(self) -> bool:
        """
        Whether it can advance.
        """
        ...

    def blocked_on(self) -> str:
        """
        What it waits for, if it is not ready.
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

    def is_ready(self) -> bool:
        return True

    def blocked_on(self) -> str:
        return "nothing"

    def advance(self) -> bool:
        self.function()
        return True

    run_through = advance


class Inline:
    """
    Everything that can run has run when the submitting call returns.
    """

    def __init__(self) -> None:
        self.busy: dict[Stream, None] = {}
        """Streams whose queues are not empty, in the order in which they filled."""
        self._settling = False

    def submit(self, stream: "Stream", command: Command) -> None:
        if not stream.queue and command.run_through():
            # The usual case; only where a stream is stuck can something have been set free.
            if self.busy:
                self.drain()
            return
        stream.queue.append(command)
        self.busy[stream] = None
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
                for stream in list(self.busy):
                    while stream.queue and stream.queue[0].is_ready():
                        moved = True
                        if stream.queue[0].run_through():
                            stream.queue.popleft()
                    if not stream.queue:
                        del self.busy[stream]
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
        self.busy: dict[Stream, None] = {}
        self.host_reads = host_reads
        self._random = random.Random(seed)
        # How many steps follow a submission differs by seed, from "almost none" to "almost all".
        self._eagerness = self._random.choice((0.0, 0.3, 0.7, 0.95))
        self._weights: dict[Stream, float] = {}

    def submit(self, stream: "Stream", command: Command) -> None:
        stream.queue.append(command)
        self.busy[stream] = None
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
        ready = [stream for stream in self.busy if stream.queue[0].is_ready()]
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
                del self.busy[stream]
        return True
