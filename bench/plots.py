"""The plots of a comparison: each a pure function of its document that gives one SVG, always the same."""

import math
from typing import Literal

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .drawing import (
    BLUE,
    HATCH,
    INK,
    MODES,
    ORACLE,
    ORANGE,
    Document,
    count_scale,
    legend,
    no_data,
    note_rows,
    number,
    panels_figure,
    rows_figure,
    scale_note,
    short,
    style,
    svg,
    value_scale,
)


def latency(document: Document, metric: Literal["ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"]) -> str:
    """
    A latency by contender, the best first: the mean with its bootstrap interval, the median, the 99th percentile.
    """
    name = metric.removesuffix("_ms")
    keys = ("mean", "mean_low", "mean_high", "p50", "p99")
    rows = [
        (contender["name"], {key: number(contender["metrics"][metric][key]) for key in keys})
        for contender in document["contenders"]
    ]
    rows = sorted((row for row in rows if not math.isnan(row[1]["mean"])), key=lambda row: row[1]["mean"])
    if not rows:
        return no_data(name)

    values = np.array([[row[key] for key in keys] for _, row in rows])
    scale, unit = (1e-3, "s") if np.nanmax(values) >= 10_000 else (1.0, "ms")
    means, lows, highs, medians, p99s = scale * values.T
    with style(name):
        figure, axes, positions = rows_figure([row for row, _ in rows])
        axes.plot(means, positions, "o", color=BLUE, markersize=6, label="mean")
        axes.hlines(positions, lows, highs, color=BLUE, linewidth=7, alpha=0.5, label="its 95 % interval")
        axes.plot(medians, positions, "|", color=INK, markersize=11, markeredgewidth=1.5, label="median")
        axes.plot(p99s, positions, ">", color=INK, markerfacecolor="none", markersize=6, label="p99")
        axes.hlines(positions, medians, p99s, color=INK, linewidth=1, alpha=0.45, zorder=1)
        for (contender, _), mean in zip(rows, means, strict=True):
            if contender == ORACLE:
                axes.axvline(mean, color=INK, linewidth=1, linestyle=(0, (2, 3)), label="oracle's mean")
        note_rows(axes, positions, [f"{short(mean)} {unit}" for mean in means])
        value_scale(axes, "x", scale * values)
        axes.set_xlabel(f"{name.upper()}, {unit}" + scale_note(axes, "x"))
        legend(figure, axes.get_legend_handles_labels()[0])
        return svg(figure, name)


