"""
What all plots of a comparison share: colours, axes, and how a figure becomes an SVG that a page can hold.

The SVGs are made to stand inline in one HTML page. Text and axes take the page's colour (`currentColor`), so that
they suit a light and a dark page; ids start with the plot's name, so that they do not meet; text stays text. What
shows data is of the class "marks". Colours are those of Okabe and Ito (Color Universal Design, 2008) that have a
contrast of 3:1 on white and on near black, unless the page sets its own, and what they say is said by shape, hatch
or label too.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from xml.etree import ElementTree

import attrs
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

Document = Mapping[str, Any]

ORACLE = "oracle"
"""The contender that distances are taken to."""

INK, BLUE, ORANGE, GREY, HATCH = "#010203", "#0072b2", "#d55e00", "#868686", "#fffefd"
_PAGE_COLOURS = {
    INK: "currentColor",
    BLUE: f"var(--blue, {BLUE})",
    ORANGE: f"var(--orange, {ORANGE})",
    GREY: f"var(--grey, {GREY})",
    HATCH: f"var(--card, {HATCH})",
}
"""What stands for a colour in the finished SVG: the page may choose it."""
_WIDTH = 640
_PIXELS = 72
"""Of an inch: the SVG's unit is then a pixel of the page."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.labelsize": 12,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "hatch.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "figure.constrained_layout.use": True,
} | dict.fromkeys(
    ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"], INK
)


@attrs.frozen
class Mode:
    """
    How a runtime mode is drawn.
    """

    label: str
    colour: str
    hatch: str
    linestyle: Literal["solid", "dashed", "dotted"]


MODES = {
    "FULL": Mode("FULL", BLUE, "", "solid"),
    "PIECEWISE": Mode("PIECEWISE", ORANGE, "....", "dashed"),
    "NONE": Mode("eager", GREY, "////", "dotted"),
}


def number(value: Any) -> float:
    """
    A number of the document, NaN where it is null or no finite one.
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def style(name: str) -> Any:
    """
    Settings that hold while a plot is made; the salt makes matplotlib's random ids the same every time.
    """
    return matplotlib.rc_context(_STYLE | {"svg.hashsalt": name})


def no_data(name: str, reason: str = "no data") -> str:
    """
    A plot that says that there is nothing to draw, rather than an empty one.
    """
    with style(name):
        figure = Figure(figsize=(_WIDTH / _PIXELS, 80 / _PIXELS))
        figure.text(0.5, 0.5, reason, ha="center", va="center")
        return svg(figure, name)


def rows_figure(names: Sequence[str]) -> tuple[Figure, Axes, np.ndarray[Any, np.dtype[np.int_]]]:
    """
    A plot with a row for each contender, the first at the top.
    """
    labels = [_label(name, 26) for name in names]
    num_lines = sum(max(1.6, label.count("\n") + 1.4) for label in labels)
    figure = Figure(figsize=(_WIDTH / _PIXELS, (110 + 18 * num_lines) / _PIXELS))
    axes = figure.add_subplot()
    positions = np.arange(len(names))
    axes.set_yticks(positions, labels, multialignment="right")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure, axes, positions


def note_rows(axes: Axes, positions: Sequence[int] | np.ndarray[Any, Any], notes: Sequence[str]) -> None:
    """
    Write a figure to the right of each row.
    """
    for position, note in zip(positions, notes, strict=True):
        axes.text(1.02, position, note, va="center", transform=axes.get_yaxis_transform())


def panels_figure(names: Sequence[str], height: int) -> tuple[Figure, list[Axes]]:
    """
    A small plot for each contender, two in a row, on the same axes.
    """
    labels = [_label(name, 40) for name in names]
    num_columns = min(2, len(names))
    num_rows = -(-len(names) // num_columns)
    num_lines = sum(max(label.count("\n") for label in labels[i : i + 2]) for i in range(0, len(labels), 2))
    figure = Figure(figsize=(_WIDTH / _PIXELS, (80 + height * num_rows + 16 * num_lines) / _PIXELS))
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat
    panels = list(grid)
    for axes, label in zip(panels, labels, strict=False):
        axes.set_title(label, loc="left", pad=4)
        axes.grid(axis="y")
    for axes in panels[len(names) :]:
        axes.set_visible(False)
        panels[len(names) - num_columns].tick_params(labelbottom=True)
    return figure, panels[: len(names)]


def _label(name: str, width: int) -> str:
    """
    A name in lines of *width* characters, its middle left out where it is very long.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in name).split()) or "(no name)"
    if len(text) > 4 * width - 20:
        text = f"{text[: 2 * width - 12]}…{text[-2 * width + 12 :]}"
    return textwrap.fill(text, width)


