"""What the numbers of a comparison say, in words that they bear."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .drawing import ORACLE, Document, number, short

VLLM_DEFAULT = ("full_and_piecewise", "vllm")
"""Policy and ladder of vLLM as it comes."""
TIE = 0.001
"""Two values are called equal when they differ by less than this share."""


@attrs.frozen
class Estimate:
    """
    A number with its interval; NaN for what is not known.
    """

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """
        Whether it is known how sure the number is.
        """
        return not (math.isnan(self.low) or math.isnan(self.high))

    def overlaps(self, other: "Estimate") -> bool:
        """
        Whether the intervals have a point in common; what is not known has none.
        """
        return self.low <= other.high and other.low <= self.high


def estimate_of(metrics: Mapping[str, Any], keys: tuple[str, ...]) -> Estimate:
    """
    A number of a contender; only means have an interval.
    """
    value = number(_at(metrics, keys))
    if keys[-1] != "mean":
        return Estimate(value, math.nan, math.nan)
    latency = _at(metrics, keys[:-1])
    return Estimate(value, number(latency["mean_low"]), number(latency["mean_high"]))


@attrs.frozen
class Finding:
    """
    What the numbers say of one goal.

    Args:
        goal: Its name.
        names: The best contenders; more than one where they tie, none where there is no number.
        value: What they reach.
        sentences: How that compares.
    """

    goal: str
    names: tuple[str, ...]
    value: str
    sentences: tuple[str, ...]


def findings(document: Document) -> list[Finding]:
    """
    What the numbers say of the mean TPOT, the mean TTFT and the goodput.
    """
    limits = [
        f"a {name} up to {document['slo'][key]:g} ms"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if document["slo"][key] is not None
    ]
    note = f"A request counts with {' and '.join(limits)}." if limits else "Every request counts."
    shares = {number(c["metrics"]["goodput_share"]) for c in document["contenders"] if c["name"] != ORACLE}
    if shares == {1.0}:
        note += " All requests of all contenders do, so that the rates differ only by how long the last ones take."
    return [
        _finding(document["contenders"], "mean TPOT", ("tpot_ms", "mean"), "ms", -1),
        _finding(document["contenders"], "mean TTFT", ("ttft_ms", "mean"), "ms", -1),
        _finding(
            document["contenders"], "goodput", ("goodput_requests_per_second",), "requests/s", 1, notes=(note,)
        ),
    ]


def _finding(
    contenders: Sequence[Mapping[str, Any]],
    goal: str,
    keys: tuple[str, ...],
    unit: str,
    sense: int,
    notes: tuple[str, ...] = (),
) -> Finding:
    """
    The best contenders for a goal, against vLLM's default, the oracle and whoever cannot be told from them.
    """
    known = {c["name"]: estimate_of(c["metrics"], keys) for c in contenders}
    known = {name: estimate for name, estimate in known.items() if not math.isnan(estimate.value)}
    oracle = known.pop(ORACLE, None)
    if not known:
        return Finding(goal, (), "", ("No contender has a value.", *notes))
    if sense > 0 and not any(estimate.value for estimate in known.values()):
        return Finding(goal, (), "", ("It is 0 for every contender.", *notes))

    best = max(known.values(), key=lambda estimate: sense * estimate.value)
    names = tuple(name for name, estimate in known.items() if _ties(estimate.value, best.value))
    sentences = []
    if len(names) > 1:
        tied = "All" if len(names) == len(known) else "A tie:"
        sentences.append(f"{tied} {len(names)} contenders are equal within {100 * TIE:g} %.")
    defaults = [c["name"] for c in contenders if (c["policy"], c["ladder"]) == VLLM_DEFAULT]
    ratio = _paired_ratio(contenders, names[0], keys)
    sentences += [_against_default(best, names, default, known.get(default), unit, ratio) for default in defaults]
    if not defaults:
        sentences.append("vLLM's default is not among the contenders.")
    if oracle:
        sentences.append(f"{_compare(best.value, oracle.value)} the oracle ({digits(oracle.value)} {unit}).")
    else:
        sentences.append("There is no oracle to compare with.")
    if keys[-1] == "mean":
        others = {name: known[name] for name in known if name not in names}
        # Of the default more was said already than intervals of their own can say.
        sentences += _certainty(best, others, unit, paired=defaults if ratio.has_interval else [])
    return Finding(goal, names, f"{digits(best.value)} {unit}", (*sentences, *notes))


def _paired_ratio(contenders: Sequence[Mapping[str, Any]], name: str, keys: tuple[str, ...]) -> Estimate:
    """
    The ratio of a contender's mean by that of vLLM's default over the same requests, where the document has it.
    """
    [ratios] = [c.get("versus_default") or {} for c in contenders if c["name"] == name]
    ratio = ratios.get(keys[0]) or {}
    return Estimate(*(number(ratio.get(key)) for key in ("ratio", "low", "high")))


def _against_default(
    best: Estimate, names: tuple[str, ...], default: str, its: Estimate | None, unit: str, ratio: Estimate
) -> str:
    """
    How the best, reached by *names*, compares with vLLM's default.
    """
    if default in names:
        return "vLLM's default is among the best." if len(names) > 1 else "This is vLLM's default."
    if its is None:
        return "vLLM's default has no value."
    if ratio.has_interval:
        low, high = (f"{100 * (bound - 1):+.2g} %" for bound in (ratio.low, ratio.high))
        chance = f"; over the same requests {low} to {high}"
        chance += ", so that this may be chance" if ratio.low <= 1 <= ratio.high else ""
    else:
        chance = "; their intervals overlap, so that this may be chance" if best.overlaps(its) else ""
    return f"{_compare(best.value, its.value)} vLLM's default ({digits(its.value)} {unit}){chance}."


def _certainty(best: Estimate, others: Mapping[str, Estimate], unit: str, paired: Sequence[str]) -> list[str]:
    """
    Whether the best can be told from the others, by intervals of their own; not from those compared in pairs.
    """
    if not best.has_interval:
        return ["Too few requests for an interval."]
    interval = f"Its interval, {digits(best.low)} to {digits(best.high)} {unit},"
    rivals = [name for name, estimate in others.items() if best.overlaps(estimate)]
    unpaired = [name for name in rivals if name not in paired]
    if unpaired:
        whose = " and ".join(unpaired) if len(unpaired) < 3 else f"{len(unpaired)} others"
        return [f"{interval} overlaps with that of {whose}: by intervals of their own they are not told apart."]
    if others and not rivals and all(estimate.has_interval for estimate in others.values()):
        return [f"{interval} is apart from all others'."]
    return [f"{interval[:-1]}."]


def _ties(value: float, other: float) -> bool:
    """
    Whether two numbers are called equal.
    """
    return abs(value - other) <= TIE * abs(other)


def _compare(value: float, other: float) -> str:
    """
    How a value lies to another one, in words.
    """
    if _ties(value, other):
        return "Equal to"
    if other <= 0 or value < 0:
        return "Above" if value > other else "Below"
    ratio = value / other
    if ratio >= 3:
        return f"{short(ratio)} times"
    return f"{short(100 * abs(ratio - 1))} % {'above' if ratio > 1 else 'below'}"


def digits(value: float) -> str:
    """
    A measured number, with at least four digits.
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def _at(values: Any, keys: Sequence[str]) -> Any:
    """
    What lies under *keys*.
    """
    for key in keys:
        values = values[key]
    return values
