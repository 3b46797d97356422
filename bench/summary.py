"""What a simulation comes down to: metrics of its requests and of its steps, and what the plots show."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aclgraph_dispatch.step_plan import RuntimeMode

from .metrics import request_metrics
from .simulate import Simulation, StepRecord

NUM_INTERVALS = 60
"""Of a run, in the plot of routes over time."""
MODES = (RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE)


def metrics(simulation: Simulation, *, slo_ttft_ms: float, slo_tpot_ms: float, seed: int) -> dict[str, Any]:
    """
    Metrics of requests and steps, JSON values.

    Shares of steps and time are those of passes of the forward model, of all ranks, idle ones included.
    """
    steps = simulation.steps
    of_requests = request_metrics(
        simulation.arrival_seconds,
        simulation.token_seconds,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        seed=seed,
    )
    seconds = np.array([s.seconds for s in steps])
    busy = sum(s.time.device_seconds + s.time.sample_seconds for s in steps)
    padded = sum(s.part.num_padded_tokens for s in steps)
    paddings = sum(s.part.num_paddings for s in steps)
    total = float(seconds.sum())
    by_mode = {mode: np.array([s.part.mode is mode for s in steps]) for mode in MODES}
    return of_requests | {
        "num_steps": len(steps),
        "num_preemptions": simulation.num_preemptions,
        # Of a device that is never idle rounding can make it -0.
        "device_idle_share": max(1 - busy / total, 0.0),
        "padding_share": paddings / padded,
        "route_shares": {mode.name: float(is_mode.mean()) for mode, is_mode in by_mode.items()},
        "time_shares": {mode.name: float(seconds[is_mode].sum() / total) for mode, is_mode in by_mode.items()},
        "reasons": dict(sorted(Counter(s.part.reason.value for s in steps).items())),
    }


def series(simulation: Simulation) -> dict[str, Any]:
    """
    What the plots show, JSON values.
    """
    steps = simulation.steps
    starts = np.array([s.start_seconds for s in steps])
    milliseconds = 1e3 * np.array([s.seconds for s in steps])
    end = steps[-1].start_seconds + steps[-1].seconds
    time_edges = np.linspace(0, end, NUM_INTERVALS + 1)
    # Ten intervals for each factor of ten.
    low, high = np.floor(10 * np.log10(milliseconds.min())), np.ceil(10 * np.log10(milliseconds.max()))
    step_edges = 10 ** (np.arange(low, max(high, low + 1) + 1) / 10)
    return {
        "routes_over_time": {
            "edges_seconds": time_edges.tolist(),
            **_counts(steps, starts, time_edges),
        },
        "step_ms": {"edges_ms": step_edges.tolist(), **_counts(steps, milliseconds, step_edges)},
        "padding_by_size": _padding_by_size(steps),
    }


def per_request(simulation: Simulation) -> dict[str, list[float]]:
    """
    Latencies of each request in milliseconds, in order of arrival, for comparisons in pairs. Of a request of one
    token the TPOT is 0.
    """
    arrivals = simulation.arrival_seconds
    first, last = (np.array([times[i] for times in simulation.token_seconds]) for i in (0, -1))
    gaps = np.array([max(len(times) - 1, 1) for times in simulation.token_seconds])
    values = {"ttft_ms": first - arrivals, "tpot_ms": (last - first) / gaps, "e2el_ms": last - arrivals}
    return {name: (1e3 * seconds).tolist() for name, seconds in values.items()}


def _counts(
    steps: Sequence[StepRecord], values: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> dict[str, list[int]]:
    # Rounding may put a value beside the outermost edge it defines.
    inside = np.clip(values, edges[0], edges[-1])
    modes = np.array([s.part.mode.value for s in steps])
    return {mode.name: np.histogram(inside[modes == mode.value], edges)[0].tolist() for mode in MODES}


def _padding_by_size(steps: Sequence[StepRecord]) -> dict[str, list[int]]:
    num_steps: Counter[int] = Counter()
    paddings: Counter[int] = Counter()
    for step in steps:
        if step.part.mode is not RuntimeMode.NONE:
            num_steps[step.part.num_padded_tokens] += 1
            paddings[step.part.num_padded_tokens] += step.part.num_paddings
    sizes = sorted(num_steps)
    return {"sizes": sizes, "steps": [num_steps[n] for n in sizes], "paddings": [paddings[n] for n in sizes]}
