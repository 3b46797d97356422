"""
Which sizes are captured: the ladders that servers use, each a function of the engine's limits.

A ladder lists numbers of requests, ascending; `contenders` makes a capture plan of it. A new one is a function of
`Limits` and a line in `LADDERS`.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

LARGEST = 512
"""vLLM's default ceiling, in tokens."""

EXPONENTIAL_SIZES = 15
STRIDE = 256

LEGACY_STREAMS = 1800
"""Streams that vllm-ascend left to graphs until 2026-06 (its `update_aclgraph_sizes`)."""
_STREAMS_A_GROUP = 40
"""What the same formula sets aside for each group of ranks that communicate."""


@attrs.frozen
class Limits:
    """
    What a ladder may depend on.

    Args:
        max_num_seqs: The most requests of a step.
        max_num_batched_tokens: The most tokens of a step.
        query_len: Tokens of one uniform decode.
        num_layers: Decoder layers of the model.
        num_groups: Kinds of parallelism with more than one rank, of tensor and data parallelism.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    num_layers: int = 1
    num_groups: int = 0

    @property
    def largest(self) -> int:
        """
        The largest size that vLLM captures by default, in tokens.
        """
        return min(2 * self.max_num_seqs * self.query_len, LARGEST, self.max_num_batched_tokens)


def vllm(limits: Limits) -> tuple[int, ...]:
    """
    vLLM's default: 1, 2, 4, then every 8 up to 256, then every 16 (`VllmConfig._set_cudagraph_sizes`, 0.32).
    """
    largest = limits.largest
    return tuple(n for n in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if n <= largest)


def legacy(limits: Limits) -> tuple[int, ...]:
    """
    vllm-ascend's before 2026-06: as many of vLLM's sizes as the streams allow, evenly by index.

    The formula is that of `update_aclgraph_sizes` without `HCCL_OP_EXPANSION_MODE=AIV`, as of 0.18, where each
    size also has a FULL graph.
    """
    sizes = vllm(limits)
    streams = LEGACY_STREAMS - len(sizes) - _STREAMS_A_GROUP * limits.num_groups
    count = max(streams // ((limits.num_layers + 1) * (1 + 2 * limits.num_groups)), 1)
    if count >= len(sizes):
        return sizes
    if count == 1:
        return sizes[-1:]
    return tuple(sizes[round(i * (len(sizes) - 1) / (count - 1))] for i in range(count))


def exponential(limits: Limits) -> tuple[int, ...]:
    """
    Sizes in geometric progression, rounded up, as vLLM on Gaudi has them; here `EXPONENTIAL_SIZES` of them.

    Gaudi's own number, ceil(log2(max)) + 1, would give the powers of two.
    """
    ratio = limits.largest ** (1 / (EXPONENTIAL_SIZES - 1))
    # The last power of the ratio would be rounded: it is the largest size itself.
    return tuple(sorted({*(math.ceil(ratio**i - 1e-9) for i in range(EXPONENTIAL_SIZES - 1)), limits.largest}))


def powers_of_two(limits: Limits) -> tuple[int, ...]:
    """
    As on TPUs: each size twice the one before.
    """
    largest = limits.largest
    return tuple(sorted({*(1 << i for i in range(largest.bit_length())), largest}))


def to_budget(limits: Limits) -> tuple[int, ...]:
    """
    vLLM's, and on to the most tokens of a step in strides of `STRIDE`: no mixed step is left to run eagerly.
    """
    above = range(limits.largest + STRIDE, limits.max_num_batched_tokens, STRIDE)
    return tuple(sorted({*vllm(limits), *above, limits.max_num_batched_tokens}))


LADDERS: Mapping[str, Callable[[Limits], tuple[int, ...]]] = MappingProxyType(
    {
        "vllm": vllm,
        "legacy": legacy,
        "exponential": exponential,
        "powers_of_two": powers_of_two,
        "to_budget": to_budget,
    }
)
