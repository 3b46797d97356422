"""Which graphs exist."""

from collections.abc import Iterable

import attrs

from .errors import PlanError
from .step_plan import BatchDescriptor, RuntimeMode


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _ascending(_plan: object, attribute: "attrs.Attribute[tuple[int, ...]]", sizes: tuple[int, ...]) -> None:
    name = attribute.name
    for size in sizes:
        if type(size) is not int or size < 1:
            msg = f"'{name}' must hold integers >= 1: {size!r}; remove it"
            raise PlanError(msg)
    if list(sizes) != sorted(set(sizes)):
        msg = f"'{name}' must ascend without repetition: {list(sizes)}; write {sorted(set(sizes))}"
        raise PlanError(msg)


@attrs.frozen
class CapturePlan:
    """
    The sizes graphs are captured for, in tokens, ascending; an empty tuple means none in that mode.

    Args:
        full_sizes: Sizes of FULL graphs: multiples of the uniform decode's query length.
        piecewise_sizes: Sizes of PIECEWISE graphs.

    Raises:
        PlanError: Sizes are not ascending positive integers.
    """

    full_sizes: tuple[int, ...] = attrs.field(default=(), converter=_sizes, validator=_ascending)
    piecewise_sizes: tuple[int, ...] = attrs.field(default=(), converter=_sizes, validator=_ascending)

    def sizes(self, mode: RuntimeMode) -> tuple[int, ...]:
        """
        The captured sizes of *mode*; none for eager.
        """
        return {
            RuntimeMode.FULL: self.full_sizes,
            RuntimeMode.PIECEWISE: self.piecewise_sizes,
            RuntimeMode.NONE: (),
        }[mode]

    def descriptors(self, *, query_len: int = 1) -> tuple[BatchDescriptor, ...]:
        """
        Every graph of the plan in capture order: PIECEWISE first, then FULL, each largest first, so that
        smaller graphs reuse the memory of larger ones.
        """
        piecewise = [BatchDescriptor(RuntimeMode.PIECEWISE, size) for size in reversed(self.piecewise_sizes)]
        full = [
            BatchDescriptor(RuntimeMode.FULL, size, size // query_len, query_len)
            for size in reversed(self.full_sizes)
        ]
        return (*piecewise, *full)