def oracle_distance(document: Document) -> str:
    """
    How much longer than the oracle's the mean TPOT and the mean E2EL of each contender are, in per cent.
    """
    name = "distance"
    means = {
        contender["name"]: [number(contender["metrics"][metric]["mean"]) for metric in ("tpot_ms", "e2el_ms")]
        for contender in document["contenders"]
    }
    if ORACLE not in means:
        return no_data(name, "no data: there is no contender named “oracle”")
    limits = np.array(means.pop(ORACLE))
    limits[limits <= 0] = math.nan
    distances = {contender: 100 * (np.array(row) / limits - 1) for contender, row in means.items()}
    rows = sorted(
        ((contender, row) for contender, row in distances.items() if not np.isnan(row).all()),
        key=lambda row: tuple(np.nan_to_num(row[1], nan=np.inf)),
    )
    if not rows:
        return no_data(name)

    tpots, e2els = np.array([row for _, row in rows]).T
    with style(name):
        figure, axes, positions = rows_figure([contender for contender, _ in rows])
        axes.hlines(positions, tpots, e2els, color=INK, linewidth=1, alpha=0.45)
        axes.plot(tpots, positions, "o", color=BLUE, markersize=7, label="mean TPOT")
        axes.plot(
            e2els, positions, "D", color=ORANGE, markerfacecolor="none", markeredgewidth=1.5, label="mean E2EL"
        )
        notes = [" / ".join("?" if math.isnan(x) else f"{short(x)} %" for x in row) for _, row in rows]
        note_rows(axes, positions, notes)
        value_scale(axes, "x", np.array([tpots, e2els]))
        if axes.get_xscale() == "linear":
            axes.axvline(0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xlabel("above the oracle, %" + scale_note(axes, "x"))
        legend(figure, axes.get_legend_handles_labels()[0])
        return svg(figure, name)


def routes_over_time(document: Document) -> str:
    """
    The share of each mode among the steps of an interval, over time, by contender.
    """
    name = "routes"
    rows = [
        (contender["name"], contender["series"]["routes_over_time"])
        for contender in document["contenders"]
        if len(contender["series"]["routes_over_time"]["edges_seconds"]) > 1
    ]
    if not rows:
        return no_data(name)

    with style(name):
        figure, panels = panels_figure([contender for contender, _ in rows], height=84)
        for axes, (_, series) in zip(panels, rows, strict=True):
            counts = np.array([series[mode] for mode in MODES], dtype=float)
            # An interval without a step has no shares: a gap.
            tops = 100 * np.cumsum(counts, axis=0) / np.maximum(counts.sum(axis=0), 1)
            for mode, low, high in zip(MODES.values(), np.vstack([0 * tops[:1], tops[:-1]]), tops, strict=True):
                if (high > low).any():
                    axes.stairs(
                        high, series["edges_seconds"], baseline=low, fill=True, facecolor=mode.colour,
                        edgecolor=HATCH, hatch=mode.hatch, linewidth=0,
                    )  # fmt: skip
            axes.set_ylim(0, 100)
            axes.set_yticks([0, 50, 100])
        figure.supxlabel("time, s", fontsize=12)
        figure.supylabel("steps, %", fontsize=12)
        legend(
            figure,
            [
                Patch(facecolor=mode.colour, edgecolor=HATCH, hatch=mode.hatch, label=mode.label, linewidth=0)
                for mode in MODES.values()
            ],
        )
        return svg(figure, name)


def step_times(document: Document) -> str:
    """
    How many steps took how long, by mode and contender.
    """
    name = "steps"
    rows = [
        (contender["name"], contender["series"]["step_ms"])
        for contender in document["contenders"]
        if len(contender["series"]["step_ms"]["edges_ms"]) > 1
    ]
    if not rows:
        return no_data(name)

    with style(name):
        figure, panels = panels_figure([contender for contender, _ in rows], height=104)
        for axes, (_, series) in zip(panels, rows, strict=True):
            for key, mode in MODES.items():
                if any(series[key]):
                    axes.stairs(
                        series[key], series["edges_ms"], baseline=0, color=mode.colour, linewidth=1.6,
                        linestyle=mode.linestyle,
                    )  # fmt: skip
        used = [
            edge
            for _, series in rows
            for i in range(len(series["edges_ms"]) - 1)
            if any(series[mode][i] for mode in MODES)
            for edge in series["edges_ms"][i : i + 2]
        ] or rows[0][1]["edges_ms"]
        value_scale(panels[0], "x", np.array(used))
        panels[0].set_xlim(min(used), max(used))
        count_scale(panels[0], np.array([0] + [x for _, series in rows for mode in MODES for x in series[mode]]))
        figure.supxlabel("step time, ms" + scale_note(panels[0], "x"), fontsize=12)
        figure.supylabel("steps" + scale_note(panels[0], "y"), fontsize=12)
        legend(
            figure,
            [
                Line2D([], [], color=mode.colour, linestyle=mode.linestyle, linewidth=1.6, label=mode.label)
                for mode in MODES.values()
            ],
        )
        return svg(figure, name)


def padding_by_size(document: Document) -> str:
    """
    Tokens that were computed and dropped at each captured size, by contender.
    """
    name = "padding"
    rows = [
        (contender["name"], contender["series"]["padding_by_size"])
        for contender in document["contenders"]
        if contender["series"]["padding_by_size"]["sizes"]
    ]
    if not rows:
        return no_data(name)

    with style(name):
        figure, panels = panels_figure([contender for contender, _ in rows], height=104)
        for axes, (_, series) in zip(panels, rows, strict=True):
            axes.vlines(series["sizes"], 0, series["paddings"], color=BLUE, linewidth=1.2)
            axes.plot(series["sizes"], series["paddings"], "o", color=BLUE, markersize=3.5)
        value_scale(panels[0], "x", np.concatenate([series["sizes"] for _, series in rows]))
        count_scale(panels[0], np.array([x for _, series in rows for x in series["paddings"]]))
        figure.supxlabel("captured size, tokens" + scale_note(panels[0], "x"), fontsize=12)
        figure.supylabel("padded tokens" + scale_note(panels[0], "y"), fontsize=12)
        return svg(figure, name)
