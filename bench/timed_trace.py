"""
From the requests of a trace to lines of vLLM's `timed_trace`, which its benchmark client replays.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any

import attrs

from aclgraph_dispatch.errors import ConfigError

from .demo import LONGEST_OUTPUT, LONGEST_PROMPT, OUTPUT_SCALE, PROMPT_SCALE
from .requests import simulated_requests
from .traces import TraceRequest

BLOCK_TOKENS = 16
"""Tokens that a number of `hash_ids` stands for."""


def scaled_lengths(trace: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """
    The same requests, as much shorter as those of the demonstration; shared prefixes stay shared.
    """
    return tuple(
        attrs.evolve(
            request,
            prompt_tokens=min(max(request.prompt_tokens // PROMPT_SCALE, 1), LONGEST_PROMPT),
            output_tokens=min(max(request.output_tokens // OUTPUT_SCALE, 2), LONGEST_OUTPUT),
            cached_tokens=request.cached_tokens // PROMPT_SCALE,
            block_tokens=-(-request.block_tokens // PROMPT_SCALE),
        )
        for request in trace
    )


def timed_requests(trace: Iterable[TraceRequest], *, max_model_len: int) -> list[dict[str, Any]]:
    """
    The requests as lines of vLLM's `timed_trace`; prompts that share a prefix there share its `hash_ids`.

    Raises:
        ConfigError: All prompts are too long.
    """
    fresh = count(-1, -1)  # numbers that no prefix has
    requests = simulated_requests(trace, block_size=BLOCK_TOKENS, max_model_len=max_model_len)
    if not requests:
        raise ConfigError(
            f"'max_model_len' must be above the shortest prompt of the trace: {max_model_len}; raise it, or "
            "scale the lengths"
        )
    start = requests[0].arrival_seconds
    return [
        {
            "timestamp": r.arrival_seconds - start,
            "input_length": r.prompt_tokens,
            # A server refuses what does not fit.
            "output_length": min(r.output_tokens, max_model_len - r.prompt_tokens),
            "hash_ids": [
                *r.blocks,
                *(next(fresh) for _ in range(len(r.blocks) * BLOCK_TOKENS, r.prompt_tokens, BLOCK_TOKENS)),
            ],
        }
        for r in requests
    ]
