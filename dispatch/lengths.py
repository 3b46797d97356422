"""
Lengths of the sequences of a step, padded to the rows of the graph that computes them.

Attention takes two lists from the host: the keys of each request, and, where requests have several query tokens,
where the query tokens of each request end. A graph wants as many elements as it has rows, and the last end must be
its number of tokens. The lists made here are new and hold no length of an earlier step: a row without a request
has no keys.

The numbers are those of vllm-ascend: of its v0.11 `update_mla_attn_params`, and of the two functions with "mtp" in
their names in its MLA metadata builder (v0.23), as their public source has them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .errors import ReplayError

MAX_QUERY_LEN = 16
"""Most query tokens of a request for `npu_fused_infer_attention_score` with rotary parts (its documentation)."""


def pad_lengths(lengths: Sequence[int], num_rows: int) -> list[int]:
    """
    The keys of each row: those of the requests, then 0.

    Raises:
        ReplayError: There are more requests than rows, or a length is negative.
    """
    if len(lengths) > num_rows:
        raise ReplayError(f"a graph takes one length a row: {len(lengths)} for {num_rows} rows")
    if min(lengths, default=0) < 0:
        raise ReplayError(f"lengths must be >= 0: {list(lengths)}")
    return [*lengths, *[0] * (num_rows - len(lengths))]


def uniform_query_ends(num_tokens: int, query_len: int) -> list[int]:
    """
    Where query tokens end if every request has *query_len* of them: one element for each row of the graph.

    Raises:
        ReplayError: *num_tokens* is no multiple of *query_len*.
    """
    if num_tokens % query_len:
        msg = f"a graph of requests with {query_len} query tokens each must have a multiple of that: {num_tokens}"
        raise ReplayError(msg)
    return list(range(query_len, num_tokens + 1, query_len))


def pad_actual_seq_len_q_mtp_enable_pad(
    num_reqs_pad_size: int, num_reqs: int, actual_seq_lengths_q: list[int], common_attn_metadata: Any
) -> list[int]:
    """
    Where query tokens end in a graph of *num_reqs* requests and rows without one, for a drafter that computes the
    target's padded batch.

    The rows added end where the target's do. If the first of them were longer than an operator takes, all are
    spread evenly instead, halves rounded to even. A row may still be longer then, if there are too few.

    Args:
        num_reqs_pad_size: Rows to add.
        num_reqs: Requests.
        actual_seq_lengths_q: Where the query tokens of each request end.
        common_attn_metadata: Its `actual_seq_lengths_q` says where those of each row of the target end.

    Raises:
        ReplayError: The target has fewer rows than that, or a row would end before it begins.
    """
    num_pads = max(num_reqs_pad_size, 0)
    ends: list[int] = common_attn_metadata.actual_seq_lengths_q[num_reqs : num_reqs + num_pads]
    if len(ends) < num_pads:
        num_rows = len(common_attn_metadata.actual_seq_lengths_q)
        raise ReplayError(f"the target has {num_rows} rows, too few for {num_reqs} requests and {num_pads} pads")
    start = actual_seq_lengths_q[-1] if actual_seq_lengths_q else 0
    if ends and ends[0] - start > MAX_QUERY_LEN:
        ends = _spread(start, ends[-1], num_pads)
    return _rising([*actual_seq_lengths_q, *ends])


def pad_actual_seq_len_q_mtp_disable_pad(
    num_reqs_pad_size: int, num_reqs: int, actual_seq_lengths_q: list[int]
) -> list[int]:
    """
    Where query tokens end in a graph of *num_reqs* requests and rows without one, for a drafter that computes
    accepted tokens only: the tokens left, up to one a row, are spread evenly over the rows added, halves rounded
    to even.

    Args:
        num_reqs_pad_size: Rows to add.
        num_reqs: Requests.
        actual_seq_lengths_q: Where the query tokens of each request end.

    Raises:
        ReplayError: The requests have more query tokens than the graph, or a row ends before it begins.
    """
    if num_reqs_pad_size <= 0:
        return _rising(list(actual_seq_lengths_q))
    start = actual_seq_lengths_q[-1] if actual_seq_lengths_q else 0
    ends = _spread(start, num_reqs + num_reqs_pad_size, num_reqs_pad_size)
    return _rising([*actual_seq_lengths_q, *ends])


def _spread(start: int, end: int, num_rows: int) -> list[int]:
    ends: list[int] = np.rint(np.linspace(start, end, num_rows + 1)[1:]).astype(int).tolist()
    return ends


def _rising(ends: list[int]) -> list[int]:
    if any(end < start for start, end in pairwise([0, *ends])):
        raise ReplayError(f"the query tokens of a row must not end before they begin: {ends}")
    return ends
