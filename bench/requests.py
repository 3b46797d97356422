"""
From the requests of a trace to those of a simulation.
"""

from collections.abc import Iterable

from .scheduling import SimulatedRequest
from .traces import TraceRequest

_STEM = -1
"""The number of every block of the common stem; a trace's own are not negative."""


def simulated_requests(
    trace: Iterable[TraceRequest], *, block_size: int = 16, max_model_len: int
) -> tuple[SimulatedRequest, ...]:
    """
    The requests that an engine takes, renumbered from 0.

    A prompt of `max_model_len` tokens or more is left out, as vLLM rejects it before the scheduler; outputs that
    do not fit are left for the scheduler to cut. The difference in length is the number of those left out.

    The trace's blocks become blocks of `block_size` tokens, as far as they lie wholly inside the prompt. Where
    only a number of cached tokens is known, all prompts start with pieces of one common stem: a request with c of
    them has its first c // `block_size` blocks, and the first request that reaches so far computes them. On the
    Mooncake sample 95 % of the counted hits remain, in fewer blocks than the conversations had, so that a small
    cache keeps them more easily.

    Args:
        trace: In order of arrival.
        block_size: Tokens of a block of the KV cache.
        max_model_len: The most tokens of a sequence.
    """
    # A tree of prefixes: (number of the parent, block of the trace) -> number of the block's first token. By
    # prefix, as some traces number blocks by their own content only; a block of b tokens takes b numbers, so that
    # a smaller block inside it is named by the number of its last token.
    tree: dict[tuple[int, int], int] = {}
    num_taken = 0
    requests: list[SimulatedRequest] = []
    for request in trace:
        if request.prompt_tokens >= max_model_len:
            continue
        block_tokens = request.block_tokens
        hash_ids = request.hash_ids
        if not hash_ids:
            block_tokens = block_size
            hash_ids = (_STEM,) * (min(request.cached_tokens, request.prompt_tokens) // block_size)
        firsts: list[int] = []
        parent = -1
        for hash_id in hash_ids:
            parent = tree.setdefault((parent, hash_id), num_taken)
            if parent == num_taken:
                num_taken += block_tokens
            firsts.append(parent)
        ends = range(block_size - 1, min(request.prompt_tokens, len(firsts) * block_tokens), block_size)
        blocks = tuple(firsts[end // block_tokens] + end % block_tokens for end in ends)
        requests.append(
            SimulatedRequest(
                len(requests), request.arrival_seconds, request.prompt_tokens, request.output_tokens, blocks
            )
        )
    return tuple(requests)
