"""The answer to one step: which part of the batch meets which graph, and why."""

import enum

import attrs
from attrs import validators


class RuntimeMode(enum.Enum):
    """
    How a part runs; the values are vLLM's, and the smaller one wins when ranks must agree.
    """

    # As members are compared; Python's own computes it anew from the name.
    __hash__ = object.__hash__

    NONE = 0
    """Eager: no graph."""
    PIECEWISE = 1
    """A graph for every piece between attention layers; attention itself runs eagerly."""
    FULL = 2
    """One graph for the whole forward pass."""


class Reason(enum.Enum):
    """
    Why a part got its mode.

    `EXACT` and `PADDED` say that the policy's best mode was used. `CHEAPER` and `CHEAPER_EAGER` say that a cost
    model preferred another one, `RANK_VOTE` that other ranks could not use it. All others name the last obstacle
    that was met on the way from the best mode to the one used.
    """

    # As members are compared; Python's own computes it anew from the name.
    __hash__ = object.__hash__

    EXACT = "exact"
    """The graph has exactly the part's size."""
    PADDED = "padded"
    """A larger captured size is used."""
    OVER_MAX = "over_max"
    """The part has more tokens than the largest size captured in the wanted mode."""
    NOT_CAPTURED = "not_captured"
    """No graph was captured in the wanted mode, or none for this number of LoRA adapters."""
    RAGGED = "ragged"
    """The decodes differ in their number of tokens."""
    MIXED = "mixed"
    """Decodes and prefills together."""
    PREFILL = "prefill"
    """No request decodes."""
    BACKEND_LIMIT = "backend_limit"
    """The attention backend cannot run the wanted mode, or the caller does not allow it in this step."""
    DISABLED = "disabled"
    """The policy uses no graphs."""
    CHEAPER = "cheaper"
    """By the cost model a graph of another mode takes less time."""
    CHEAPER_EAGER = "cheaper_eager"
    """By the cost model no graph takes less time."""
    RANK_VOTE = "rank_vote"
    """The ranks run what all of them can, in the size that the largest needs."""


@attrs.frozen(cache_hash=True)
class BatchDescriptor:
    """
    The whole key of a graph: two batches meet the same graph exactly when their descriptors are equal.

    Args:
        mode: The runtime mode.
        num_tokens: Tokens after padding.
        num_reqs: Requests after padding; None where any number fits (PIECEWISE, eager).
        query_len: Tokens of every request; None where they may differ.
        num_active_loras: LoRA adapters the graph was captured for.
        role: Which model: "target", or the drafter's name.
    """

    mode: RuntimeMode
    num_tokens: int = attrs.field(validator=[validators.instance_of(int), validators.ge(1)])
    num_reqs: int | None = None
    query_len: int | None = None
    num_active_loras: int = 0
    role: str = "target"


@attrs.frozen
class Part:
    """
    A contiguous share of the batch that runs in one forward pass.

    Args:
        mode: How it runs.
        descriptor: The graph it meets; for an eager part, its own size.
        requests: Half-open range of its requests.
        tokens: Half-open range of its tokens, before padding.
        reason: Why this mode.
        pads_drafts: Whether the drafts of its requests are padded, so that each has the graph's query length.
        seconds: What the cost model predicts, where there is one.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor
    requests: tuple[int, int]
    tokens: tuple[int, int]
    reason: Reason
    pads_drafts: bool = False
    seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """
        Tokens before padding.
        """
        return self.tokens[1] - self.tokens[0]

    @property
    def num_padded_tokens(self) -> int:
        """
        Tokens after padding.
        """
        return self.descriptor.num_tokens

    @property
    def num_paddings(self) -> int:
        """
        Tokens that are computed and dropped.
        """
        return self.num_padded_tokens - self.num_tokens


@attrs.frozen
class StepPlan:
    """
    What to run this step: no part for an empty batch, else one or more that cover it in order.
    """

    parts: tuple[Part, ...]
