"""From traces to simulated requests: who is taken, and which prefixes are shared."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.requests import simulated_requests
from aclgraph_dispatch.bench.scheduling import SimulatedRequest
from aclgraph_dispatch.bench.traces import TraceRequest, read_trace

SHARED = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "traces")


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """
    How many numbers two tuples have in common at their start.
    """
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


def test_plain() -> None:
    """
    Requests keep their arrival and lengths, and get numbers in order.
    """
    trace = [TraceRequest(0.5, 8, 4), TraceRequest(0.75, 900, 1)]

    assert (SimulatedRequest(0, 0.5, 8, 4), SimulatedRequest(1, 0.75, 900, 1)) == simulated_requests(
        trace, max_model_len=1024
    )


def test_prompts_that_do_not_fit() -> None:
    """
    A prompt must leave room for a token; one that does not is left out, and the others are numbered without it.
    """
    trace = [TraceRequest(float(i), prompt, 50) for i, prompt in enumerate([99, 100, 101, 1])]
    taken = simulated_requests(trace, max_model_len=100)

    assert [(0, 0.0, 99, 50), (1, 3.0, 1, 50)] == [
        (r.index, r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in taken
    ]


@pytest.mark.parametrize(
    ("prompt", "num_blocks"), [(1, 0), (15, 0), (16, 1), (512, 32), (527, 32), (528, 33), (1025, 64)]
)
def test_whole_blocks_inside_the_prompt(prompt: int, num_blocks: int) -> None:
    """
    A block of the trace is as many of ours as lie wholly inside the prompt.
    """
    hash_ids = tuple(range(-(-prompt // 512)))
    (request,) = simulated_requests(
        [TraceRequest(0.0, prompt, 1, hash_ids=hash_ids, block_tokens=512)], max_model_len=4096
    )

    assert num_blocks == len(request.blocks) == len(set(request.blocks))


def test_shared_as_far_as_the_trace_s_blocks() -> None:
    """
    Prompts share the blocks of their common start, and no others.
    """
    first, second, third = (
        r.blocks
        for r in simulated_requests(
            [
                TraceRequest(0.0, 1536, 1, hash_ids=(5, 6, 7), block_tokens=512),
                TraceRequest(0.0, 1500, 1, hash_ids=(5, 6, 8), block_tokens=512),
                TraceRequest(0.0, 1536, 1, hash_ids=(9, 6, 7), block_tokens=512),
            ],
            max_model_len=4096,
        )
    )

    assert first[:64] == second[:64]
    assert not set(first[64:]) & set(second[64:])
    # A trace may number blocks by their own content: the same content after another start is another prefix.
    assert not set(first) & set(third)


def test_numbers_without_a_place() -> None:
    """
    Numbers beyond the prompt's end are passed over, and a prompt may have fewer than it has blocks.
    """
    long, short = (
        simulated_requests([TraceRequest(0.0, 100, 1, hash_ids=ids, block_tokens=16)], max_model_len=512)[0].blocks
        for ids in (tuple(range(20)), (0, 1))
    )

    assert 6 == len(long)
    assert short == long[:2]


@pytest.mark.parametrize(("cached", "num_blocks"), [(0, 0), (15, 0), (16, 1), (512, 32), (520, 32), (2000, 62)])
def test_cached_tokens(cached: int, num_blocks: int) -> None:
    """
    A number of cached tokens is a piece of the common stem, within the prompt.
    """
    full, request = simulated_requests(
        [TraceRequest(0.0, 4000, 1, 4000), TraceRequest(1.0, 1000, 1, cached)], max_model_len=4096
    )

    assert 250 == len(full.blocks) == len(set(full.blocks))
    assert full.blocks[:num_blocks] == request.blocks


def test_stem_is_apart() -> None:
    """
    No block of a trace is one of the stem.
    """
    by_number, by_count = simulated_requests(
        [
            TraceRequest(0.0, 320, 1, hash_ids=tuple(range(20)), block_tokens=16),
            TraceRequest(0.0, 320, 1, cached_tokens=320),
        ],
        max_model_len=4096,
    )

    assert 20 == len(by_number.blocks) == len(by_count.blocks)
    assert not set(by_number.blocks) & set(by_count.blocks)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 90)), min_size=1, max_size=8),
    st.sampled_from([1, 4, 8, 12, 16, 32]),
    st.sampled_from([4, 16]),
)
def test_equal_numbers_are_equal_prefixes(
    drawn: list[tuple[list[int], int]], block_size: int, block_tokens: int
) -> None:
    """
    Written out as tokens, two prompts share exactly the blocks that their tokens share, whatever the block sizes.
    """
    trace = [
        TraceRequest(0.0, prompt, 1, hash_ids=tuple(ids), block_tokens=block_tokens if ids else 0)
        for ids, prompt in drawn
    ]
    tokens = [
        [(hash_id, offset) for hash_id in ids for offset in range(block_tokens)][:prompt] for ids, prompt in drawn
    ]
    requests = simulated_requests(trace, block_size=block_size, max_model_len=1000)
    seen: dict[int, tuple[tuple[int, int], ...]] = {}
    for request, words in zip(requests, tokens, strict=True):
        assert len(words) // block_size == len(request.blocks)
        for index, number in enumerate(request.blocks):
            prefix = tuple(words[: (index + 1) * block_size])

            assert prefix == seen.setdefault(number, prefix)
    assert len(seen) == len(set(seen.values()))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
def test_mooncake_raw_and_normalised() -> None:
    """
    In the raw lines a request shares as many whole blocks with those before it as the normalised form counts.
    """
    raw = read_trace(SHARED / "mooncake_raw_head.jsonl")
    counted = read_trace(SHARED / "mooncake_conversation_5min.csv.gz", limit=len(raw))
    requests = simulated_requests(raw, max_model_len=10**6)
    for i, request in enumerate(requests):
        longest = max((common(request.blocks, other.blocks) for other in requests[:i]), default=0)

        assert counted[i].cached_tokens == longest * 16


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
def test_stem_keeps_most_hits() -> None:
    """
    On the recorded sample the common stem keeps 95 % of the hits that were counted, were no block ever evicted.
    """
    trace = read_trace(SHARED / "mooncake_conversation_5min.csv.gz")
    known: set[int] = set()
    hits = 0
    for request in simulated_requests(trace, max_model_len=10**6):
        hits += 16 * len(known.intersection(request.blocks))
        known.update(request.blocks)

    assert pytest.approx(0.953, abs=0.001) == hits / sum(r.cached_tokens for r in trace)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
def test_all_of_mooncake() -> None:
    """
    Numbers stay small enough for any integer, and prompts beyond the longest sequence are missing.
    """
    trace = read_trace(SHARED / "mooncake_conversation_5min.csv.gz")
    requests = simulated_requests(trace, max_model_len=32_768)

    assert sum(r.prompt_tokens < 32_768 for r in trace) == len(requests) < len(trace)
    assert max(max(r.blocks, default=0) for r in requests) < 2**31
    assert json.dumps(requests[5].blocks)
