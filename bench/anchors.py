"""
What was published, beside what we say of the same.

An anchor is a number that somebody measured elsewhere; `published.ANCHORS` lists them. One that set the constant
which predicts it says nothing about the model, and is told apart; so is one that cannot be asked. It is a report,
not a gate: what fails is listed with its reason.
"""

import enum
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import attrs

TOLERANCE = 0.2
"""How far from the measured value ours may be."""


class Standing(enum.Enum):
    """
    What an anchor can say about the model.
    """

    INDEPENDENT = "independent"
    """Its number chose no constant that predicts it."""
    CIRCULAR = "circular"
    """It chose or bounded one, or is met only by what such a number chose; the note says which."""
    WHAT_IF = "what-if"
    """It is compared with a variant of the model."""


@attrs.frozen
class Anchor:
    """
    A published number.

    Args:
        source: Where it was published.
        what: The quantity.
        measured: Its value there; the middle where a range is given.
        unit: Of both values. A gain in % is judged as such, not as a factor of 1 + gain.
        ours: Computes ours, in the same unit; None where we cannot be asked.
        conditions: Under which it was measured.
        method: "formula" for single steps, "simulator" for whole runs.
        standing: What it can say.
        assumes: Inputs that the source leaves open.
        note: Which constant it set, why it fails, why it cannot be asked.
        is_repeated: Whether it is the same measurement as the one before, under another assumption.
    """

    source: str
    what: str
    measured: float
    unit: str
    ours: Callable[[], float] | None
    conditions: str
    method: str = "formula"
    standing: Standing = Standing.INDEPENDENT
    assumes: tuple[str, ...] = ()
    note: str = ""
    is_repeated: bool = False


@attrs.frozen
class Result:
    """
    An anchor with our value; None where there is none.
    """

    anchor: Anchor
    ours: float | None

    @property
    def ratio(self) -> float | None:
        """
        Ours by the measured one.
        """
        return None if self.ours is None else self.ours / self.anchor.measured

    @property
    def is_within(self) -> bool | None:
        """
        Whether ours is near enough.
        """
        return None if self.ratio is None else abs(self.ratio - 1) <= TOLERANCE


def results(anchors: Sequence[Anchor]) -> list[Result]:
    """
    Compute ours of every anchor.
    """
    return [Result(anchor, anchor.ours() if anchor.ours else None) for anchor in anchors]


def figures(found: Sequence[Result]) -> dict[str, Any]:
    """
    All there is to say, as JSON values.
    """
    rows = [
        {
            "source": result.anchor.source,
            "what": result.anchor.what,
            "conditions": result.anchor.conditions,
            "unit": result.anchor.unit,
            "measured": result.anchor.measured,
            "ours": result.ours,
            "ratio": result.ratio,
            "is_within": result.is_within,
            "method": result.anchor.method if result.anchor.ours else None,
            "standing": result.anchor.standing.value if result.anchor.ours else None,
            "assumes": list(result.anchor.assumes),
            "note": result.anchor.note,
            "is_repeated": result.anchor.is_repeated,
        }
        for result in found
    ]
    return {"tolerance": TOLERANCE, "counts": _counts(found), "anchors": rows}


def _counts(found: Sequence[Result]) -> dict[str, dict[str, int]]:
    # A measurement under several assumptions counts once, and is met if it is under all of them.
    measurements: list[list[Result]] = []
    for result in found:
        if result.anchor.is_repeated:
            measurements[-1].append(result)
        else:
            measurements.append([result])
    counts = {}
    for standing in Standing:
        of = [
            all(r.is_within for r in same)
            for same in measurements
            if same[0].anchor.standing is standing and same[0].anchor.ours
        ]
        counts[standing.value] = {"within": of.count(True), "outside": of.count(False)}
    return counts


_TOLERANCE_TEXT = f"{TOLERANCE:.0%}".replace("%", " %")
_LINE = "{:>2}  {:<14} {:<43} {:>6} {:>6} {:<4} {:>5} {:<4} {}"


def describe(found: Sequence[Result]) -> str:
    """
    The table, and below it what belongs to each row.
    """
    heads = "", "source", "what", "theirs", "ours", "unit", "ratio", _TOLERANCE_TEXT, "standing"
    lines = [_LINE.format(*heads).rstrip()]
    for number, result in enumerate(found, 1):
        anchor, ratio = result.anchor, result.ratio
        if result.ours is None or ratio is None:
            cells = "-", anchor.unit, "-", "-", "not checkable"
        else:
            by = f"{anchor.standing.value}, {anchor.method}"
            cells = _number(result.ours), anchor.unit, f"{ratio:.2f}", "in" if result.is_within else "OUT", by
        lines.append(_LINE.format(number, anchor.source, anchor.what, _number(anchor.measured), *cells))
    lines.append("")
    for name, count in _counts(found).items():
        lines.append(f"{name}: {count['within']} of {sum(count.values())} within {_TOLERANCE_TEXT}")
    lines.append("")
    first = 1
    for text, rows in groupby(map(_remarks, found)):
        last = first + len(list(rows)) - 1
        numbers = f"{first}" if first == last else f"{first} to {last}"
        lines += textwrap.wrap(f"{numbers}: {text}", 115, subsequent_indent="    ")
        first = last + 1
    return "\n".join(lines)


def _remarks(result: Result) -> str:
    anchor = result.anchor
    assumed = f" Assumed: {'; '.join(anchor.assumes)}." if anchor.assumes else ""
    return f"{anchor.conditions}.{assumed} {anchor.note}".rstrip()


def _number(value: float) -> str:
    # Three digits, but whole numbers whole: 0 for what rounds to it, without a sign.
    return f"{value:.0f}" if abs(value) >= 100 else f"{value + 0.0:.3g}"
