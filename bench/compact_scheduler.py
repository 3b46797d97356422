"""
vLLM's scheduler in numbers only, for sweeps: the same batches, many times faster.

Theory of operation, for vLLM 0.32, first come first served, and an ordinary decoder:

**Tokens.** A request *knows* its prompt and what was delivered to it. It is *ahead* of that by what steps under
way will sample, as if all drafts were accepted; vLLM calls the difference placeholders. In a step it computes what
lies between *computed* and *ahead*, and its drafts: a chunk of a prompt and a decode are one rule. A step that
reaches *ahead* samples: from then on the request is ahead by one more, and has its full number of drafts again.
Drafts that turn out rejected are taken off *computed* and *ahead* both. Without async scheduling no step is under
way when the next one is scheduled, and nobody is ahead.

**Running requests** come first, in the order of their admission, while there are tokens left in the step's budget.
What a request computes is cut to the long prefill threshold (if there is more than one request at all), to the
budget, and to what the longest sequence leaves, one token being kept for the sample. With nothing left the request
is passed over, and so is one that is sure to get its last token from a step under way.

**Blocks.** A request needs blocks for all that is computed. If they run out, the last running request is
preempted, over and over; if it comes to the one in need itself, no other running request is scheduled. A preempted
request loses its blocks and all that was computed, and becomes the first of the waiting. What steps under way
sample for it is stale: it is delivered, and the request may end by it, but it does not count as computed. It has
come when the next step is scheduled.

**Waiting requests** are admitted unless the step preempted, while there is budget and fewer than the most requests
run. Blocks must be free for all that the request knows, though only a chunk is computed now; the first that does
not fit keeps all others waiting. With drafts, a request that has one token to compute, because the cache has the
others or there are none, gets a decode's full number of tokens, so that the step stays uniform. Not so if a later
chunk of a prompt is in the step anyway, nor if nothing is hit and no running request is in the step; and if the
budget is too small for the drafts, the request waits. They are accepted or rejected as any others.

**Prefix cache.** An admitted request hits what is cached (see `block_pool`) short of its last known token, which
must be computed. Blocks are cached when a step computes them, as far as their tokens are known then; with async
scheduling also when tokens are delivered, short of the last of them.
"""

from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np

from aclgraph_dispatch.errors import ConfigError

from .block_pool import BlockPool, BlockTable
from .scheduling import Delivery, IntArray, ScheduledStep, SchedulerSettings, SimulatedRequest


@attrs.define(eq=False)
class _Request:
    num_prompt: int
    end: int  # tokens with the last that it may generate
    stop: int  # the same, or the longest sequence
    known: int
    ahead: int
    table: BlockTable
    one_token: Delivery  # what it gets from most steps
    computed: int = 0
    drafts: int = 0
    last_step: int = 0  # of which it was part
    stale_step: int = 0  # up to and including it, samples are stale


@attrs.define(eq=False)
class _Batch:
    # A step as it grows. Steps are numbered from 1.
    number: int
    budget: int
    longest_chunk: int
    has_later_chunks: bool = False
    requests: list[_Request] = attrs.Factory(list)
    scheduled: list[int] = attrs.Factory(list)
    computed: list[int] = attrs.Factory(list)
    known: list[int] = attrs.Factory(list)


@attrs.frozen
class _UnderWay:
    number: int
    step: ScheduledStep
    requests: list[_Request]


