"""
From a classified batch to the graphs it meets.

Theory of operation
-------------------
A policy lists, for a kind of batch, the modes it may use, best first. For each mode the captured sizes are
known beforehand, and so is the best one that holds a given number of tokens: the smallest, or, by a cost model,
the cheapest. So what there is to decide about a step depends on three small things: the kind of batch, the modes
the caller allows, and the number of tokens. These index a table that is filled once, at construction:

    _rules[kind, FULL allowed, PIECEWISE allowed][num_tokens] -> mode, size, reason

with one more entry, at the end, for every number of tokens above the largest size. The number of requests does
not change the decision, only the ranges written into the `StepPlan`; the number of adapters only picks among the
graphs of one size, for each size is captured for every LoRA case. A ragged decode is the exception: in a FULL
graph it takes the room of as many uniform decodes, elsewhere the room of its tokens, so that it is decided when
it first occurs.

Most steps are uniform decodes: their plans are made at construction, and are two list indices away. Others are
kept as they occur, in bounded number.

The reason is the last obstacle met on the way from the best mode to the one used (see `Reason`); the walk is
`_decide`. A cost model does not change what is possible: among the possible modes, and eager, it takes the one it
predicts the least time for, of equals the one with the least padding.

It is a pure function of plan, batch and allowed modes: ranks that see the same input decide the same. Ranks that
see different batches agree first: `vote` says what a rank would do, `settle` what it does after the votes are
merged (`agreement`); mode and size of the answer depend on the merged vote alone.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import attrs

from .agreement import Vote
from .batch import Batch, BatchKind
from .capture_plan import CapturePlan
from .cost import StepCost
from .errors import ConfigError, PlanError
from .policy import KIND_OBSTACLES, POLICIES, modes_used
from .step_plan import BatchDescriptor, Part, Reason, RuntimeMode, StepPlan
from .traits import BackendTraits, FullGraphs

_NONE, _PIECEWISE, _FULL = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL
_EMPTY = StepPlan(())

MAX_INTERNED = 1 << 16
"""The most plans that a dispatcher keeps, some 40 MB: a server sees far fewer, unless it runs for months."""


@attrs.frozen
class _Rule:
    """
    One entry of the table, shared by all numbers of tokens with the same answer; `size` is None for eager, where
    it is the batch's own.
    """

    mode: RuntimeMode
    size: int | None
    reason: Reason


class Dispatcher:
    """
    Decides how a batch meets the captured graphs.

    Args:
        plan: The graphs that exist.
        policy: A name in `POLICIES`.
        query_len: Tokens of one uniform decode: 1 + number of draft tokens.
        max_num_seqs: The most requests a batch can have.
        traits: What the attention backend can do.
        cost: Predicts the time of a pass; without it the policy's order and the smallest size decide.
        role: The model whose graphs these are: "target", or the drafter's name.

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
        traits: BackendTraits = BackendTraits(),  # noqa: B008 -- frozen
        cost: StepCost | None = None,
        role: str = "target",
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
        self.traits = traits
        self.cost = cost
        self.role = role

        self._is_variable = traits.full_graphs is FullGraphs.RAGGED
        self._has_full = traits.full_graphs is not FullGraphs.NEVER and not (
            traits.full_graphs is FullGraphs.SINGLE_TOKEN and query_len > 1
        )
        used = modes_used(POLICIES[policy])
        # What the backend cannot replay is no choice, not even one that all ranks agree on.
        self._best = {
            mode: _best_sizes(plan.sizes(mode) if mode is not _FULL or self._has_full else (), mode, cost)
            for mode in used
        }
        self._over_max = max((len(sizes) for sizes in self._best.values()), default=0)
        self._lora_case = _padded_sizes(plan.lora_cases)
        self._shared: dict[tuple[RuntimeMode, int | None, Reason], _Rule] = {}
        self._rules: dict[tuple[BatchKind, bool, bool], list[_Rule]] = {
            (kind, full, piecewise): [
                self._decide(kind, self._obstacles(full, piecewise), num_tokens, num_tokens)
                for num_tokens in range(self._over_max + 1)
            ]
            for kind in (BatchKind.UNIFORM_DECODE, BatchKind.MIXED, BatchKind.PREFILL)
            for full in (False, True)
            for piecewise in (False, True)
        }
        self._plans: dict[tuple[object, ...], StepPlan] = {}
        # Index: number of tokens. A last request that is short of them still takes a whole row.
        decodes = {
            case: [
                self._decide_plan(
                    Batch(BatchKind.UNIFORM_DECODE, -(-num_tokens // query_len), num_tokens, 0, query_len, case),
                    True,
                    True,
                )
                for num_tokens in range(max_num_seqs * query_len + 1)
            ]
            for case in plan.lora_cases
        }
        self._decodes = [decodes[case] for case in self._lora_case]

    def dispatch(self, batch: Batch, allowed: AbstractSet[RuntimeMode] | None = None) -> StepPlan:
        """
        Return what to run for *batch*.

        Args:
            batch: The classified batch.
            allowed: The modes the caller can run in this step; None means all. Eager is always possible.
        """
        full = piecewise = True
        if allowed is not None:
            full, piecewise = _FULL in allowed, _PIECEWISE in allowed
        elif (
            batch.kind is BatchKind.UNIFORM_DECODE
            and batch.query_len == self.query_len
            and batch.num_active_loras < len(self._decodes)
            and batch.num_tokens < len(self._decodes[0])
        ):
            return self._decodes[batch.num_active_loras][batch.num_tokens]

        key = (
            batch.kind,
            batch.num_reqs,
            batch.num_tokens,
            batch.query_len,
            batch.num_active_loras,
            batch.can_pad_drafts,
            full,
            piecewise,
        )
        step_plan = self._plans.get(key)
        if step_plan is None:
            step_plan = self._decide_plan(batch, full, piecewise)
            self._intern(key, batch, step_plan)
        return step_plan

    def vote(self, batch: Batch, step_plan: StepPlan) -> Vote:
        """
        What a rank tells the others about its *batch* and the plan it would follow alone.
        """
        if not step_plan.parts:
            return Vote.idle()
        [part] = step_plan.parts
        return Vote(part.mode, batch.num_tokens, self._num_full_tokens(batch), batch.num_active_loras)

    def settle(self, batch: Batch, step_plan: StepPlan, agreed: Vote) -> StepPlan:
        """
        What a rank runs after the vote.

        Args:
            batch: This rank's batch; an empty one runs a pass that is all padding.
            step_plan: The plan it would follow alone, that it voted for.
            agreed: The merged votes of all ranks, its own among them.
        """
        if agreed.num_tokens == 0:
            return _EMPTY
        lora_case = self._case(agreed.num_active_loras)
        for mode in (_FULL, _PIECEWISE):
            num_tokens = agreed.num_full_tokens if mode is _FULL else agreed.num_tokens
            best = self._best.get(mode, ())
            if mode.value <= agreed.mode.value and lora_case is not None and num_tokens < len(best):
                descriptor = self._descriptor(mode, best[num_tokens], lora_case)
                break
        else:
            mode = _NONE
            descriptor = BatchDescriptor(_NONE, batch.num_tokens or self.query_len, role=self.role)

        if step_plan.parts and step_plan.parts[0].descriptor == descriptor:
            return step_plan
        key = batch.num_reqs, batch.num_tokens, descriptor
        settled = self._plans.get(key)
        if settled is None:
            settled = self._plan(descriptor, Reason.RANK_VOTE, batch)
            self._intern(key, batch, settled)
        return settled

    def _decide_plan(self, batch: Batch, full: bool, piecewise: bool) -> StepPlan:
        num_tokens = batch.num_tokens
        if num_tokens == 0:
            return _EMPTY
        kind = batch.kind
        if kind is BatchKind.UNIFORM_DECODE and batch.query_len != self.query_len:
            kind = BatchKind.RAGGED_DECODE  # uniform, but not in the length the graphs were captured for
        lora_case = self._case(batch.num_active_loras)
        if lora_case is None:
            rule = _Rule(_NONE, None, Reason.NOT_CAPTURED if self._best else Reason.DISABLED)
        elif kind is BatchKind.RAGGED_DECODE:
            obstacles = self._obstacles(full, piecewise)
            can_pad = batch.can_pad_drafts and batch.query_len == self.query_len
            if not self._is_variable and not can_pad:
                obstacles.setdefault(_FULL, Reason.RAGGED)
            rule = self._decide(kind, obstacles, num_tokens, self._num_full_tokens(batch))
        else:
            rule = self._rules[kind, full, piecewise][min(num_tokens, self._over_max)]
        if rule.size is None:
            descriptor = BatchDescriptor(_NONE, num_tokens, role=self.role)
        else:
            assert lora_case is not None
            descriptor = self._descriptor(rule.mode, rule.size, lora_case)
        return self._plan(descriptor, rule.reason, batch)

    def _decide(
        self,
        kind: BatchKind,
        obstacles: Mapping[RuntimeMode, Reason],
        num_tokens: int,
        num_full_tokens: int,
    ) -> _Rule:
        policy = POLICIES[self.policy]
        best = policy.get(BatchKind.UNIFORM_DECODE, ())
        wanted = policy.get(kind, ())
        obstacle = None
        if not best:
            obstacle = Reason.DISABLED
        elif wanted[:1] != best[:1]:
            obstacle = KIND_OBSTACLES.get(kind)

        possible: list[_Rule] = []
        for mode in wanted:
            sizes = self._best[mode]
            needed = num_full_tokens if mode is _FULL else num_tokens
            if mode in obstacles:
                obstacle = obstacles[mode]
            elif not sizes:
                obstacle = Reason.NOT_CAPTURED
            elif needed >= len(sizes):
                # Of ragged decodes it is the pads that have no room.
                is_padded = kind is BatchKind.RAGGED_DECODE and mode is _FULL and not self._is_variable
                obstacle = Reason.RAGGED if is_padded else Reason.OVER_MAX
            else:
                size = sizes[needed]
                reason = obstacle or (Reason.EXACT if size == num_tokens else Reason.PADDED)
                possible.append(self._rule(mode, size, Reason.CHEAPER if possible else reason))
        if not possible:
            assert obstacle is not None
            return self._rule(_NONE, None, obstacle)
        if self.cost is None:
            return possible[0]
        possible.append(self._rule(_NONE, None, Reason.CHEAPER_EAGER))
        return min(possible, key=lambda rule: self._seconds_and_size(rule, num_tokens))

    def _seconds_and_size(self, rule: _Rule, num_tokens: int) -> tuple[float, int]:
        assert self.cost is not None
        size = rule.size or max(num_tokens, 1)
        return self.cost.seconds(rule.mode, size), size

    def _obstacles(self, full: bool, piecewise: bool) -> dict[RuntimeMode, Reason]:
        allowed = {_FULL: full and self._has_full, _PIECEWISE: piecewise}
        return {mode: Reason.BACKEND_LIMIT for mode, is_allowed in allowed.items() if not is_allowed}

    def _num_full_tokens(self, batch: Batch) -> int:
        # Each request takes a row of a FULL graph, whether or not it fills it.
        return max(batch.num_tokens, batch.num_reqs * self.query_len)

    def _case(self, num_active_loras: int) -> int | None:
        return self._lora_case[num_active_loras] if num_active_loras < len(self._lora_case) else None

    def _rule(self, mode: RuntimeMode, size: int | None, reason: Reason) -> _Rule:
        return self._shared.setdefault((mode, size, reason), _Rule(mode, size, reason))

    def _plan(self, descriptor: BatchDescriptor, reason: Reason, batch: Batch) -> StepPlan:
        mode = descriptor.mode
        pads_drafts = (
            mode is _FULL and not self._is_variable and batch.num_tokens != batch.num_reqs * self.query_len
        )
        seconds = None if self.cost is None else self.cost.seconds(mode, descriptor.num_tokens)
        requests, tokens = (0, batch.num_reqs), (0, batch.num_tokens)
        return StepPlan((Part(mode, descriptor, requests, tokens, reason, pads_drafts, seconds),))

    def _intern(self, key: tuple[object, ...], batch: Batch, step_plan: StepPlan) -> None:
        # Of batches above the largest size there is no end; they must not take the room of the others.
        if len(self._plans) < (MAX_INTERNED if batch.num_tokens < self._over_max else MAX_INTERNED // 2):
            self._plans[key] = step_plan

    def _descriptor(self, mode: RuntimeMode, size: int, lora_case: int) -> BatchDescriptor:
        return CapturePlan.descriptor(mode, size, lora_case, query_len=self.query_len, role=self.role)


def _padded_sizes(sizes: Iterable[int]) -> list[int]:
    """
    Index: number of tokens; value: the smallest size that holds them. No token is padded like one.
    """
    padded: list[int] = []
    for size in sizes:
        padded += [size] * (size + 1 - len(padded))
    return padded


def _best_sizes(sizes: tuple[int, ...], mode: RuntimeMode, cost: StepCost | None) -> list[int]:
    """
    Index: number of tokens; value: the best size that holds them: the smallest, or that with the least cost.
    """
    if cost is None or not sizes:
        return _padded_sizes(sizes)
    best = {sizes[-1]: sizes[-1]}
    for smaller, larger in zip(reversed(sizes[:-1]), reversed(sizes), strict=False):
        cheaper = cost.seconds(mode, best[larger]) < cost.seconds(mode, smaller)
        best[smaller] = best[larger] if cheaper else smaller
    return [best[size] for size in _padded_sizes(sizes)]
