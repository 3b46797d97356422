"""Runs of a program with the device behind the host, one for every seed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch._ops import OpOverload

from .device import hardware
from .operator import operator
from .recorder import Recorder, poison, selects_by_mask
from .replay import run_checked
from .schedule import Call, Explore


@contextmanager
def explore(seed: int, *, eager_operators: bool = True) -> Iterator[None]:
    """
    Let the device run behind the host within the context; at its end everything submitted has run.

    Args:
        seed: Picks the interleaving; an error that leaves the context names it.
        eager_operators: Whether operators outside graphs are submitted to streams too. vLLM on a CPU reads and
            writes tensors without asking anyone, so there only graphs, updates and events run behind the host.

    Raises:
        FaultError: The program uses the device wrongly.
    """
    hardware.drain()
    previous = hardware.schedule
    hardware.schedule = Explore(seed, host_reads=not eager_operators)
    try:
        with _EagerOperators() if eager_operators else nullcontext():
            yield
        hardware.drain()
    except Exception as exc:
        exc.add_note(f"found by explore({seed}); the same seed gives the same run")
        hardware.forget()
        raise
    finally:
        hardware.schedule = previous


class _EagerOperators(Recorder):
    """
    Submits operators to the current stream; their results are known when the stream has come that far.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if hardware.capturing is not None:
            return func(*args, **(kwargs or {}))
        if operator(func).needs_host or selects_by_mask(operator(func), args):
            stream = hardware.current_stream
            hardware.synchronize("read a value", lambda: not stream.queue)
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tasks, self.items, self.fresh = self.items, [], []
        for task in tasks:
            for output in task.outputs:
                poison(output)
            task.lane.submit(Call(lambda task=task: run_checked(task)))
        return result
