"""The plots of a comparison."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from aclgraph_dispatch.bench import plots

from .documents import CONTENDERS, document, empty_document

Plot = Callable[[dict[str, Any]], str]

SVG = "{http://www.w3.org/2000/svg}"
PLOTS: dict[str, Plot] = {
    "tpot": lambda document: plots.latency(document, "tpot_ms"),
    "ttft": lambda document: plots.latency(document, "ttft_ms"),
    "distance": plots.oracle_distance,
    "routes": plots.routes_over_time,
    "steps": plots.step_times,
    "padding": plots.padding_by_size,
}
each_plot = pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)


@functools.cache
def drawn(plot: Plot) -> str:
    """
    The plot of ten contenders.
    """
    return plot(document())


def texts(svg: str) -> list[str]:
    """
    All texts; a name in several lines is one text.
    """
    root = ElementTree.fromstring(svg)
    return [
        " ".join(" ".join(element.itertext()).split()) for element in root.iter(f"{SVG}g") if _is_text(element)
    ]


def _is_text(element: ElementTree.Element) -> bool:
    return element.get("id", "").partition("-")[2].startswith("text_")


def marks(svg: str) -> Iterator[list[ElementTree.Element]]:
    """
    Of each group of marks, what it draws.
    """
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") == "marks":
            shapes = [*group.iter(f"{SVG}path"), *group.iter(f"{SVG}use")]
            definitions = [shape for part in group.iter(f"{SVG}defs") for shape in part.iter()]
            yield [shape for shape in shapes if shape not in definitions]


def named(name: str) -> dict[str, Any]:
    """
    A comparison with a contender called *name*.
    """
    renamed = document()
    renamed["contenders"] = renamed["contenders"][-2:]
    renamed["contenders"][0]["name"] = name
    return renamed


@each_plot
def test_same_every_time(plot: Plot) -> None:
    """
    The same document gives the same bytes.
    """
    assert drawn(plot) == plot(document())


@each_plot
def test_names(plot: Plot) -> None:
    """
    Every contender that has data is named, in text that can be searched.
    """
    expected = {name for name, policy, _, _ in CONTENDERS}
    if plot is plots.padding_by_size:
        expected -= {"eager", "oracle"}
    if plot is plots.oracle_distance:
        expected -= {"oracle"}

    assert expected <= set(texts(drawn(plot)))


@each_plot
def test_marks(plot: Plot) -> None:
    """
    Every group of marks shows something, and there is one at least for each contender drawn.
    """
    groups = list(marks(drawn(plot)))

    assert all(groups)
    assert sum(map(len, groups)) >= len(CONTENDERS) - 2


@each_plot
def test_no_data(plot: Plot) -> None:
    """
    Where nothing was measured, or nobody compared, the plot says so.
    """
    assert ["no data"] == [text[:7] for text in texts(plot(empty_document()))]
    assert ["no data"] == [text[:7] for text in texts(plot(document() | {"contenders": []}))]


def test_no_oracle() -> None:
    """
    Without an oracle there is no distance to it, and the plot says why.
    """
    without = document()
    without["contenders"].pop()

    assert ["no data: there is no contender named “oracle”"] == texts(plots.oracle_distance(without))


@pytest.mark.parametrize("tpot_ms", [None, 0.0, -1.0, float("nan")])
def test_useless_oracle(tpot_ms: float | None) -> None:
    """
    An oracle without a usable TPOT leaves the distances in E2EL.
    """
    useless = document()
    useless["contenders"][-1]["metrics"]["tpot_ms"]["mean"] = tpot_ms
    notes = [text for text in texts(plots.oracle_distance(useless)) if " / " in text]

    assert len(CONTENDERS) - 1 == len(notes)
    assert all(re.fullmatch(r"\? / [\d.,]+ %", note) for note in notes)


def test_partial() -> None:
    """
    A contender without a mean is left out, one without an interval is not.
    """
    partial = document()
    partial["contenders"][0]["metrics"]["tpot_ms"]["mean"] = None
    partial["contenders"][1]["metrics"]["tpot_ms"] |= {"mean_low": None, "mean_high": None, "p99": None}
    shown = texts(plots.latency(partial, "tpot_ms"))

    assert "eager" not in shown
    assert CONTENDERS[1][0] in shown


def test_distances() -> None:
    """
    The distances are those of the means.
    """
    compared = document()
    compared["contenders"] = compared["contenders"][-2:]
    for contender, tpot_ms, e2el_ms in zip(compared["contenders"], (12.0, 10.0), (900.0, 1000.0), strict=True):
        contender["metrics"]["tpot_ms"]["mean"], contender["metrics"]["e2el_ms"]["mean"] = tpot_ms, e2el_ms

    assert "20.0 % / -10.0 %" in texts(plots.oracle_distance(compared))


def test_best_first() -> None:
    """
    Contenders are in the order of their mean.
    """
    shown = [text for text in texts(plots.latency(document(), "tpot_ms")) if text in {c[0] for c in CONTENDERS}]
    means = {c["name"]: c["metrics"]["tpot_ms"]["mean"] for c in document()["contenders"]}

    assert sorted(means, key=means.__getitem__) == shown


@pytest.mark.parametrize(
    ("means_ms", "label"),
    [((20, 90), "TPOT, ms"), ((20, 210), "TPOT, ms (log)"), ((9e3, 1e4), "TPOT, s"), ((0, 10), "TPOT, ms")],
)
def test_units(means_ms: tuple[float, float], label: str) -> None:
    """
    Seconds for long times, a logarithmic axis where they are positive and span more than a decade.
    """
    scaled = document()
    scaled["contenders"] = scaled["contenders"][:2]
    for contender, mean_ms in zip(scaled["contenders"], means_ms, strict=True):
        contender["metrics"]["tpot_ms"] = dict.fromkeys(contender["metrics"]["tpot_ms"], mean_ms)

    assert label in texts(plots.latency(scaled, "tpot_ms"))


@each_plot
@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "a & b",
        "$x^2$",
        "规划 计划",
        "x\x00\ny\ud800",
        "",
        "#010203 url(#a)",
        "y" * 400,
    ],
    ids=["tags", "ampersand", "formula", "other letters", "no letters", "empty", "colour", "long"],
)
def test_odd_names(plot: Plot, name: str) -> None:
    """
    Names are text, whatever is in them, and never break the picture.
    """
    shown = "".join(texts(plot(named(name)))).replace(" ", "")
    expected = {"": "(noname)", "x\x00\ny\ud800": "xy", "y" * 400: "yyyy…yyyy"}.get(name, name.replace(" ", ""))

    assert expected in shown


def test_ids() -> None:
    """
    All ids on a page differ, and every reference is to an id of the same picture.
    """
    page = [drawn(plot) for plot in PLOTS.values()]
    ids = Counter(name for svg in page for name in re.findall(r' id="([^"]*)"', svg))

    assert ids
    assert set() == {name for name, count in ids.items() if count > 1}
    for svg in page:
        references = set(re.findall(r'(?:href="#|url\(#)([^")]*)', svg))
        assert references
        assert references <= set(re.findall(r' id="([^"]*)"', svg))


@each_plot
def test_colours(plot: Plot) -> None:
    """
    No colour is fixed: all are the page's, or may be set by it.
    """
    svg = drawn(plot)

    assert "currentColor" in svg
    assert set() == set(re.findall(r"(?:fill|stroke): (?!none|currentColor|var\(|url\()[^;\"]*", svg))


def test_gaps() -> None:
    """
    An interval without steps has no share of any mode.
    """
    gaps = document()
    series = {"edges_seconds": [0, 1, 2], "FULL": [0, 4], "PIECEWISE": [0, 0], "NONE": [0, 0]}
    gaps["contenders"] = [gaps["contenders"][0] | {"series": gaps["contenders"][0]["series"]}]
    gaps["contenders"][0]["series"] |= {"routes_over_time": series}
    heights = {
        y
        for group in marks(plots.routes_over_time(gaps))
        for shape in group
        for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", shape.get("d", ""))
    }

    assert 2 == len(heights)


def test_counts_span_decades() -> None:
    """
    Counts that span decades are on a logarithmic axis, few ones are not.
    """
    few = document()
    few["contenders"] = few["contenders"][1:3]
    for contender in few["contenders"]:
        sizes = contender["series"]["padding_by_size"]
        sizes["paddings"] = [3 for _ in sizes["paddings"]]

    assert "padded tokens (log)" in texts(drawn(plots.padding_by_size))
    assert "padded tokens" in texts(plots.padding_by_size(few))


def test_leaves_matplotlib_alone() -> None:
    """
    The settings of matplotlib are as before.
    """
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.oracle_distance(document())

    assert before == dict(matplotlib.rcParams)
