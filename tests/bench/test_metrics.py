"""Latencies, throughput and goodput, against vLLM's own sums."""

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.metrics import FEWEST_REQUESTS, mean_interval, paired_ratio, request_metrics

FloatArray = npt.NDArray[np.float64]
SLO = {"slo_ttft_ms": 300.0, "slo_tpot_ms": 50.0}
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def random_run(
    seed: int, num_requests: int, *, longest: int = 30, per_step: int = 1
) -> tuple[FloatArray, list[FloatArray]]:
    """
    Arrivals and the times of tokens, `per_step` of them at a time.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.1, num_requests))
    runs = []
    for arrival in arrivals:
        steps = arrival + np.cumsum(rng.exponential(0.2, 1).tolist() + rng.exponential(0.05, longest).tolist())
        runs.append(np.repeat(steps, per_step)[: rng.integers(1, longest)])
    return arrivals, runs


def vllm_metrics(arrivals: FloatArray, runs: list[FloatArray], duration: float) -> Any:
    """
    What vLLM's client would say of the same stream, a chunk for all tokens of one time.
    """
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = [
        RequestFuncOutput(
            success=True,
            start_time=float(arrival),
            latency=float(times[-1] - arrival),
            ttft=float(times[0] - arrival),
            itl=np.diff(np.unique(times)).tolist(),
            output_tokens=len(times),
            prompt_len=1,
        )
        for arrival, times in zip(arrivals, runs, strict=True)
    ]
    goodput = {"ttft": SLO["slo_ttft_ms"], "tpot": SLO["slo_tpot_ms"]}
    return calculate_metrics([], outputs, duration, None, [50, 90, 95, 99], goodput)[0]


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("num_requests", [1, 5, 200])
def test_equals_vllm(num_requests: int, per_step: int) -> None:
    """
    Every figure that vLLM has too is the same, also where a step gives several tokens.
    """
    arrivals, runs = random_run(num_requests, num_requests, per_step=per_step)
    ours = request_metrics(arrivals, runs, **SLO)
    theirs = vllm_metrics(arrivals, runs, ours["duration_seconds"])

    for name in LATENCIES:
        expected = [getattr(theirs, f"mean_{name}"), *(v for _, v in getattr(theirs, f"percentiles_{name}"))]

        assert pytest.approx(expected) == [ours[name][key] for key in ("mean", "p50", "p90", "p95", "p99")]
    assert pytest.approx([theirs.request_throughput, theirs.output_throughput, theirs.request_goodput]) == [
        ours["requests_per_second"],
        ours["output_tokens_per_second"],
        ours["goodput_requests_per_second"],
    ]


def test_by_hand() -> None:
    """
    Two requests, computed on paper.
    """
    metrics = request_metrics(
        np.array([1.0, 2.0]), [np.array([1.25, 1.5, 2.0]), np.array([4.0])], slo_ttft_ms=250, slo_tpot_ms=375
    )

    assert [1125, 375, 375, 1500] == [metrics[name]["mean"] for name in LATENCIES]
    assert {
        "duration_seconds": 3.0,
        "output_tokens_per_second": 4 / 3,
        "requests_per_second": 2 / 3,
        "goodput_requests_per_second": 1 / 3,
        "goodput_share": 0.5,
    } == {name: value for name, value in metrics.items() if name not in LATENCIES}


@pytest.mark.parametrize(
    ("slo_ttft_ms", "slo_tpot_ms", "share"),
    [(250, 375, 1), (249, 375, 0), (250, 374, 0), (1e9, 1e9, 1), (0, 0, 0)],
)
def test_goodput_needs_all_limits(slo_ttft_ms: float, slo_tpot_ms: float, share: float) -> None:
    """
    A request is good if it meets every limit, and a limit is met by its own value.
    """
    run = np.array([1.0]), [np.array([1.25, 1.5, 2.0])]

    assert share == request_metrics(*run, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms)["goodput_share"]


def test_single_tokens() -> None:
    """
    Requests with one token have neither TPOT nor ITL, and only the first token's limit to meet.
    """
    metrics = request_metrics(np.zeros(30), [np.array([0.1])] * 30, slo_ttft_ms=200, slo_tpot_ms=0.001)

    assert {None} == {*metrics["tpot_ms"].values(), *metrics["itl_ms"].values()}
    assert 1 == metrics["goodput_share"]


def test_no_time() -> None:
    """
    A run without a duration has no rates.
    """
    metrics = request_metrics(np.zeros(1), [np.zeros(1)], **SLO)

    assert metrics["requests_per_second"] is None
    assert metrics["goodput_share"] == 1


def test_is_json_and_same_for_same_seed() -> None:
    """
    All values are JSON; the same seed gives the same intervals, another seed others.
    """
    arrivals, runs = random_run(1, 100)
    metrics = request_metrics(arrivals, runs, **SLO, seed=1)

    assert metrics == json.loads(json.dumps(metrics)) == request_metrics(arrivals, runs, **SLO, seed=1)
    assert metrics["ttft_ms"]["mean_low"] != request_metrics(arrivals, runs, **SLO, seed=2)["ttft_ms"]["mean_low"]


@pytest.mark.parametrize(
    ("arrivals", "runs"),
    [
        ([], []),
        ([0.0], []),
        ([0.0, 1.0], [[1.0], []]),
        ([2.0], [[1.0]]),
        ([0.0], [[2.0, 1.0]]),
        ([0.0], [[math.nan]]),
        ([0.0], [[1.0, math.nan]]),
    ],
)
def test_impossible_runs(arrivals: list[float], runs: list[list[float]]) -> None:
    """
    Requests without tokens, and tokens from before, are refused.
    """
    with pytest.raises(ValueError, match="token"):
        request_metrics(np.array(arrivals), [np.array(times, float) for times in runs], **SLO)


@given(st.integers(0, 2**32), st.integers(1, 80), st.integers(1, 4))
def test_relations(seed: int, num_requests: int, per_step: int) -> None:
    """
    Percentiles rise, the interval holds the mean, E2EL is at least TTFT, and good requests are some of all.
    """
    arrivals, runs = random_run(seed, num_requests, longest=8, per_step=per_step)
    metrics = request_metrics(arrivals, runs, **SLO, seed=seed)
    for name in LATENCIES:
        summary = metrics[name]
        percentiles = [summary[key] for key in ("p50", "p90", "p95", "p99") if summary[key] is not None]

        assert percentiles == sorted(percentiles)
        if summary["mean_low"] is not None:
            assert summary["mean_low"] <= summary["mean"] <= summary["mean_high"]
    assert metrics["e2el_ms"]["mean"] >= metrics["ttft_ms"]["mean"]
    assert 0 <= metrics["goodput_requests_per_second"] <= metrics["requests_per_second"]


@given(st.integers(0, 2**32), st.floats(0.1, 10), st.floats(0, 100))
def test_clock(seed: int, stretch: float, shift: float) -> None:
    """
    Latencies do not depend on where the clock starts, and grow with its seconds.
    """
    arrivals, runs = random_run(seed, 30)
    metrics = request_metrics(arrivals, runs, **SLO)
    moved = request_metrics(arrivals * stretch + shift, [times * stretch + shift for times in runs], **SLO)

    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert pytest.approx({key: value * stretch for key, value in metrics[name].items()}) == moved[name]


@pytest.mark.parametrize("num_requests", [FEWEST_REQUESTS - 1, FEWEST_REQUESTS])
def test_too_few(num_requests: int) -> None:
    """
    Few requests bear no interval.
    """
    low, high = mean_interval(np.arange(num_requests, dtype=float), np.arange(num_requests))

    assert (num_requests < FEWEST_REQUESTS) is (low is None) is (high is None)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_interval_covers(correlation: float) -> None:
    """
    The interval holds the true mean in most of many runs, also where neighbours wait alike; there one drawn from
    single requests would hold it in 71 % only.
    """
    num_runs, num_requests = 300, 400
    rng = np.random.default_rng(0)
    covered = 0
    for run in range(num_runs):
        noise = rng.normal(size=num_requests)
        for i in range(1, num_requests):
            noise[i] += correlation * noise[i - 1]
        low, high = mean_interval(noise + 5, np.arange(num_requests), seed=run)
        assert low is not None
        assert high is not None
        covered += low <= 5 <= high

    assert 0.87 <= covered / num_runs <= 0.98


def test_values_of_a_request_stay_together() -> None:
    """
    Many equal values of few requests make the interval no narrower than one value of each.
    """
    rng = np.random.default_rng(0)
    values = rng.normal(size=60)
    once = mean_interval(values, np.arange(60))
    often = mean_interval(np.repeat(values, 50), np.repeat(np.arange(60), 50))

    assert pytest.approx(once) == often


def test_paired_ratio_is_sharper() -> None:
    """
    Of requests that differ much more than two runs of them do, the ratio is known much better than the means.
    """
    rng = np.random.default_rng(0)
    theirs = rng.lognormal(3, 1, 500)
    ours = theirs * rng.normal(0.98, 0.005, 500)
    found = paired_ratio(ours, theirs)
    low, high = mean_interval(theirs, np.arange(500))

    assert ours.sum() / theirs.sum() == pytest.approx(found["ratio"])
    assert found["low"] < 0.98 < found["high"] < 1
    assert found["high"] - found["low"] < 0.002
    assert (high - low) / theirs.mean() > 0.1


def test_paired_ratio_of_few() -> None:
    """
    Of fewer requests than bear an interval there is a ratio only.
    """
    found = paired_ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0]))

    assert {"ratio": 1.0, "low": None, "high": None} == found


def test_paired_ratio_of_equals() -> None:
    """
    A run against itself has the ratio 1 without doubt.
    """
    values = np.arange(1.0, 101.0)

    assert {"ratio": 1.0, "low": 1.0, "high": 1.0} == paired_ratio(values, values)


def test_paired_ratio_draws_by_its_seed() -> None:
    """
    The same seed gives the same interval of a ratio, another seed another, and the ratio itself is the same.
    """
    rng = np.random.default_rng(0)
    theirs = rng.lognormal(3, 1, 100)
    ours = theirs * rng.normal(0.98, 0.05, 100)
    first, again, other = (paired_ratio(ours, theirs, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first["ratio"] == other["ratio"]
    assert first["low"] != other["low"]
    assert first["high"] != other["high"]
