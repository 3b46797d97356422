"""Comparisons as tables, for a terminal and for Markdown."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .contenders import ORACLE

_COLUMNS: tuple[tuple[str, str, int, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("TPOT ms", "mean", 9, lambda m: m["tpot_ms"]["mean"]),
    ("", "p99", 8, lambda m: m["tpot_ms"]["p99"]),
    ("TTFT ms", "mean", 10, lambda m: m["ttft_ms"]["mean"]),
    ("", "p99", 10, lambda m: m["ttft_ms"]["p99"]),
    ("good", "%", 7, lambda m: 100 * m["goodput_share"]),
    ("tokens", "/s", 9, lambda m: m["output_tokens_per_second"]),
    ("idle", "%", 7, lambda m: 100 * m["device_idle_share"]),
    ("pad", "%", 6, lambda m: 100 * m["padding_share"]),
    ("FULL", "%", 7, lambda m: 100 * m["route_shares"]["FULL"]),
    ("PIECE", "%", 7, lambda m: 100 * m["route_shares"]["PIECEWISE"]),
    ("eager", "%", 7, lambda m: 100 * m["route_shares"]["NONE"]),
    ("capture", "s", 9, lambda m: m["capture_seconds"]),
)
_NAME_WIDTH = 20


def table(document: Mapping[str, Any]) -> str:
    """
    The table, a row for each contender; `report` defines what the columns mean.
    """
    trace, settings = document["trace"], document["settings"]
    lines = [
        f"{served(trace)} at rate {settings['rate']:g}, "
        f"{document['model']['name']} on {document['device']['name']}, scheduler {settings['scheduler']}",
        _beyond(document["device"].get("extrapolated_share")),
        " " * _NAME_WIDTH + "".join(f"{top:>{width}}" for top, _, width, _ in _COLUMNS),
        " " * _NAME_WIDTH + "".join(f"{bottom:>{width}}" for _, bottom, width, _ in _COLUMNS),
    ]
    for contender in document["contenders"]:
        cells = (_cell(value(contender["metrics"]), width) for _, _, width, value in _COLUMNS)
        lines.append(f"{contender['name']:<{_NAME_WIDTH}}" + "".join(cells))
    return "\n".join(lines)


def served(trace: Mapping[str, Any]) -> str:
    """
    How many requests of a comparison's trace were simulated, and what became of the others.
    """
    num_left_out, num_cut = trace.get("num_too_long", 0), trace.get("num_cut", 0)
    notes = []
    if num_left_out:
        whose = "its prompt is" if num_left_out == 1 else "their prompts are"
        notes.append(f"{num_left_out} left out, {whose} too long")
    if num_cut:
        notes.append(f"{num_cut} output{'s' if num_cut > 1 else ''} cut")
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{trace['num_requests'] - num_left_out} requests of {trace['name']}{note}"


def _beyond(share: float | None) -> str:
    return "" if share is None else f"up to {100 * share:.0f} % of steps lie beyond what was measured"


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.1f}"


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """
    Mean TPOT and TTFT of several comparisons with the same contenders: a table for each model and device, a row
    for each trace and rate. The best contender but the oracle is bold; one that rounds to the same is, too.
    """
    sections: list[str] = []
    models = dict.fromkeys((d["model"]["name"], d["device"]["name"]) for d in documents)
    for model, device in models:
        for title, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms")):
            rows = [d for d in documents if (d["model"]["name"], d["device"]["name"]) == (model, device)]
            names = [contender["name"] for contender in rows[0]["contenders"]]
            lines = [
                f"**{model} on {device}: mean {title}, ms**",
                "",
                "| " + " | ".join(["trace", *names]) + " |",
                "|" + "---|" * (len(names) + 1),
            ]
            for document in rows:
                means = {c["name"]: _rounded(c["metrics"][key]["mean"]) for c in document["contenders"]}
                real = [m for name, m in means.items() if name != ORACLE and m != "-"]
                best = min(real, key=float, default=None)
                cells = [f"**{m}**" if m == best and name != ORACLE else m for name, m in means.items()]
                rate = document["settings"]["rate"]
                trace = stem(document["trace"]["name"]) + (f" x {rate:g}" if rate != 1 else "")
                lines.append("| " + " | ".join([trace, *cells]) + " |")
            sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def stem(name: str) -> str:
    """
    A file's name without the endings that say how it is written.
    """
    return re.sub(r"(\.csv|\.jsonl)?(\.gz)?$", "", name)


def _rounded(value: float | None) -> str:
    # Three digits, but no fraction of a large number.
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
