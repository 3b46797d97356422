"""From traces to what vLLM's client replays."""

import pytest

from aclgraph_dispatch.bench.demo import LONGEST_OUTPUT, LONGEST_PROMPT
from aclgraph_dispatch.bench.timed_trace import scaled_lengths, timed_requests
from aclgraph_dispatch.bench.traces import TraceRequest
from aclgraph_dispatch.errors import ConfigError


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (TraceRequest(3.0, 160, 80), TraceRequest(3.0, 10, 10)),
        (TraceRequest(3.0, 1, 1), TraceRequest(3.0, 1, 2)),
        (TraceRequest(3.0, 10**6, 10**6), TraceRequest(3.0, LONGEST_PROMPT, LONGEST_OUTPUT)),
        (TraceRequest(0.0, 1600, 80, cached_tokens=330), TraceRequest(0.0, 100, 10, cached_tokens=20)),
        (
            TraceRequest(0.0, 1600, 80, hash_ids=(4, 5), block_tokens=512),
            TraceRequest(0.0, 100, 10, hash_ids=(4, 5), block_tokens=32),
        ),
        # Rounded up, so that the blocks still hold the prompt.
        (
            TraceRequest(0.0, 160, 80, hash_ids=(4,), block_tokens=17),
            TraceRequest(0.0, 10, 10, hash_ids=(4,), block_tokens=2),
        ),
    ],
)
def test_scaling(request_: TraceRequest, expected: TraceRequest) -> None:
    """
    Lengths, and what prompts share, are divided and cut as in the demonstration; arrivals stay.
    """
    assert (expected,) == scaled_lengths([request_])


def test_lines() -> None:
    """
    Times count from the first request; every started block of 16 tokens has a number of its own.
    """
    trace = [TraceRequest(2.0, 16, 9), TraceRequest(2.5, 17, 1), TraceRequest(4.0, 1, 3)]

    assert [
        {"timestamp": 0.0, "input_length": 16, "output_length": 9, "hash_ids": [-1]},
        {"timestamp": 0.5, "input_length": 17, "output_length": 1, "hash_ids": [-2, -3]},
        {"timestamp": 2.0, "input_length": 1, "output_length": 3, "hash_ids": [-4]},
    ] == timed_requests(trace, max_model_len=512)


def test_shared_prefixes() -> None:
    """
    Prompts share the numbers of the blocks that they share in the trace, and no others.
    """
    trace = [
        TraceRequest(0.0, 70, 1, hash_ids=(7, 8, 9), block_tokens=32),
        TraceRequest(1.0, 70, 1, hash_ids=(7, 8, 10), block_tokens=32),
        TraceRequest(2.0, 20, 1),
    ]
    first, second, third = (line["hash_ids"] for line in timed_requests(trace, max_model_len=512))

    assert first[:4] == second[:4]
    assert (5, 5, 2) == (len(first), len(second), len(third))
    assert 8 == len({*first, *second, *third})


def test_what_does_not_fit() -> None:
    """
    A prompt that leaves no room is left out; an output is cut where the model's context ends.
    """
    trace = [
        TraceRequest(1.0, 64, 1),
        TraceRequest(2.0, 63, 5),
        TraceRequest(3.0, 60, 4),
        TraceRequest(4.0, 60, 5),
    ]
    lines = timed_requests(trace, max_model_len=64)

    assert [(0.0, 63, 1), (1.0, 60, 4), (2.0, 60, 4)] == [
        (line["timestamp"], line["input_length"], line["output_length"]) for line in lines
    ]


def test_nothing_fits() -> None:
    """
    A trace without a prompt that fits is one error.
    """
    with pytest.raises(ConfigError, match="'max_model_len' must be above the shortest prompt of the trace: 64"):
        timed_requests([TraceRequest(0.0, 64, 1)], max_model_len=64)
