"""A comparison as a table for a terminal."""

from collections.abc import Callable, Mapping
from typing import Any

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
        f"{trace['num_requests']} requests of {trace['name']} at rate {settings['rate']:g}, "
        f"{document['model']['name']} on {document['device']['name']}, scheduler {settings['scheduler']}",
        "",
        " " * _NAME_WIDTH + "".join(f"{top:>{width}}" for top, _, width, _ in _COLUMNS),
        " " * _NAME_WIDTH + "".join(f"{bottom:>{width}}" for _, bottom, width, _ in _COLUMNS),
    ]
    for contender in document["contenders"]:
        cells = (_cell(value(contender["metrics"]), width) for _, _, width, value in _COLUMNS)
        lines.append(f"{contender['name']:<{_NAME_WIDTH}}" + "".join(cells))
    return "\n".join(lines)


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.1f}"
