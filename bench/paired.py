"""
Paired runs of several contenders: in each round every one of them serves the same requests once.

What disturbs a machine lasts longer than a run, so that figures of different rounds are not comparable, and ratios
within a round are. Every other round goes backwards: a drift then does not favour whoever comes first.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .engine import EngineFailedError

PERCENTILES = (90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
METRICS = (
    *(f"{what}_{name}_ms" for name in LATENCIES for what in ("mean", "median", *(f"p{q}" for q in PERCENTILES))),
    "output_throughput",
    "request_throughput",
    "request_goodput",
)
"""By the names and with the definitions of vLLM's result file; rates are per second."""


@attrs.frozen
class PairedRun:
    """
    One run of one contender.

    Args:
        metrics: Those of `METRICS`.
        texts: What was generated, by request.
        lateness_ms: How late a request was sent, at the most.
    """

    metrics: Mapping[str, float]
    texts: tuple[str, ...]
    lateness_ms: float


def orders(names: Sequence[str], num_rounds: int) -> list[tuple[str, ...]]:
    """
    The order of the contenders in each round.
    """
    return [tuple(names if number % 2 == 0 else reversed(names)) for number in range(num_rounds)]


def read_run(path: Path, requests: Sequence[Mapping[str, Any]]) -> PairedRun:
    """
    A run from vLLM's result file, with details.

    Args:
        path: The file.
        requests: Those of the run: `input_length`, `output_length`, and `timestamp` in seconds.

    Raises:
        EngineFailedError: A request failed or was cut, or the file is not what vLLM 0.32 writes.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        failures = [error for error in raw["errors"] if error]
        if raw["failed"] or raw["completed"] != len(requests):
            first = (failures or ["without a reason"])[0].strip()
            raise EngineFailedError(f"{raw['failed']} of {len(requests)} requests failed; the first: {first}")
        for name in ("input", "output"):
            wanted = [request[f"{name}_length"] for request in requests]
            if wanted != raw[f"{name}_lens"]:
                found = next(pair for pair in zip(wanted, raw[f"{name}_lens"], strict=True) if pair[0] != pair[1])
                raise EngineFailedError(f"a request of {found[0]} {name} tokens had {found[1]}; was it cut?")
        metrics = {name: float(raw[name]) for name in METRICS}
        starts = [float(start) for start in raw["start_times"]]
        due = [request["timestamp"] - requests[0]["timestamp"] for request in requests]
        late = [start - starts[0] - own for start, own in zip(starts, due, strict=True)]
        texts = tuple(map(str, raw["generated_texts"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise EngineFailedError(f"{path.name} is not a result file of vLLM's: {exc!r}") from exc
    if not all(map(math.isfinite, metrics.values())):
        raise EngineFailedError(f"{path.name} has a figure that is not finite: {metrics}")
    return PairedRun(metrics, texts, max(late) * 1e3)


def medians(runs: Sequence[PairedRun]) -> dict[str, float]:
    """
    Each metric's median over the rounds.
    """
    return {name: statistics.median(run.metrics[name] for run in runs) for name in METRICS}


def ratios(runs: Sequence[PairedRun], reference: Sequence[PairedRun]) -> dict[str, dict[str, float] | None]:
    """
    Each metric's ratio to the reference's in the same round: median, lowest and highest over the rounds.

    None where the reference's is 0 in some round.
    """
    result: dict[str, dict[str, float] | None] = {}
    for name in METRICS:
        pairs = [(a.metrics[name], b.metrics[name]) for a, b in zip(runs, reference, strict=True)]
        result[name] = None
        if all(base for _, base in pairs):
            values = [value / base for value, base in pairs]
            result[name] = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return result


def differing(runs: Sequence[PairedRun], reference: Sequence[PairedRun]) -> list[int]:
    """
    The requests, by number, that in some round got another text than from the reference.
    """
    rounds = zip(runs, reference, strict=True)
    return sorted({i for a, b in rounds for i, (x, y) in enumerate(zip(a.texts, b.texts, strict=True)) if x != y})
