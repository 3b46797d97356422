"""
An engine on a virtual clock: a scheduler, our dispatcher, and the time each step would take.

Theory of operation
-------------------
`simulate` is the loop of vLLM's engine core with the forward pass replaced by its time:

1.  Requests that have arrived by now are given to the scheduler.
2.  The scheduler decides a step, our dispatcher decides how it meets the graphs, and a timer says how long that
    takes. It starts when the one before it has ended.
3.  With async scheduling, up to two steps are under way: unless the second place is free, the clock moves to the
    end of the older one, and its tokens are delivered. Without, there is one place.

So a request that arrives during step N is in step N + 1 without async scheduling and in step N + 2 with it, as in
an engine. Data-parallel ranks that exchange tokens inside a forward pass go in lockstep: they vote on every step,
and each lasts as long as the slowest rank. Arrivals go to the rank with the fewest requests, those that wait
counted four times, as vLLM's front end does.

Nothing here draws random numbers but the acceptance of drafts, which depends on seed, request and verification
step alone: the same input gives the same steps, bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from aclgraph_dispatch.agreement import Vote, agree
from aclgraph_dispatch.batch import Batch, Classifier
from aclgraph_dispatch.cost_model import StepTime
from aclgraph_dispatch.dispatcher import Dispatcher
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.step_plan import Part, StepPlan

from .acceptance import Acceptance
from .scheduling import ScheduledStep, Scheduler, SimulatedRequest

WAITING_WEIGHT = 4
"""How much more a waiting request counts than a running one, where ranks share the load (vLLM's front end)."""


class StepTimer(Protocol):
    """
    How long one part of a step takes.
    """

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        """
        The time of *part*; an idle rank's step has no requests, but its part has paddings.
        """


@attrs.frozen
class StepRecord:
    """
    What one rank did in one step; times in seconds on the virtual clock.
    """

    rank: int
    start_seconds: float
    seconds: float
    part: Part
    num_reqs: int
    time: StepTime


@attrs.frozen
class Simulation:
    """
    What came out.

    Args:
        steps: In order; of several ranks those of one step behind one another. Idle ranks' steps are among them.
        arrival_seconds: Shape (num_requests,).
        admitted_seconds: When the engine took the request in, between two steps; shape (num_requests,).
        token_seconds: Of each request, when its tokens came out.
        num_preemptions: Requests that lost their blocks.
    """

    steps: list[StepRecord]
    arrival_seconds: npt.NDArray[np.float64]
    admitted_seconds: npt.NDArray[np.float64]
    token_seconds: list[npt.NDArray[np.float64]]
    num_preemptions: int


@attrs.define
class _Rank:
    scheduler: Scheduler
    dispatcher: Dispatcher
    classifier: Classifier

    def load(self) -> int:
        return WAITING_WEIGHT * self.scheduler.num_waiting + self.scheduler.num_running

    def classify(self, step: ScheduledStep) -> Batch:
        has_drafts = self.classifier.query_len > 1
        return self.classifier.classify(
            step.num_scheduled,
            step.num_computed + step.num_scheduled,
            step.num_known,
            step.num_drafts if has_drafts else None,
            step.num_prompt,
        )


@attrs.frozen
class _UnderWay:
    """
    A step that has been started: of every rank its requests, and when it ends.
    """

    steps: list[ScheduledStep]
    end_seconds: float


def simulate(
    requests: Sequence[SimulatedRequest],
    schedulers: Sequence[Scheduler],
    dispatchers: Sequence[Dispatcher],
    timer: StepTimer,
    *,
    acceptance: Acceptance | None = None,
    on_step: Callable[[ScheduledStep, StepPlan], None] | None = None,
) -> Simulation:
    """
    Serve *requests* on a virtual clock until all are done.

    Args:
        requests: In order of arrival, numbered from 0.
        schedulers: One a rank, new, with equal settings.
        dispatchers: One a rank.
        timer: Says how long a part takes.
        acceptance: How many drafts are accepted, where the settings have drafts; none without it.
        on_step: Told every step of every rank and the plan it follows.

    Raises:
        ConfigError: A request can never be scheduled: the KV cache is too small for it.
    """
    return _Engine(requests, schedulers, dispatchers, timer, acceptance, on_step).run()


class _Engine:
    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        schedulers: Sequence[Scheduler],
        dispatchers: Sequence[Dispatcher],
        timer: StepTimer,
        acceptance: Acceptance | None,
        on_step: Callable[[ScheduledStep, StepPlan], None] | None,
    ) -> None:
        settings = schedulers[0].settings
        self._ranks = [
            _Rank(
                scheduler,
                dispatcher,
                Classifier(
                    max_num_seqs=settings.max_num_seqs,
                    query_len=1 + settings.num_spec_tokens,
                    max_model_len=settings.max_model_len,
                ),
            )
            for scheduler, dispatcher in zip(schedulers, dispatchers, strict=True)
        ]
        self._depth = 2 if settings.async_scheduling else 1
        self._requests = requests
        self._timer = timer
        self._acceptance = acceptance
        self._on_step = on_step
        self._num_arrived = 0
        self._records: list[StepRecord] = []
        self._admitted = np.full(len(requests), np.nan)
        self._tokens: list[list[float]] = [[] for _ in requests]

    def run(self) -> Simulation:
        now = 0.0
        last_end = 0.0
        under_way: list[_UnderWay] = []
        while True:
            self._admit(now)
            if any(rank.scheduler.has_requests() for rank in self._ranks):
                steps = [rank.scheduler.schedule() for rank in self._ranks]
                is_empty = not any(step.requests for step in steps)
                if is_empty and not any(step.requests for u in under_way for step in u.steps):
                    raise ConfigError(self._stuck())
                last_end = max(now, last_end)
                if not is_empty:
                    last_end += self._run_step(steps, last_end)
                under_way.append(_UnderWay(steps, last_end))
                if len(under_way) < self._depth:
                    continue
            elif not under_way:
                if self._num_arrived == len(self._requests):
                    break
                now = max(now, self._requests[self._num_arrived].arrival_seconds)
                continue
            done = under_way.pop(0)
            now = max(now, done.end_seconds)
            self._deliver(done, now)
        return Simulation(
            self._records,
            np.array([r.arrival_seconds for r in self._requests]),
            self._admitted,
            [np.array(seconds) for seconds in self._tokens],
            sum(rank.scheduler.num_preemptions for rank in self._ranks),
        )

    def _admit(self, now: float) -> None:
        requests = self._requests
        while self._num_arrived < len(requests) and requests[self._num_arrived].arrival_seconds <= now:
            request = requests[self._num_arrived]
            min(self._ranks, key=_Rank.load).scheduler.add(request)
            self._admitted[request.index] = now
            self._num_arrived += 1

    def _run_step(self, steps: Sequence[ScheduledStep], start_seconds: float) -> float:
        """
        Record the step of every rank; return how long the slowest takes.
        """
        batches = [rank.classify(step) for rank, step in zip(self._ranks, steps, strict=True)]
        plans = [rank.dispatcher.dispatch(batch) for rank, batch in zip(self._ranks, batches, strict=True)]
        if len(self._ranks) > 1:
            plans = self._settle(batches, plans)
        seconds = 0.0
        for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
            if self._on_step is not None:
                self._on_step(step, plan)
            of_rank = 0.0
            for part in plan.parts:
                time = self._timer(step if len(plan.parts) == 1 else step.of_part(part.requests), part)
                record = StepRecord(number, start_seconds + of_rank, time.seconds, part, len(step.requests), time)
                self._records.append(record)
                of_rank += time.seconds
            seconds = max(seconds, of_rank)
        return seconds

    def _settle(self, batches: Sequence[Batch], plans: Sequence[StepPlan]) -> list[StepPlan]:
        # A rank without requests computes one placeholder.
        votes = [
            rank.dispatcher.vote(batch, plan) if batch.num_tokens else Vote.idle(1)
            for rank, batch, plan in zip(self._ranks, batches, plans, strict=True)
        ]
        agreed = agree(votes, len(votes))
        return [
            rank.dispatcher.settle(batch, plan, agreed)
            for rank, batch, plan in zip(self._ranks, batches, plans, strict=True)
        ]

    def _deliver(self, done: _UnderWay, now: float) -> None:
        for rank, step in zip(self._ranks, done.steps, strict=True):
            sampled = step.num_sampled()
            if self._acceptance is not None:
                sampled = [
                    n + self._acceptance.num_accepted(request, drafts) if n else 0
                    for n, request, drafts in zip(sampled, step.requests, step.num_drafts.tolist(), strict=True)
                ]
            for delivery in rank.scheduler.update(step, sampled):
                self._tokens[delivery.request].extend([now] * delivery.num_tokens)

    def _stuck(self) -> str:
        settings = self._ranks[0].scheduler.settings
        return (
            f"'num_blocks' must hold the longest request: {settings.num_blocks} blocks of {settings.block_size} "
            "tokens do not; raise it, or lower max_model_len"
        )
