"""
Fits measured steps.

The coefficients minimise the squares of relative errors under the condition that none is negative, for no part of
a step takes less time for more work (`scipy.optimize.nnls`). Then the captured sizes are corrected: a graph takes
what was measured at its size, as far as the loads there agree.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from aclgraph_dispatch import RuntimeMode
from aclgraph_dispatch.calibration import FORMAT, Calibration, MeasuredStep
from aclgraph_dispatch.cost_model import StepTime
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import activated_share
from aclgraph_dispatch.pass_fit import PassFit, host_terms, load_terms, token_terms, weighted


def fit(
    points: Sequence[MeasuredStep],
    *,
    captured: Mapping[str, Sequence[int]],
    num_experts: int,
    experts_per_token: int,
    host_is_device: bool,
    **facts: Any,
) -> Calibration:
    """
    Fit what was measured, and tell how far off it is on the points that were held out.

    Args:
        points: What was measured.
        captured: Captured sizes by the mode's name.
        num_experts: Routed experts of a layer.
        experts_per_token: How many of them a token meets.
        host_is_device: Whether host and device are one.
        facts: The other fields of `Calibration`.

    Raises:
        ConfigError: A mode has points, but none to fit.
    """
    fitted = [point for point in points if not point.is_held_out]
    modes = list(dict.fromkeys(point.mode for point in points))
    passes = {}
    for mode in modes:
        of_mode = [point for point in fitted if point.mode == mode]
        if not of_mode:
            raise ConfigError(f"'points' must hold some of {mode} that are not held out")
        passes[mode] = _fit_passes(of_mode, captured.get(mode, ()), num_experts, experts_per_token, host_is_device)
    rows = [host_terms(point.load) for point in fitted]
    calibration = Calibration(
        format=FORMAT,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        host_is_device=host_is_device,
        prepare=_coefficients(rows, [point.prepare_seconds for point in fitted]),
        sample=_coefficients(rows, [point.sample_seconds for point in fitted]),
        passes=passes,
        errors={},
        points=tuple(points),
        **facts,
    )
    held_out = [point for point in points if point.is_held_out]
    uncorrected = attrs.evolve(
        calibration, passes={mode: attrs.evolve(of_mode, corrections={}) for mode, of_mode in passes.items()}
    )
    errors = {
        "step": _errors(calibration, held_out, lambda time: time.seconds, _seconds),
        "pass": _errors(calibration, held_out),
        **{f"pass {mode}": _errors(calibration, [p for p in held_out if p.mode == mode]) for mode in modes},
        "pass without corrections": _errors(uncorrected, held_out),
        "pass of the fit itself": _errors(calibration, fitted),
    }
    return attrs.evolve(calibration, errors={name: of_name for name, of_name in errors.items() if of_name})


def _fit_passes(
    points: Sequence[MeasuredStep],
    captured: Sequence[int],
    num_experts: int,
    experts_per_token: int,
    host_is_device: bool,
) -> PassFit:
    sizes = sorted({point.num_tokens for point in points})
    # Few enough for what is measured, and none below the first or above the last.
    knots = tuple(sorted({sizes[len(sizes) * i // 4] for i in (1, 2, 3)} - {sizes[0]}))
    rows = []
    for point in points:
        share = activated_share(num_experts, experts_per_token, point.num_tokens)
        rows.append((*token_terms(point.num_tokens, knots, share), *load_terms(point.load)))
    coefficients = _coefficients(rows, [point.device_seconds for point in points])
    num_token_terms = len(token_terms(1, knots, 0.0))
    factors: dict[int, list[float]] = {}
    for point, row in zip(points, rows, strict=True):
        if point.num_tokens in captured:
            predicted = weighted(coefficients, row)
            factors.setdefault(point.num_tokens, []).append(point.device_seconds / predicted)
    hosts = [host_terms(point.load) for point in points]
    loads = [(point.num_tokens, *attrs.astuple(point.load)) for point in points]
    return PassFit(
        knots=knots,
        token_coefficients=coefficients[:num_token_terms],
        load_coefficients=coefficients[num_token_terms:],
        corrections={size: agreed(of_size) for size, of_size in sorted(factors.items())},
        host_coefficients=() if host_is_device else _coefficients(hosts, [p.host_seconds for p in points]),
        least=sizes[0],
        most=tuple(max(column) for column in zip(*loads, strict=True)),
        has_mixed=any(point.load.num_decodes and point.load.num_prefill_tokens for point in points),
    )


def agreed(factors: Sequence[float]) -> float:
    """
    What the points of one size say together: the factor nearest to 1 where all are on one side of it, else 1.

    What is due to the size shows whatever the load; what shows in one load only is its own, or noise.
    """
    low, high = min(factors), max(factors)
    return low if low > 1 else min(high, 1.0)


def _coefficients(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """
    None negative, so that the squares of the relative errors are least.
    """
    from scipy.optimize import nnls

    matrix, measured = np.array(rows, dtype=np.float64), np.array(seconds)
    solution, _ = nnls(matrix / measured[:, None], np.ones(len(measured)))
    return tuple(float(x) for x in solution)


def _errors(
    calibration: Calibration,
    points: Sequence[MeasuredStep],
    predicted: Callable[[StepTime], float] = lambda time: time.device_seconds,
    measured: Callable[[MeasuredStep], float] = lambda point: point.device_seconds,
) -> dict[str, float]:
    """
    Mean, 95th percentile and largest of the relative errors; nothing for no points.
    """
    if not points:
        return {}
    relative = [
        abs(
            predicted(calibration.times(RuntimeMode[point.mode], point.num_tokens, point.load)) / measured(point)
            - 1
        )
        for point in points
    ]
    return {
        "points": len(relative),
        "mean": float(np.mean(relative)),
        "p95": float(np.percentile(relative, 95)),
        "max": max(relative),
    }


def _seconds(point: MeasuredStep) -> float:
    """
    A whole step, as `StepTime.seconds` counts it.
    """
    return point.prepare_seconds + max(point.host_seconds, point.device_seconds) + point.sample_seconds
