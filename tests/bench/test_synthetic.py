"""Traces that were not recorded."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.synthetic import PRESETS, Lengths, Preset, conversation, synthetic_requests
from aclgraph_dispatch.bench.traces import read_trace

SHARED = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "traces")
SAMPLES = {
    "azure-conv": "azure_conv_2023_5min.csv.gz",
    "azure-code": "azure_code_2023_5min.csv.gz",
    "mooncake-conv": "mooncake_conversation_5min.csv.gz",
    "servegen-r1": "servegen_deepseek_r1_5min.csv.gz",
    "sharegpt": "sharegpt_300_llama-3.1-8b.csv.gz",
}
FLAT = Lengths(100, 0, 1000)


@pytest.mark.parametrize("name", PRESETS)
def test_seed_decides(name: str) -> None:
    """
    The same seed gives the same requests, another seed others.
    """
    trace = synthetic_requests(PRESETS[name], 40, seed=3)

    assert trace == synthetic_requests(PRESETS[name], 40, seed=3)
    assert trace != synthetic_requests(PRESETS[name], 40, seed=4)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_requests", [1, 2, 500])
def test_is_a_trace(name: str, num_requests: int) -> None:
    """
    There are as many requests as asked for, in order of arrival, none of them empty, in Python's own numbers.
    """
    trace = synthetic_requests(PRESETS[name], num_requests)
    arrivals = [r.arrival_seconds for r in trace]

    assert num_requests == len(trace)
    assert arrivals == sorted(arrivals)
    assert min(arrivals) >= 0
    assert all(type(n) is int and n >= 1 for r in trace for n in (r.prompt_tokens, r.output_tokens))
    assert {float} == {type(arrival) for arrival in arrivals}


def test_conversation() -> None:
    """
    Conversations are those of the preset.
    """
    assert synthetic_requests(PRESETS["azure-conv"], 12, seed=2) == conversation(12, seed=2)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_arrivals(burstiness: float) -> None:
    """
    Gaps between arrivals have the mean and the coefficient of variation asked for.
    """
    trace = synthetic_requests(Preset("a test", 4.0, burstiness, FLAT, FLAT), 40_000)
    gaps = np.diff([r.arrival_seconds for r in trace])

    assert pytest.approx([0.25, burstiness], rel=0.05) == [gaps.mean(), gaps.std() / gaps.mean()]


def test_poisson() -> None:
    """
    With a coefficient of variation of 1 a gap is longer than x means with probability exp(-x).
    """
    trace = synthetic_requests(Preset("a test", 1.0, 1.0, FLAT, FLAT), 40_000)
    gaps = np.diff([r.arrival_seconds for r in trace])
    longer = [(gaps > x).mean() for x in (0.1, 0.5, 1, 2, 4)]

    assert pytest.approx(np.exp([-0.1, -0.5, -1, -2, -4]), abs=0.01) == longer


def test_lognormal() -> None:
    """
    The body has the median asked for, and its logarithms the deviation.
    """
    lengths = Lengths(500, 0.7, 10**6).draw(np.random.default_rng(0), 40_000)

    assert pytest.approx([500, 0.7], rel=0.02) == [np.median(lengths), np.log(lengths).std()]


@pytest.mark.parametrize("alpha", [0.6, 1.0, 2.5])
def test_heavy_tail(alpha: float) -> None:
    """
    Above its start the tail falls as a power, cut at the longest: the chances are those of the Pareto law.
    """
    start, longest = 1000.0, 10**7
    lengths = Lengths(10, 0.1, longest, 0.25, start, alpha).draw(np.random.default_rng(0), 100_000)
    beyond = (start / longest) ** alpha
    expected = [0.25 * ((1 / x) ** alpha - beyond) / (1 - beyond) for x in (1.01, 2, 5, 20)]

    assert pytest.approx(expected, abs=0.005) == [(lengths > x * start).mean() for x in (1.01, 2, 5, 20)]


@given(
    st.builds(
        Lengths,
        median=st.floats(1, 1e6),
        sigma=st.floats(0, 4),
        longest=st.integers(1, 10**9),
        tail_share=st.floats(0, 1),
        tail_start=st.floats(1, 1e6),
        tail_alpha=st.floats(0.1, 5),
    )
)
def test_lengths_are_within_bounds(lengths: Lengths) -> None:
    """
    Whatever the parameters, a length is at least 1 and at most the longest.
    """
    drawn = lengths.draw(np.random.default_rng(0), 50)

    assert 1 <= drawn.min() <= drawn.max() <= lengths.longest


@pytest.mark.parametrize(
    ("name", "value"), [("median", 0), ("sigma", -1), ("longest", 0), ("tail_share", 1.5), ("tail_alpha", 0)]
)
def test_bad_lengths(name: str, value: float) -> None:
    """
    Parameters that make no distribution are refused by name.
    """
    with pytest.raises(ValueError, match=name):
        Lengths(**({"median": 10, "sigma": 1, "longest": 100} | {name: value}))  # type: ignore[arg-type]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
@pytest.mark.parametrize("name", PRESETS)
def test_moments_are_the_sample_s(name: str) -> None:
    """
    Mean lengths are those of the recorded sample within 3 %, the spread of their logarithms within 10 %, and the
    longest is the sample's.
    """
    sample, preset = read_trace(SHARED / SAMPLES[name]), PRESETS[name]
    recorded, synthetic = (
        np.array([(r.prompt_tokens, r.output_tokens) for r in trace], float)
        for trace in (sample, synthetic_requests(preset, 200_000))
    )

    assert pytest.approx(recorded.mean(axis=0), rel=0.03) == synthetic.mean(axis=0)
    assert pytest.approx(np.log(recorded).std(axis=0), rel=0.1) == np.log(synthetic).std(axis=0)
    assert recorded.max(axis=0).tolist() == [preset.prompts.longest, preset.outputs.longest]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
@pytest.mark.parametrize("name", PRESETS)
def test_arrivals_are_the_sample_s(name: str) -> None:
    """
    Rate and burstiness are those of the recorded sample, the latter 1 where it is below.
    """
    arrivals = np.array([r.arrival_seconds for r in read_trace(SHARED / SAMPLES[name])])
    span = 30 if name == "sharegpt" else 300
    counts = np.histogram(arrivals, np.arange(0, span, 15))[0]
    dispersion = float(np.sqrt(counts.var() / counts.mean()))

    assert pytest.approx([len(arrivals) / span, max(dispersion, 1)], rel=0.03) == [
        PRESETS[name].rate,
        PRESETS[name].burstiness,
    ]
