"""How long the passes of one mode take: a sum of terms, fitted to what was measured."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import mul

import attrs

from .cost_model import StepLoad

MOST = 1e15
"""Of any number of a fit: none that is measured comes near it, and no sum of products of such overflows."""
_LEAST_FACTOR, _MOST_FACTOR = 1e-3, 1e3


def token_terms(num_tokens: int, knots: Sequence[int], share: float) -> list[float]:
    """
    What the time of a pass is a sum of, first part: a constant, tokens after padding, by how much they exceed each
    knot, and the *share* of experts they meet.
    """
    return [1.0, num_tokens, *(max(0, num_tokens - knot) for knot in knots), share]


def load_terms(load: StepLoad) -> tuple[float, ...]:
    """
    The second part: decodes and what they read, both once more beside a prefill, prefilled tokens, their pairs.
    """
    decodes, context = load.num_decodes, load.decode_context
    mixed = (decodes, context) if load.num_prefill_tokens else (0, 0.0)
    return (decodes, context, *mixed, load.num_prefill_tokens, load.prefill_pairs)


def host_terms(load: StepLoad) -> tuple[float, ...]:
    """
    What the host's time for a step is a sum of: a constant, requests, a prefill, prefilled tokens.
    """
    return (1.0, load.num_sampled, float(load.num_prefill_tokens > 0), load.num_prefill_tokens)


@attrs.frozen(kw_only=True)
class PassFit:
    """
    The passes of one mode.

    Args:
        knots: Where the slope over tokens may grow.
        token_coefficients: Of `token_terms`, in seconds.
        load_coefficients: Of `load_terms`, in seconds.
        corrections: Factor by captured size.
        host_coefficients: Of `host_terms`, in seconds: how long the host is busy with a pass. Empty where host and
            device are one.
        least: The fewest tokens that were measured.
        most: The most of everything that was measured, each by itself: tokens after padding, then the fields of
            `StepLoad`.
        has_mixed: Whether decodes beside a prefill were measured.
    """

    knots: tuple[int, ...]
    token_coefficients: tuple[float, ...]
    load_coefficients: tuple[float, ...]
    corrections: Mapping[int, float]
    host_coefficients: tuple[float, ...]
    least: int
    most: tuple[float, ...]
    has_mixed: bool

    def errors(self, name: str, *, has_host: bool) -> list[str]:
        """
        What is wrong with its numbers: name, rule and what was found.

        Args:
            name: What it is called.
            has_host: Whether host and device are two.
        """
        found = []
        if not all(type(x) is int and 0 < x <= MOST for x in self.knots) or any(
            low >= high for low, high in pairwise(self.knots)
        ):
            found.append(f"'{name}.knots' must be ascending whole numbers > 0: {list(self.knots)}")
        for field, count in (
            ("token_coefficients", len(token_terms(1, self.knots, 0.0))),
            ("load_coefficients", len(load_terms(StepLoad()))),
            ("host_coefficients", len(host_terms(StepLoad())) if has_host else 0),
            ("most", 1 + len(attrs.fields(StepLoad))),
        ):
            found += wrong(f"{name}.{field}", getattr(self, field), count)
        if not all(size > 0 for size in self.corrections) or not all(
            _LEAST_FACTOR <= factor <= _MOST_FACTOR for factor in self.corrections.values()
        ):
            found.append(
                f"'{name}.corrections' must be factors of {_LEAST_FACTOR:g} to {_MOST_FACTOR:g} by sizes > 0: "
                f"{dict(self.corrections)}"
            )
        if not (0 < self.least <= MOST):
            found.append(f"'{name}.least' must be > 0 and <= {MOST:g}: {self.least}")
        return found

    def knows(self, load: StepLoad) -> bool:
        """
        Whether work of this kind was measured: decodes, prefills, or decodes beside a prefill.
        """
        if load.num_decodes and load.num_prefill_tokens:
            return self.has_mixed
        _, most_decodes, _, most_prefill_tokens, *_ = self.most
        return (not load.num_decodes or most_decodes > 0) and (
            not load.num_prefill_tokens or most_prefill_tokens > 0
        )


def wrong(name: str, numbers: Iterable[float], count: int) -> list[str]:
    """
    What is said of *numbers* that are not *count* numbers from 0 to `MOST`; nothing if they are.
    """
    found = list(numbers)
    if len(found) == count and all(0 <= x <= MOST for x in found):
        return []
    return [f"'{name}' must be {count} numbers from 0 to {MOST:g}: {found}"]


def weighted(coefficients: Sequence[float], values: Sequence[float]) -> float:
    """
    The sum of the terms.
    """
    return float(sum(map(mul, coefficients, values)))


def correction(corrections: Mapping[int, float], num_tokens: int) -> float:
    """
    The factor at *num_tokens*: of the nearest sizes below and above, in proportion; 1 without any.
    """
    if not corrections:
        return 1.0
    factor = corrections.get(num_tokens)
    if factor is not None:
        return factor
    sizes = sorted(corrections)
    i = bisect_left(sizes, num_tokens)
    if i in (0, len(sizes)):
        return corrections[sizes[min(i, len(sizes) - 1)]]
    low, high = sizes[i - 1], sizes[i]
    before, after = corrections[low], corrections[high]
    return before + (after - before) * (num_tokens - low) / (high - low)