def short(value: float) -> str:
    """
    Three digits of a number, all digits before the point.
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def value_scale(axes: Axes, which: Literal["x", "y"], values: np.ndarray[Any, Any]) -> None:
    """
    A logarithmic axis where the values are positive and span more than a decade, else a linear one.
    """
    values = values[np.isfinite(values)]
    axis = axes.xaxis if which == "x" else axes.yaxis
    if values.min() > 0 and values.max() > 10 * values.min():
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        decades = math.log10(values.max() / values.min())
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(6, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(_tick))


def count_scale(axes: Axes, counts: np.ndarray[Any, Any]) -> None:
    """
    An axis for counts from 0, logarithmic above 1 where they span decades.
    """
    top = max(float(counts.max()), 1)
    if top > 100:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks([0, *(10.0**n for n in range(0, math.ceil(math.log10(top)) + 1, 1 if top < 1e4 else 2))])
        axes.set_ylim(0, 2 * top)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_ylim(0, 1.1 * top)
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_minor_formatter(NullFormatter())


def scale_note(axes: Axes, which: Literal["x", "y"]) -> str:
    """
    What a reader must know of an axis.
    """
    return " (log)" if (axes.get_xscale() if which == "x" else axes.get_yscale()) != "linear" else ""


def _tick(value: float, _: int | None = None) -> str:
    """
    A tick's label without powers of ten.
    """
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """
    A legend above the plot.
    """
    figure.legend(handles=handles, loc="outside upper left", ncols=5, handlelength=1.6, columnspacing=1.4)


def svg(figure: Figure, name: str) -> str:
    """
    The figure as an SVG element for a page, all ids starting with *name*.
    """
    for axes in figure.axes:
        for artist in [*axes.patches, *axes.collections, *axes.lines]:
            artist.set_gid("marks")
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Letters that matplotlib's font lacks are drawn by the browser, with its own fonts.
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from font")
        figure.savefig(
            buffer, format="svg", dpi=_PIXELS, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    root = ElementTree.fromstring(buffer.getvalue())
    # A style sheet would hold for the whole page.
    root.remove(next(child for child in root if child.find("{*}style") is not None))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            if key == "id" and value == "marks":
                element.set("class", "marks")
            elif key == "id":
                element.set("id", f"{name}-{value}")
            elif key.endswith("href"):
                element.set("href", f"#{name}-{value.removeprefix('#')}")
            elif key == "d":
                # Hundredths of a pixel are enough.
                element.set("d", re.sub(r"(\.\d\d)\d+", r"\1", value))
            else:
                text = value.replace("url(#", f"url(#{name}-")
                for colour, page_colour in _PAGE_COLOURS.items():
                    text = text.replace(colour, page_colour)
                element.set(key, text)
        if element.tag == "text":
            # The page's font.
            style = element.get("style", "").split("; ")
            element.set("style", "; ".join(part for part in style if not part.startswith("font-family")))
    for key in ("width", "height"):
        del root.attrib[key]
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": "plot",
        "role": "img",
        "style": "stroke-linejoin: round; stroke-linecap: butt",
    }
    return ElementTree.tostring(root, encoding="unicode")