class CompactScheduler:
    """
    A copy of vLLM's decisions without its data; see `scheduling.Scheduler` and the theory above.

    Drafts are counted as an n-gram drafter's: no slots of the batch and no blocks besides their own.

    Args:
        settings: Its settings.

    Raises:
        ConfigError: vLLM's own scheduler would fail with the settings.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        if 0 < settings.long_prefill_token_threshold <= settings.num_spec_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold must be 0 or > num_spec_tokens ({settings.num_spec_tokens}): "
                f"{settings.long_prefill_token_threshold}; vLLM fails where it would cut a resumed request's "
                "drafts"
            )
        self.settings = settings
        self.num_preemptions = 0
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._num_scheduled = 0
        self._pool = BlockPool(
            # vLLM keeps one for padding.
            settings.num_blocks - 1,
            settings.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
        )

    def add(self, request: SimulatedRequest) -> None:
        index, known = request.index, request.prompt_tokens
        if known >= self.settings.max_model_len:
            raise ConfigError(
                f"request {index}: prompt_tokens must be < max_model_len ({self.settings.max_model_len}): "
                f"{known}; an engine rejects it before the scheduler"
            )
        end = known + request.output_tokens
        stop = min(end, self.settings.max_model_len)
        table = BlockTable(index, request.blocks)
        self._waiting.append(_Request(known, end, stop, known, known, table, Delivery(index, 1, False)))

    def schedule(self) -> ScheduledStep:
        settings = self.settings
        if len(self._under_way) > settings.async_scheduling:
            raise ValueError(
                "a step must be updated before the next is scheduled; with async scheduling, the next but one"
            )
        self._num_scheduled += 1
        budget = longest_chunk = settings.max_num_batched_tokens
        if settings.long_prefill_token_threshold and len(self._running) + len(self._waiting) > 1:
            longest_chunk = settings.long_prefill_token_threshold
        batch = _Batch(self._num_scheduled, budget, longest_chunk)
        num_preemptions = self.num_preemptions
        self._schedule_running(batch)
        if self._waiting and self.num_preemptions == num_preemptions:
            self._admit(batch)
        step = _step(batch)
        self._under_way.append(_UnderWay(batch.number, step, batch.requests))
        return step

    def update(self, step: ScheduledStep, num_sampled: Sequence[int]) -> list[Delivery]:
        if not self._under_way or self._under_way[0].step is not step:
            raise ValueError("steps must be updated in the order in which they were scheduled")
        under_way = self._under_way.popleft()
        number = under_way.number
        is_async = self.settings.async_scheduling
        deliveries = []
        for request, num_tokens, num_drafts in zip(
            under_way.requests, num_sampled, step.num_drafts.tolist(), strict=True
        ):
            if not num_tokens or request.known == request.stop:
                # Its prompt is not done, or it ended when this step was already under way.
                continue
            known = request.known + num_tokens
            is_stale = number <= request.stale_step
            if known >= request.stop:
                deliveries.append(self._end(request, is_stale))
                continue
            request.known = known
            if is_stale:
                request.ahead = known
            elif num_drafts:
                num_rejected = num_drafts + 1 - num_tokens
                request.computed -= num_rejected
                request.ahead -= num_rejected
            if is_async and known > request.table.next_cached:
                self._pool.cache(request.table, known - 1)
            one = request.one_token
            deliveries.append(one if num_tokens == 1 else Delivery(one.request, num_tokens, False))
        return deliveries

    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def _schedule_running(self, batch: _Batch) -> None:
        number, budget, longest_chunk = batch.number, batch.budget, batch.longest_chunk
        requests, all_scheduled = batch.requests, batch.scheduled
        all_computed, all_known = batch.computed, batch.known
        longest, num_spec_tokens = self.settings.max_model_len - 1, self.settings.num_spec_tokens
        # A preemption shortens the list, and with it the loop.
        for request in self._running:
            if not budget:
                break
            known, ahead, computed, drafts = request.known, request.ahead, request.computed, request.drafts
            if ahead > known and known + 1 >= request.end:
                continue
            num_tokens = ahead + drafts - computed
            if num_tokens > longest_chunk or num_tokens > budget or num_tokens > longest - computed:
                num_tokens = min(num_tokens, longest_chunk, budget, longest - computed)
                if not num_tokens:
                    continue
            end = computed + num_tokens
            table = request.table
            if end > table.capacity and not self._extend(request, end):
                break
            if known >= table.next_cached <= end:
                self._pool.cache(table, min(known, end))
            requests.append(request)
            all_scheduled.append(num_tokens)
            all_computed.append(computed)
            all_known.append(ahead)
            budget -= num_tokens
            if not drafts:
                # Only of interest where there are drafts at all, and then only a prompt's later chunk has none.
                batch.has_later_chunks = True
            request.last_step = number
            request.computed = end
            if end >= ahead:
                request.ahead = end + 1
                request.drafts = num_spec_tokens
        batch.budget = budget

    def _extend(self, request: _Request, num_tokens: int) -> bool:
        # Whether the request still runs once there are blocks for so many tokens.
        pool = self._pool
        while pool.num_missing(request.table, num_tokens) > pool.num_free:
            victim = self._running.pop()
            pool.free(victim.table)
            victim.computed = victim.drafts = 0
            victim.ahead = victim.known
            victim.stale_step = victim.last_step
            self._waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        pool.extend(request.table, num_tokens)
        return True

    def _admit(self, batch: _Batch) -> None:
        waiting, pool, num_spec_tokens = self._waiting, self._pool, self.settings.num_spec_tokens
        num_padded = 1 if batch.has_later_chunks else 1 + num_spec_tokens
        has_running = bool(batch.requests)
        while waiting and batch.budget and len(self._running) < self.settings.max_num_seqs:
            request = waiting[0]
            known = request.known
            hits = pool.find(request.table, known - 1)
            computed = len(hits) * self.settings.block_size
            num_tokens = known - computed
            if num_tokens == 1 and (has_running or hits) and computed + num_padded < self.settings.max_model_len:
                if num_padded > batch.budget:
                    break
                num_tokens = num_padded
            num_tokens = min(num_tokens, batch.longest_chunk, batch.budget)
            end = computed + num_tokens
            if not pool.admit(request.table, hits, end, known):
                break
            self._running.append(waiting.popleft())
            batch.requests.append(request)
            batch.scheduled.append(num_tokens)
            batch.computed.append(computed)
            batch.known.append(known)
            batch.budget -= num_tokens
            request.last_step = batch.number
            request.computed = end
            if end >= known:
                request.ahead = end + 1
                request.drafts = num_spec_tokens

    def _end(self, request: _Request, is_stale: bool) -> Delivery:
        delivery = Delivery(request.one_token.request, request.stop - request.known, True)
        request.known = request.stop
        if is_stale:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            if self.settings.async_scheduling and request.stop > request.table.next_cached:
                self._pool.cache(request.table, request.stop - 1)
            self._pool.free(request.table)
        return delivery


def _step(batch: _Batch) -> ScheduledStep:
    requests = batch.requests
    scheduled, computed, known = _int32(batch.scheduled), _int32(batch.computed), _int32(batch.known)
    return ScheduledStep(
        tuple([request.one_token.request for request in requests]),
        scheduled,
        computed,
        known,
        # What is computed beyond the known tokens.
        np.maximum(computed + scheduled - known, 0),
        _int32([request.num_prompt for request in requests]),
    )


def _int32(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
