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


def _cases(_plan: object, _attribute: object, cases: tuple[int, ...]) -> None:
    if not cases or any(type(n) is not int or n < 0 for n in cases) or list(cases) != sorted(set(cases)):
        msg = f"'lora_cases' must be one or more integers >= 0, ascending without repetition: {list(cases)}"
        raise PlanError(msg)


@attrs.frozen
class CapturePlan:
    """
    The sizes graphs are captured for, in tokens, ascending; an empty tuple means none in that mode.

    Args:
        full_sizes: Sizes of FULL graphs: multiples of the uniform decode's query length.
        piecewise_sizes: Sizes of PIECEWISE graphs.
        lora_cases: Numbers of active LoRA adapters that each size is captured for, ascending; 0 is the base model
            alone. A batch uses the smallest case that holds its number.

    Raises:
        PlanError: Sizes are not ascending positive integers, or there is no LoRA case.
    """

    full_sizes: tuple[int, ...] = attrs.field(default=(), converter=_sizes, validator=_ascending)
    piecewise_sizes: tuple[int, ...] = attrs.field(default=(), converter=_sizes, validator=_ascending)
    lora_cases: tuple[int, ...] = attrs.field(default=(0,), converter=_sizes, validator=_cases)

    def sizes(self, mode: RuntimeMode) -> tuple[int, ...]:
        """
        The captured sizes of *mode*; none for eager.
        """
        return {
            RuntimeMode.FULL: self.full_sizes,
            RuntimeMode.PIECEWISE: self.piecewise_sizes,
            RuntimeMode.NONE: (),
        }[mode]

    def descriptors(self, *, query_len: int = 1, role: str = "target") -> tuple[BatchDescriptor, ...]:
        """
        Every graph of the plan in capture order: PIECEWISE first, then FULL, each largest first, with the most
        adapters first, so that smaller graphs reuse the memory of larger ones.
        """
        return tuple(
            self.descriptor(mode, size, case, query_len=query_len, role=role)
            for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL)
            for size in reversed(self.sizes(mode))
            for case in reversed(self.lora_cases)
        )

    @staticmethod
    def descriptor(
        mode: RuntimeMode, size: int, lora_case: int = 0, *, query_len: int = 1, role: str = "target"
    ) -> BatchDescriptor:
        """
        The key of one graph.
        """
        if mode is RuntimeMode.FULL:
            return BatchDescriptor(mode, size, size // query_len, query_len, lora_case, role)
        return BatchDescriptor(mode, size, num_active_loras=lora_case, role=role)
