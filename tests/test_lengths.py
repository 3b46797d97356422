"""Lengths padded to the rows of a graph: vllm-ascend's vectors, and what holds for all."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.errors import ReplayError
from aclgraph_dispatch.lengths import (
    pad_actual_seq_len_q_mtp_disable_pad,
    pad_actual_seq_len_q_mtp_enable_pad,
    pad_lengths,
    uniform_query_ends,
)

query_lens = st.lists(st.integers(0, 20), max_size=12)


def ends_of(lens):
    """
    Where requests of *lens* query tokens end.
    """
    return [sum(lens[: n + 1]) for n in range(len(lens))]


def enable_pad(num_pads, ends, target_ends):
    """
    Pad *ends* by those of the target; nothing that is given may change.
    """
    given_ends, given_target = list(ends), list(target_ends)
    target = SimpleNamespace(actual_seq_lengths_q=target_ends)
    padded = pad_actual_seq_len_q_mtp_enable_pad(num_pads, len(ends), ends, target)
    assert (ends, target_ends) == (given_ends, given_target)
    assert padded is not ends
    return padded


def rises(ends):
    """
    Whether no row ends before it begins.
    """
    return all(a <= b for a, b in pairwise([0, *ends]))


@pytest.mark.parametrize(
    ("lengths", "num_rows", "padded"),
    [([3, 7], 4, [3, 7, 0, 0]), ([3, 7], 2, [3, 7]), ([], 3, [0, 0, 0]), ([0], 1, [0]), ((5,), 2, [5, 0])],
)
def test_pad_lengths(lengths, num_rows, padded):
    """
    Rows without a request have no keys.
    """
    assert pad_lengths(lengths, num_rows) == padded


@given(lengths=st.lists(st.integers(0, 100), max_size=9), num_pads=st.integers(0, 9))
def test_padded_lengths_are_new(lengths, num_pads):
    """
    The requests' lengths, then 0, one a row, in a list of its own.
    """
    before = list(lengths)
    padded = pad_lengths(lengths, len(lengths) + num_pads)
    padded.append(-1)

    assert lengths == before
    assert padded == [*before, *[0] * num_pads, -1]


@pytest.mark.parametrize(
    ("lengths", "match"),
    [([1, 2, 3], "one length a row: 3 for 2 rows"), ([1, -4], r"must be >= 0: \[1, -4\]")],
)
def test_lengths_that_no_graph_takes(lengths, match):
    """
    More requests than rows are not cut off, and no length is negative.
    """
    with pytest.raises(ReplayError, match=match):
        pad_lengths(lengths, 2)


@pytest.mark.parametrize(
    ("num_tokens", "query_len", "ends"),
    [(4, 1, [1, 2, 3, 4]), (8, 2, [2, 4, 6, 8]), (8, 4, [4, 8]), (0, 2, [])],
)
def test_uniform_query_ends(num_tokens, query_len, ends):
    """
    With k drafts, k + 1 query tokens a row, and the last row ends with the graph.
    """
    assert uniform_query_ends(num_tokens, query_len) == ends


def test_sizes_that_rows_do_not_fill():
    """
    A graph of speculative decodes holds whole requests.
    """
    with pytest.raises(ReplayError, match="requests with 4 query tokens each must have a multiple of that: 6"):
        uniform_query_ends(6, 4)


@pytest.mark.parametrize(
    ("num_pads", "ends", "target_ends", "padded"),
    [
        (1, [2, 4, 6], [2, 4, 6, 8], [2, 4, 6, 8]),
        (1, [2, 4, 6], [2, 4, 6, 100], [2, 4, 6, 100]),  # the row that is too long stays so: there is no other
        (0, [2, 4, 6], [2, 4, 6, 8], [2, 4, 6]),
        (-1, [2, 4], [2, 4, 6, 8], [2, 4]),
        (2, [*range(1, 17)], [*range(2, 37, 2)], [*range(1, 17), 26, 36]),
        (2, [*range(2, 17, 2)], [*range(2, 21, 2)], [*range(2, 21, 2)]),
        (2, [2], [2, 18, 40], [2, 18, 40]),  # only the first row is looked at
        (3, [2], [2, 19, 20, 21], [2, 8, 15, 21]),  # 8.33, 14.67
        (4, [2], [2, 19, 20, 21, 24], [2, 8, 13, 18, 24]),  # 7.5 and 18.5 to even
        (2, [], [2, 4], [2, 4]),
    ],
)
def test_enable_pad(num_pads, ends, target_ends, padded):
    """
    Rows added end where the target's do, or evenly spread if the first were too long.
    """
    assert enable_pad(num_pads, ends, target_ends) == padded


@pytest.mark.parametrize(
    ("num_pads", "ends", "padded"),
    [
        (4, [1, 2, 4, 5], [1, 2, 4, 5, 6, 6, 7, 8]),  # 5.75, 6.5, 7.25
        (1, [1, 2], [1, 2, 3]),
        (0, [1, 3], [1, 3]),
        (-2, [1, 3], [1, 3]),
        (2, [], [1, 2]),
        (2, [2, 4], [2, 4, 4, 4]),
    ],
)
def test_disable_pad(num_pads, ends, padded):
    """
    The tokens left are spread evenly, halves rounded to even.
    """
    before = list(ends)

    assert pad_actual_seq_len_q_mtp_disable_pad(num_pads, len(ends), ends) == padded
    assert ends == before


@given(lens=query_lens, pad_lens=query_lens)
def test_enable_pad_holds(lens, pad_lens):
    """
    One end a row, rising, the requests' own first, and the last is the target's.
    """
    ends = ends_of(lens)
    target_ends = ends_of([*lens, *pad_lens, 3])
    padded = enable_pad(len(pad_lens), ends, target_ends)

    assert padded[: len(ends)] == ends
    assert len(padded) == len(ends) + len(pad_lens)
    assert rises(padded)
    assert padded[-1:] == target_ends[: len(padded)][-1:]


@given(lens=st.lists(st.integers(0, 3), max_size=12), num_pads=st.integers(1, 12))
def test_disable_pad_holds(lens, num_pads):
    """
    One end a row, rising, the requests' own first, and the last is the number of rows; refused if the requests
    have more tokens than that.
    """
    ends = ends_of(lens)
    num_rows = len(ends) + num_pads
    if sum(lens) > num_rows:
        with pytest.raises(ReplayError, match="must not end before they begin"):
            pad_actual_seq_len_q_mtp_disable_pad(num_pads, len(ends), ends)
        return
    padded = pad_actual_seq_len_q_mtp_disable_pad(num_pads, len(ends), ends)

    assert padded[: len(ends)] == ends
    assert len(padded) == padded[-1] == num_rows
    assert rises(padded)


def test_ends_that_no_graph_takes():
    """
    A target with too few rows, or one that is behind, is refused.
    """
    with pytest.raises(ReplayError, match="has 3 rows, too few for 2 requests and 2 pads"):
        enable_pad(2, [2, 4], [2, 4, 6])
    with pytest.raises(ReplayError, match=r"must not end before they begin: \[2, 9, 6\]"):
        enable_pad(1, [2, 9], [2, 4, 6])
    with pytest.raises(ReplayError, match=r"must not end before they begin: \[4, 2\]"):
        pad_actual_seq_len_q_mtp_disable_pad(0, 2, [4, 2])
