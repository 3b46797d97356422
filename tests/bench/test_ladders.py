from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.ladders import LADDERS, Limits, exponential, legacy, powers_of_two, to_budget, vllm

limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 600),
    max_num_batched_tokens=st.integers(1, 9000),
    query_len=st.integers(1, 5),
    num_layers=st.integers(1, 100),
    num_groups=st.integers(0, 2),
)


@pytest.mark.parametrize("name", list(LADDERS))
@given(limits=limits)
def test_ladders_ascend_within_the_limits(name, limits):
    """
    Every ladder ascends from 1 or more and holds nothing that no step can fill.
    """
    sizes = LADDERS[name](limits)

    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] <= limits.max_num_batched_tokens


def test_vllm_default():
    """
    vLLM's default has 51 sizes up to 512, and ends at twice the requests or the tokens of a step.
    """
    assert 51 == len(vllm(Limits(256, 8192)))
    assert (1, 2, 4, 8, 16, 24, 32) == vllm(Limits(16, 8192))
    assert (1, 2, 4, 8, 16, 24) == vllm(Limits(256, 30))


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "expected"),
    # The formula of costs.md 2.5 with 51 sizes: floor((1800 - 51 - 40 g) / (layers + 1) / (1 + 2 g)).
    [(28, 0, 51), (48, 0, 35), (61, 1, 9), (94, 2, 3)],
)
def test_legacy_count(num_layers, num_groups, expected):
    """
    The legacy ladder has as many sizes as the streams allow, the first and the last among them.
    """
    sizes = legacy(Limits(256, 8192, num_layers=num_layers, num_groups=num_groups))

    assert expected == len(sizes)
    assert (1, 512) == (sizes[0], sizes[-1])


def test_legacy_with_a_single_size():
    """
    Where the streams are enough for one size only, it is the largest.
    """
    assert (512,) == legacy(Limits(256, 8192, num_layers=1000, num_groups=0))


def test_powers_of_two():
    """
    Each size is twice the one before, up to the largest.
    """
    assert (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) == powers_of_two(Limits(256, 8192))
    assert (1, 2, 4, 6) == powers_of_two(Limits(3, 8192))


def test_exponential_grows_evenly():
    """
    Fifteen sizes, no two neighbours more than about the common ratio apart.
    """
    sizes = exponential(Limits(256, 8192))

    assert 512 == sizes[-1]
    assert 14 <= len(sizes) <= 15
    assert all(later / earlier <= 2 for earlier, later in pairwise(sizes))


def test_to_budget_leaves_no_step():
    """
    vLLM's sizes and on to the most tokens of a step.
    """
    assert (*vllm(Limits(256, 2048)), 768, 1024, 1280, 1536, 1792, 2048) == to_budget(Limits(256, 2048))
