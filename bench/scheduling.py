"""
What a scheduler decides for a step, in numbers: the words that vLLM's scheduler and the compact one share.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@attrs.frozen
class SchedulerSettings:
    """
    The settings of vLLM's scheduler that matter here, under vLLM's names.

    Args:
        max_num_seqs: The most requests of a step.
        max_num_batched_tokens: The most tokens of a step.
        max_model_len: The most tokens of a sequence.
        num_blocks: Blocks of the KV cache; vLLM keeps one of them for padding.
        block_size: Tokens of a block.
        enable_prefix_caching: Whether equal prefixes share blocks.
        async_scheduling: Whether a step is scheduled before the one before it has ended.
        num_spec_tokens: Draft tokens of a decode.
        long_prefill_token_threshold: The longest prefill chunk while there is more than one request; 0 for any.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    num_spec_tokens: int = 0
    long_prefill_token_threshold: int = 0


@attrs.frozen
class SimulatedRequest:
    """
    A request without its words: when it arrives, how long it is, whose prefix it shares.

    Args:
        index: Its number, from 0, in the order of arrival.
        arrival_seconds: From the start of the trace.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens it generates, unless the longest sequence ends it.
        blocks: Numbers of the prompt's first blocks of `block_size` tokens; equal numbers are equal prefixes, up
            to and including the block. Blocks without a number, and those of generated tokens, are like no other.
    """

    index: int
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@attrs.frozen
class ScheduledStep:
    """
    The requests of one step, in the scheduler's order: those that were running, then those admitted.

    All arrays have the shape (num_reqs,), dtype int32. An empty step has no requests.

    Args:
        requests: Their indices.
        num_scheduled: Tokens computed in the step, drafts included.
        num_computed: Tokens in the KV cache before it; with async scheduling, as if what is under way were done.
        num_known: Prompt and generated tokens, with those that steps under way will have sampled.
        num_drafts: Draft tokens among the scheduled ones.
        num_prompt: Lengths of the prompts.
    """

    requests: tuple[int, ...]
    num_scheduled: IntArray
    num_computed: IntArray
    num_known: IntArray
    num_drafts: IntArray
    num_prompt: IntArray

    @property
    def num_tokens(self) -> int:
        """
        Tokens computed in the step.
        """
        return int(self.num_scheduled.sum())

    def of_part(self, requests: tuple[int, int]) -> "ScheduledStep":
        """
        The requests of a half-open range.
        """
        inside = slice(*requests)
        return ScheduledStep(
            self.requests[inside],
            self.num_scheduled[inside],
            self.num_computed[inside],
            self.num_known[inside],
            self.num_drafts[inside],
            self.num_prompt[inside],
        )

    def num_sampled(self) -> list[int]:
        """
        Tokens that each request samples if no draft is accepted: one, or none while its prompt is not done.
        """
        ends = self.num_computed + self.num_scheduled - self.num_drafts
        return (ends >= self.num_known).astype(np.int32).tolist()


@attrs.frozen
class Delivery:
    """
    What a request got from a step.

    Args:
        request: Its index.
        num_tokens: Tokens delivered, at least one.
        is_finished: Whether it is done.
    """

    request: int
    num_tokens: int
    is_finished: bool


class Scheduler(Protocol):
    """
    What the simulation asks of a scheduler.

    Steps are updated in the order in which they were scheduled; with async scheduling one more may be scheduled
    before. Drafts are proposed by themselves: after a step that sampled, a request has `num_spec_tokens` of them.
    """

    settings: SchedulerSettings

    def add(self, request: SimulatedRequest) -> None:
        """
        Take a request into the waiting queue.
        """

    def schedule(self) -> ScheduledStep:
        """
        Decide the next step; it is empty where nothing can be computed now.
        """

    def update(self, step: ScheduledStep, num_sampled: Sequence[int]) -> list[Delivery]:
        """
        Take the result of *step*: tokens sampled by each of its requests, accepted drafts included.
        """

    def has_requests(self) -> bool:
        """
        Whether a request is not finished.
        """

    @property
    def num_running(self) -> int:
        """
        Requests admitted and not finished or preempted.
        """

    @property
    def num_waiting(self) -> int:
        """
        Requests that are not admitted, preempted ones included.
        """

    @property
    def num_preemptions(self) -> int:
        """
        Preemptions so far.
        """

    @property
    def num_free_blocks(self) -> int:
        """
        Blocks that can be allocated, cached ones without a user included.
        """
