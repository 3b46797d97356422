"""The HTML page of a comparison: words, pictures and a table in one file that needs no other."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import attrs
import jinja2
from markupsafe import Markup

from . import plots
from .drawing import ORACLE, Document
from .files import whole_file
from .findings import Estimate, digits, estimate_of, findings
from .table import served


@attrs.frozen
class Column:
    """
    A column of the table.

    Args:
        group: What it is about.
        label: Which number of it.
        keys: Where the number lies within a contender's metrics.
        unit: Of the number as shown.
        factor: From the document's unit to that one.
        sense: 1 where more is better, -1 where less is, 0 where neither is.
    """

    group: str
    label: str
    keys: tuple[str, ...]
    unit: str = ""
    factor: float = 1.0
    sense: int = 0


COLUMNS = (
    *(
        Column(name, label, (f"{name.lower()}_ms", label), "ms", sense=-1)
        for name in ("TPOT", "TTFT", "ITL", "E2EL")
        for label in ("mean", "p50", "p90", "p95", "p99")
    ),
    Column("goodput", "rate", ("goodput_requests_per_second",), "requests/s", sense=1),
    Column("goodput", "share", ("goodput_share",), "%", 100, sense=1),
    Column("throughput", "output", ("output_tokens_per_second",), "tokens/s", sense=1),
    Column("throughput", "requests", ("requests_per_second",), "requests/s", sense=1),
    Column("run", "duration", ("duration_seconds",), "s", sense=-1),
    Column("run", "steps", ("num_steps",)),
    Column("run", "preemptions", ("num_preemptions",), sense=-1),
    Column("device", "idle", ("device_idle_share",), "%", 100),
    Column("tokens", "padding", ("padding_share",), "%", 100),
    *(
        Column(group, label, (key, mode), "%", 100)
        for group, key in (("steps", "route_shares"), ("step time", "time_shares"))
        for mode, label in (("FULL", "FULL"), ("PIECEWISE", "PIECEWISE"), ("NONE", "eager"))
    ),
    Column("capture", "time", ("capture_seconds",), "s"),
    Column("capture", "graphs", ("graphs",)),
    Column("capture", "streams", ("streams",)),
)

FIGURES = (
    (
        "TPOT",
        "Time per output token by contender, the best on top. The bar is the 95 % bootstrap interval of the mean.",
        lambda document: plots.latency(document, "tpot_ms"),
    ),
    (
        "TTFT",
        "Time to first token by contender, the best on top. The bar is the 95 % bootstrap interval of the mean.",
        lambda document: plots.latency(document, "ttft_ms"),
    ),
    (
        "Distance to the oracle",
        "How far the mean TPOT and the mean E2EL lie above those of a run without padding and host time.",
        plots.oracle_distance,
    ),
    ("Routes over time", "How the steps of an interval ran. Gaps: no step.", plots.routes_over_time),
    ("Step times", "How many steps took how long, by how they ran.", plots.step_times),
    ("Padding by size", "Tokens computed and dropped at each captured size.", plots.padding_by_size),
)


@attrs.frozen
class Cell:
    """
    A cell of the table: its text, what it is sorted by (None: last), a note, whether it is the best of its column.
    """

    text: str
    value: float | None
    note: str
    is_best: bool


def write_report(document: Document, path: str | os.PathLike[str]) -> None:
    """
    Write the page of a comparison.

    Raises:
        ConfigError: The file cannot be written there.
    """
    page = render(document)
    with whole_file(path) as file:
        file.write(page)


def render(document: Document) -> str:
    """
    The page of a comparison, as HTML.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        document=document,
        findings=findings(document),
        columns=COLUMNS,
        rows=list(zip(document["contenders"], table(document["contenders"]), strict=True)),
        # Made by plots.py, where every text is escaped.
        figures=[(title, caption, Markup(plot(document))) for title, caption, plot in FIGURES],
        oracle=ORACLE,
        served=served(document["trace"]),
        show=_show,
    )


def table(contenders: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    """
    The cells of each contender; the best of a column is sought among those that can be had, so not the oracle.
    """
    estimates = [[estimate_of(c["metrics"], column.keys) for column in COLUMNS] for c in contenders]
    rows = [[_cell(column, estimate) for column, estimate in zip(COLUMNS, row, strict=True)] for row in estimates]
    real = [row for contender, row in zip(contenders, rows, strict=True) if contender["name"] != ORACLE]
    for i, column in enumerate(COLUMNS):
        values = {cell.value for row in real if (cell := row[i]).value is not None}
        if column.sense and len(values) > 1:
            best = max(values, key=lambda value: column.sense * value)
            for row in real:
                row[i] = attrs.evolve(row[i], is_best=row[i].value == best)
    return rows


def _cell(column: Column, estimate: Estimate) -> Cell:
    """
    A number as the table shows it.
    """
    if math.isnan(estimate.value):
        return Cell("", None, "", False)
    value = column.factor * estimate.value
    note = f"{digits(estimate.low)} to {digits(estimate.high)}" if estimate.has_interval else ""
    return Cell(digits(value) if column.unit else f"{value:,.0f}", value, note, False)


def _show(value: Any) -> str:
    """
    A value of the settings for people.
    """
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case float():
            return f"{value:.6g}"
        case int() | str():
            return str(value)
    return json.dumps(value)
