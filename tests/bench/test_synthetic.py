"""Traces for machines that have no recorded ones."""

import numpy as np
import pytest

from aclgraph_dispatch.bench.synthetic import OUTPUT_MEAN, PROMPT_MEAN, RATE, conversation


def test_seed_decides() -> None:
    """
    The same seed gives the same requests, another seed others.
    """
    trace = conversation(40, seed=3)

    assert trace == conversation(40, seed=3)
    assert trace != conversation(40, seed=4)


@pytest.mark.parametrize("num_requests", [1, 2, 500])
def test_is_a_trace(num_requests: int) -> None:
    """
    There are as many requests as asked for, in order of arrival, none of them empty, in Python's own numbers.
    """
    trace = conversation(num_requests)
    arrivals = [r.arrival_seconds for r in trace]

    assert num_requests == len(trace)
    assert arrivals == sorted(arrivals)
    assert min(arrivals) >= 0
    assert all(type(n) is int and n >= 1 for r in trace for n in (r.prompt_tokens, r.output_tokens))
    assert {float} == {type(arrival) for arrival in arrivals}


def test_shape() -> None:
    """
    Rate and mean lengths are those of the recorded trace.
    """
    trace = conversation(20_000)
    measured = [
        len(trace) / trace[-1].arrival_seconds,
        np.mean([r.prompt_tokens for r in trace]),
        np.mean([r.output_tokens for r in trace]),
    ]

    assert pytest.approx([RATE, PROMPT_MEAN, OUTPUT_MEAN], rel=0.05) == measured
