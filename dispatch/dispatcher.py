"""
From a classified batch to the graphs it meets.

Theory of operation
-------------------
A policy lists, for a kind of batch, the modes it may use, best first. For each mode the captured sizes are
known beforehand, and so is the smallest one that holds a given number of tokens. So everything there is to
decide about a step depends on four small things: the kind of batch, the modes the caller allows, the number
of tokens, and the number of requests. The first three index a table that is filled once, at construction:

    _rules[kind, FULL allowed, PIECEWISE allowed][num_tokens] -> mode, descriptor, reason

with one more entry, at the end, for every number of tokens above the largest size. The number of requests
does not change the decision, only the ranges written into the `StepPlan`; plans are interned as they occur, up to
the largest size. Above it every step gets a new one: it runs eagerly, which takes a thousand times longer.

The reason is the last obstacle met on the way from the best mode to the one used (see `Reason`); the walk is
`_decide`. A step up to the largest size is then two indexings and a dictionary get. It is a pure function of plan,
batch and allowed modes: ranks that see the same input decide the same.
"""

from collections.abc import Set as AbstractSet

import attrs

from .batch import Batch, BatchKind
from .capture_plan import CapturePlan
from .errors import ConfigError, PlanError
from .policy import KIND_OBSTACLES, POLICIES, modes_used
from .step_plan import BatchDescriptor, Part, Reason, RuntimeMode, StepPlan

_EMPTY = StepPlan(())


@attrs.frozen
class _Rule:
    """
    One entry of the table, shared by all numbers of tokens with the same answer; `descriptor` is None for eager,
    where it is the batch's own size.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor | None
    reason: Reason
    plans: dict[tuple[int, int], StepPlan] = attrs.field(factory=dict, eq=False)


class Dispatcher:
    """
    Decides how a batch meets the captured graphs.

    Args:
        plan: The graphs that exist.
        policy: A name in `POLICIES`.
        query_len: Tokens of one uniform decode: 1 + number of draft tokens.
        max_num_seqs: The most requests a batch can have.

    Raises:
        ConfigError: The policy is unknown, or a number is below 1.
        PlanError: A FULL size can never be filled: it is no multiple of *query_len*, or holds more than
            *max_num_seqs* requests.
    """

    def __init__(
        self,
        plan: CapturePlan,
        *,
        policy: str = "full_and_piecewise",
        query_len: int = 1,
        max_num_seqs: int,
    ) -> None:
        if policy not in POLICIES:
            msg = f"'policy' must be one of {', '.join(POLICIES)}: {policy!r}"
            raise ConfigError(msg)
        if min(query_len, max_num_seqs) < 1:
            msg = f"'query_len' and 'max_num_seqs' must be >= 1: {query_len}, {max_num_seqs}"
            raise ConfigError(msg)
        for size in plan.full_sizes:
            if size % query_len:
                msg = f"'full_sizes' must be multiples of the query length {query_len}: {size}; remove it"
                raise PlanError(msg)
            if size > query_len * max_num_seqs:
                msg = (
                    f"'full_sizes' must be <= max_num_seqs * query length = {max_num_seqs * query_len}, more "
                    f"can never be filled: {size}; remove it or raise max_num_seqs"
                )
                raise PlanError(msg)
        self.plan = plan
        self.policy = policy
        self.query_len = query_len
        self.max_num_seqs = max_num_seqs

        used = modes_used(POLICIES[policy])
        self._padded = {mode: _padded_sizes(plan.sizes(mode)) for mode in used}
        self._over_max = max((len(sizes) for sizes in self._padded.values()), default=0)
        self._shared: dict[tuple[RuntimeMode, int, Reason], _Rule] = {}
        self._rules: dict[tuple[BatchKind, bool, bool], list[_Rule]] = {
            (kind, full, piecewise): [
                self._decide(kind, full, piecewise, num_tokens) for num_tokens in range(self._over_max + 1)
            ]
            for kind in BatchKind
            if kind is not BatchKind.EMPTY
            for full in (False, True)
            for piecewise in (False, True)
        }

    def dispatch(self, batch: Batch, allowed: AbstractSet[RuntimeMode] | None = None) -> StepPlan:
        """
        Return what to run for *batch*.

        Args:
            batch: The classified batch.
            allowed: The modes the caller can run in this step; None means all. Eager is always possible.
        """
        num_tokens, num_reqs = batch.num_tokens, batch.num_reqs
        full = allowed is None or RuntimeMode.FULL in allowed
        piecewise = allowed is None or RuntimeMode.PIECEWISE in allowed
        if num_tokens == 0:
            return _EMPTY
        kind = batch.kind
        if kind is BatchKind.UNIFORM_DECODE and batch.query_len != self.query_len:
            kind = BatchKind.RAGGED_DECODE  # uniform, but not in the length the graphs were captured for
        rules = self._rules[kind, full, piecewise]
        if batch.num_active_loras and self._padded:
            return _plan(_Rule(RuntimeMode.NONE, None, Reason.NOT_CAPTURED), num_reqs, num_tokens)
        if num_tokens >= self._over_max:
            return _plan(rules[self._over_max], num_reqs, num_tokens)
        rule = rules[num_tokens]
        step_plan = rule.plans.get((num_tokens, num_reqs))
        if step_plan is None:
            step_plan = rule.plans[num_tokens, num_reqs] = _plan(rule, num_reqs, num_tokens)
        return step_plan

    def _decide(self, kind: BatchKind, full: bool, piecewise: bool, num_tokens: int) -> _Rule:
        policy = POLICIES[self.policy]
        best = policy.get(BatchKind.UNIFORM_DECODE, ())
        wanted = policy.get(kind, ())
        obstacle = None
        if not best:
            obstacle = Reason.DISABLED
        elif wanted[:1] != best[:1]:
            obstacle = KIND_OBSTACLES.get(kind)

        for mode in wanted:
            if not (full if mode is RuntimeMode.FULL else piecewise):
                obstacle = Reason.BACKEND_LIMIT
                continue
            padded = self._padded[mode]
            if not padded:
                obstacle = Reason.NOT_CAPTURED
            elif num_tokens >= len(padded):
                obstacle = Reason.OVER_MAX
            else:
                size = padded[num_tokens]
                if obstacle is None:
                    obstacle = Reason.EXACT if size == num_tokens else Reason.PADDED
                return self._rule(mode, size, obstacle)
        assert obstacle is not None
        return self._rule(RuntimeMode.NONE, 0, obstacle)

    def _rule(self, mode: RuntimeMode, size: int, reason: Reason) -> _Rule:
        key = mode, size, reason
        if key not in self._shared:
            self._shared[key] = _Rule(mode, self._descriptor(mode, size) if size else None, reason)
        return self._shared[key]

    def _descriptor(self, mode: RuntimeMode, size: int) -> BatchDescriptor:
        if mode is RuntimeMode.FULL:
            return BatchDescriptor(mode, size, size // self.query_len, self.query_len)
        return BatchDescriptor(mode, size)


def _padded_sizes(sizes: tuple[int, ...]) -> list[int]:
    """
    Index: number of tokens; value: the smallest size that holds them. No token is padded like one.
    """
    padded: list[int] = []
    for size in sizes:
        padded += [size] * (size + 1 - len(padded))
    return padded


def _plan(rule: _Rule, num_reqs: int, num_tokens: int) -> StepPlan:
    descriptor = rule.descriptor or BatchDescriptor(rule.mode, num_tokens)
    return StepPlan((Part(rule.mode, descriptor, (0, num_reqs), (0, num_tokens), rule.reason),))
