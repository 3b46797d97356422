"""From a classified batch to the graphs it meets."""

import tracemalloc

import attrs
import numpy as np
import pytest
from hypothesis import event, given, settings

from aclgraph_dispatch import (
    POLICIES,
    BackendTraits,
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    Dispatcher,
    FullGraphs,
    Part,
    Reason,
    RuntimeMode,
    ScheduledRequest,
    StepCost,
    StepPlan,
)
from aclgraph_dispatch.agreement import Vote
from aclgraph_dispatch.batch import Classifier
from aclgraph_dispatch.errors import ConfigError, DispatchError, PlanError

from .strategies import steps, twin_of

NONE, PIECEWISE, FULL = RuntimeMode
EMPTY, UNIFORM, RAGGED, MIXED, PREFILL = BatchKind


def decodes(num_reqs, query_len=1):
    """
    A uniform decode.
    """
    return Batch(UNIFORM, num_reqs, num_reqs * query_len, num_reqs, query_len)


def route(dispatcher, batch, allowed=None):
    """
    Mode, tokens after padding and reason of a step with one part.
    """
    [part] = dispatcher.dispatch(batch, allowed).parts
    return part.mode, part.num_padded_tokens, part.reason


def ragged(num_reqs, num_tokens, query_len, *, can_pad_drafts=True):
    """
    Decodes of different lengths.
    """
    return Batch(RAGGED, num_reqs, num_tokens, num_reqs, query_len, can_pad_drafts=can_pad_drafts)


# Tables


@pytest.mark.parametrize(
    ("full_sizes", "query_len", "max_num_seqs", "padded"),
    [
        # The largest size is what the server can fill, not a power of two; request counts from 1 on.
        ((1, 2, 4, 8, 12), 1, 12, (1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
        # Requests beyond the largest size have no graph, which raises nothing.
        ((4, 8), 4, 5, (4, 8, None, None, None)),
        # Whole dummy requests fill a graph.
        ((4, 8, 16, 20), 4, 5, (4, 8, 16, 16, 20)),
        ((3, 6, 9, 18, 24), 3, 8, (3, 6, 9, 18, 18, 18, 24, 24)),
    ],
)
def test_ladders(full_sizes, query_len, max_num_seqs, padded):
    """
    A uniform decode meets the next larger FULL graph, though a PIECEWISE one were closer.
    """
    dispatcher = Dispatcher(
        CapturePlan(full_sizes, (13, 16)),
        policy="full_decode_only",
        query_len=query_len,
        max_num_seqs=max_num_seqs,
    )
    for num_reqs, size in enumerate(padded, start=1):
        num_tokens = num_reqs * query_len
        expected = (
            (NONE, num_tokens, Reason.OVER_MAX)
            if size is None
            else (FULL, size, Reason.EXACT if size == num_tokens else Reason.PADDED)
        )

        assert expected == route(dispatcher, decodes(num_reqs, query_len))


PLAN = CapturePlan(full_sizes=(2, 4), piecewise_sizes=(3, 8))
FULL_ONLY = CapturePlan(full_sizes=(2, 4))


BOTH = "full_and_piecewise"
COST = StepCost({NONE: {1: 4.0, 4: 5.0}, PIECEWISE: {3: 3.0, 8: 6.0}, FULL: {2: 3.5, 4: 1.0}})
"""Decides for FULL-4 where it fits, else for PIECEWISE-3, else for eager."""


@pytest.mark.parametrize(
    ("reason", "policy", "plan", "cost", "batch", "allowed", "mode", "size"),
    [
        (Reason.EXACT, BOTH, PLAN, None, decodes(2), None, FULL, 2),
        (Reason.PADDED, BOTH, PLAN, None, decodes(3), None, FULL, 4),
        (Reason.OVER_MAX, BOTH, PLAN, None, decodes(5), None, PIECEWISE, 8),
        (Reason.NOT_CAPTURED, BOTH, FULL_ONLY, None, Batch(MIXED, 2, 4, 1), None, NONE, 4),
        (Reason.RAGGED, BOTH, PLAN, None, Batch(RAGGED, 2, 5, 2), None, PIECEWISE, 8),
        (Reason.MIXED, BOTH, PLAN, None, Batch(MIXED, 2, 4, 1), None, PIECEWISE, 8),
        (Reason.PREFILL, BOTH, PLAN, None, Batch(PREFILL, 1, 4, 0), None, PIECEWISE, 8),
        (Reason.BACKEND_LIMIT, BOTH, PLAN, None, decodes(2), {PIECEWISE}, PIECEWISE, 3),
        (Reason.DISABLED, "eager", PLAN, None, decodes(2), None, NONE, 2),
        # A larger graph of the same mode is padding, whoever chose it.
        (Reason.PADDED, BOTH, PLAN, COST, decodes(2), None, FULL, 4),
        (Reason.CHEAPER, BOTH, CapturePlan((2,), (3, 8)), COST, decodes(2), None, PIECEWISE, 3),
        (Reason.CHEAPER_EAGER, BOTH, PLAN, COST, decodes(5), None, NONE, 5),
        (Reason.CHEAPER_EAGER, BOTH, CapturePlan((), (8,)), COST, Batch(PREFILL, 1, 1, 0), None, NONE, 1),
        # What cannot be run is not chosen, whatever it costs.
        (Reason.MIXED, BOTH, PLAN, COST, Batch(MIXED, 2, 3, 1), None, PIECEWISE, 3),
        (Reason.BACKEND_LIMIT, BOTH, PLAN, COST, decodes(2), {PIECEWISE}, PIECEWISE, 3),
        (Reason.OVER_MAX, BOTH, PLAN, COST, decodes(9), None, NONE, 9),
        (Reason.DISABLED, "eager", PLAN, COST, decodes(2), None, NONE, 2),
    ],
)
def test_reasons(reason, policy, plan, cost, batch, allowed, mode, size):
    """
    The reason is what stood in the way, or what the cost model preferred.
    """
    dispatcher = Dispatcher(plan, policy=policy, max_num_seqs=12, cost=cost)

    assert (mode, size, reason) == route(dispatcher, batch, allowed)


def test_every_reason_is_tested():
    """
    No reason is left out above, but that of the vote, which needs other ranks.
    """
    [marker] = test_reasons.pytestmark

    assert {row[0] for row in marker.args[1]} == {*Reason} - {Reason.RANK_VOTE}


@pytest.mark.parametrize(
    ("seconds", "route_of_3"),
    [
        # Eager, PIECEWISE-4, FULL-3, FULL-4.
        ((1.0, 1.0, 1.0, 1.0), (FULL, 3, Reason.EXACT)),
        ((2.0, 2.0, 2.0, 1.0), (FULL, 4, Reason.PADDED)),
        ((2.0, 1.0, 2.0, 1.0), (FULL, 4, Reason.PADDED)),
        ((1.0, 1.0, 2.0, 1.0), (NONE, 3, Reason.CHEAPER_EAGER)),
        ((2.0, 1.0, 2.0, 2.0), (PIECEWISE, 4, Reason.CHEAPER)),
    ],
)
def test_cheapest(seconds, route_of_3):
    """
    The least time is taken, of equal times the least padding, and of equal paddings the policy's order.
    """
    eager, piecewise, exact, padded = seconds
    cost = StepCost({NONE: {3: eager}, PIECEWISE: {4: piecewise}, FULL: {3: exact, 4: padded}})
    dispatcher = Dispatcher(CapturePlan((3, 4), (4,)), max_num_seqs=4, cost=cost)
    [part] = dispatcher.dispatch(decodes(3)).parts

    assert route_of_3 == route(dispatcher, decodes(3))
    assert min(seconds) == part.seconds


@pytest.mark.parametrize(
    ("full_graphs", "query_len", "batch", "expected", "pads_drafts"),
    [
        (FullGraphs.UNIFORM, 4, decodes(2, 4), (FULL, 8, Reason.EXACT), False),
        (FullGraphs.UNIFORM, 4, decodes(1, 4), (FULL, 4, Reason.EXACT), False),
        (FullGraphs.UNIFORM, 4, ragged(2, 5, 4), (FULL, 8, Reason.PADDED), True),
        # Five requests of 1 token need as much room as five of 4.
        (FullGraphs.UNIFORM, 4, ragged(5, 5, 4), (FULL, 20, Reason.PADDED), True),
        (FullGraphs.UNIFORM, 4, ragged(2, 5, 4, can_pad_drafts=False), (PIECEWISE, 6, Reason.RAGGED), False),
        (FullGraphs.UNIFORM, 4, ragged(6, 7, 4), (PIECEWISE, 24, Reason.RAGGED), False),
        # Decodes of the length that other graphs have: nothing says that those may be padded to this one.
        (FullGraphs.UNIFORM, 4, decodes(3, 2), (PIECEWISE, 6, Reason.RAGGED), False),
        (FullGraphs.UNIFORM, 4, ragged(3, 5, 2), (PIECEWISE, 6, Reason.RAGGED), False),
        (FullGraphs.RAGGED, 4, decodes(2, 4), (FULL, 8, Reason.EXACT), False),
        (FullGraphs.RAGGED, 4, ragged(2, 5, 4, can_pad_drafts=False), (FULL, 8, Reason.PADDED), False),
        (FullGraphs.RAGGED, 4, decodes(3, 2), (FULL, 20, Reason.PADDED), False),
        (FullGraphs.RAGGED, 4, ragged(5, 18, 4), (FULL, 20, Reason.PADDED), False),
        (FullGraphs.RAGGED, 4, ragged(6, 7, 4), (PIECEWISE, 24, Reason.OVER_MAX), False),
        (FullGraphs.SINGLE_TOKEN, 1, decodes(4), (FULL, 4, Reason.EXACT), False),
        (FullGraphs.SINGLE_TOKEN, 4, decodes(1, 4), (PIECEWISE, 6, Reason.BACKEND_LIMIT), False),
        (FullGraphs.SINGLE_TOKEN, 4, ragged(2, 5, 4), (PIECEWISE, 6, Reason.BACKEND_LIMIT), False),
        (FullGraphs.NEVER, 4, decodes(2, 4), (PIECEWISE, 24, Reason.BACKEND_LIMIT), False),
        (FullGraphs.NEVER, 1, decodes(4), (PIECEWISE, 6, Reason.BACKEND_LIMIT), False),
        # The backend is asked before the lengths are looked at.
        (FullGraphs.NEVER, 4, ragged(2, 5, 4, can_pad_drafts=False), (PIECEWISE, 6, Reason.BACKEND_LIMIT), False),
    ],
)
def test_traits(full_graphs, query_len, batch, expected, pads_drafts):
    """
    FULL graphs replay what the attention backend can: padded drafts where it wants one length, else as they are.
    """
    dispatcher = Dispatcher(
        CapturePlan((4, 8, 20), (6, 24)),
        query_len=query_len,
        max_num_seqs=20 // query_len,
        traits=BackendTraits(full_graphs),
    )
    [part] = dispatcher.dispatch(batch).parts

    assert expected == route(dispatcher, batch)
    assert pads_drafts is part.pads_drafts


@pytest.mark.parametrize(
    ("cases", "num_active_loras", "case"),
    [
        ((0,), 0, 0),
        ((0,), 1, None),
        ((0, 1, 2, 4), 0, 0),
        ((0, 1, 2, 4), 1, 1),
        ((0, 1, 2, 4), 3, 4),
        ((0, 1, 2, 4), 5, None),
        # One graph for all: that of the adapters serves the base model too.
        ((3,), 0, 3),
        ((3,), 3, 3),
    ],
)
@pytest.mark.parametrize("batch", [decodes(2), Batch(MIXED, 2, 3, 1), ragged(2, 3, 1)], ids=lambda b: b.kind.name)
def test_lora_cases(cases, num_active_loras, case, batch):
    """
    A batch meets the graph of the smallest case that holds its adapters; with more than any, none.
    """
    dispatcher = Dispatcher(CapturePlan((2, 4), (3, 4), cases), max_num_seqs=4)
    [part] = dispatcher.dispatch(attrs.evolve(batch, num_active_loras=num_active_loras)).parts

    if case is None:
        assert (NONE, Reason.NOT_CAPTURED) == (part.mode, part.reason)
    else:
        assert part.mode is not NONE
        assert case == part.descriptor.num_active_loras


def test_adapters_without_graphs():
    """
    Who uses no graphs misses none for adapters.
    """
    dispatcher = Dispatcher(PLAN, policy="eager", max_num_seqs=4)

    assert route(dispatcher, Batch(UNIFORM, 2, 2, 2, 1, 1)) == (NONE, 2, Reason.DISABLED)


def test_short_last_request():
    """
    A dummy run of tokens that do not make whole requests takes the room of whole ones, and runs eagerly as it is.
    """
    dispatcher = Dispatcher(CapturePlan((4, 8)), policy="full_decode_only", query_len=4, max_num_seqs=4)

    for num_tokens, expected in (
        (5, (FULL, 8, Reason.PADDED)),
        (8, (FULL, 8, Reason.EXACT)),
        (9, (NONE, 9, Reason.OVER_MAX)),
        (17, (NONE, 17, Reason.OVER_MAX)),
    ):
        batch = Batch(UNIFORM, -(-num_tokens // 4), num_tokens, 0, 4)

        assert expected == route(dispatcher, batch)
        assert dispatcher.dispatch(batch) == dispatcher.dispatch(batch, set(RuntimeMode))


def test_role():
    """
    The graphs of a drafter are its own.
    """
    plan = CapturePlan((2,), (3,))
    target, draft = (Dispatcher(plan, max_num_seqs=2, role=role) for role in ("target", "draft"))
    for batch in (decodes(2), Batch(PREFILL, 1, 3, 0), Batch(PREFILL, 1, 9, 0)):
        [ours], [theirs] = target.dispatch(batch).parts, draft.dispatch(batch).parts

        assert "target" == ours.descriptor.role
        assert attrs.evolve(ours.descriptor, role="draft") == theirs.descriptor


@pytest.mark.parametrize(
    ("policy", "batch", "allowed", "expected"),
    [
        # What is best depends on the policy: there a mixed batch meets the graph it is meant to meet.
        ("piecewise", decodes(3), None, (PIECEWISE, 3, Reason.EXACT)),
        ("piecewise", Batch(RAGGED, 2, 3, 2), None, (PIECEWISE, 3, Reason.EXACT)),
        ("piecewise", Batch(MIXED, 2, 4, 1), None, (PIECEWISE, 8, Reason.PADDED)),
        ("piecewise", Batch(PREFILL, 1, 8, 0), None, (PIECEWISE, 8, Reason.EXACT)),
        ("piecewise", Batch(PREFILL, 1, 9, 0), None, (NONE, 9, Reason.OVER_MAX)),
        ("full_decode_only", Batch(RAGGED, 2, 3, 2), None, (NONE, 3, Reason.RAGGED)),
        ("full_decode_only", Batch(MIXED, 2, 3, 1), None, (NONE, 3, Reason.MIXED)),
        ("full_decode_only", Batch(PREFILL, 1, 900, 0), None, (NONE, 900, Reason.PREFILL)),
        ("full_decode_only", decodes(5), None, (NONE, 5, Reason.OVER_MAX)),
        ("full_decode_only", decodes(2), {PIECEWISE}, (NONE, 2, Reason.BACKEND_LIMIT)),
        ("eager", Batch(MIXED, 2, 900, 1), frozenset(), (NONE, 900, Reason.DISABLED)),
        # Of several obstacles the last one is told.
        (BOTH, Batch(MIXED, 37, 1036, 36), None, (NONE, 1036, Reason.OVER_MAX)),
        (BOTH, Batch(MIXED, 2, 8, 1), {FULL}, (NONE, 8, Reason.BACKEND_LIMIT)),
        (BOTH, decodes(9), {FULL}, (NONE, 9, Reason.BACKEND_LIMIT)),
        (BOTH, decodes(9), {PIECEWISE}, (NONE, 9, Reason.OVER_MAX)),
        (BOTH, decodes(2), {FULL}, (FULL, 2, Reason.EXACT)),
        (BOTH, decodes(2), {NONE}, (NONE, 2, Reason.BACKEND_LIMIT)),
        # No graph was captured with adapters.
        (BOTH, Batch(UNIFORM, 2, 2, 2, 1, 1), None, (NONE, 2, Reason.NOT_CAPTURED)),
    ],
)
def test_routes(policy, batch, allowed, expected):
    """
    The policy's best mode that is allowed, captured and large enough, else eager; never without a reason.
    """
    assert expected == route(Dispatcher(PLAN, policy=policy, max_num_seqs=12), batch, allowed)


def test_whole_step():
    """
    A part tells its graph's key and its share of the batch.
    """
    dispatcher = Dispatcher(CapturePlan((4, 12), (8,)), query_len=4, max_num_seqs=3)
    full = BatchDescriptor(FULL, 12, num_reqs=3, query_len=4)
    piecewise = BatchDescriptor(PIECEWISE, 8)
    eager = BatchDescriptor(NONE, 9)

    assert StepPlan((Part(FULL, full, (0, 2), (0, 8), Reason.PADDED),)) == dispatcher.dispatch(decodes(2, 4))
    assert StepPlan((Part(PIECEWISE, piecewise, (0, 2), (0, 7), Reason.MIXED),)) == dispatcher.dispatch(
        Batch(MIXED, 2, 7, 1, 4)
    )
    assert StepPlan((Part(NONE, eager, (0, 1), (0, 9), Reason.OVER_MAX),)) == dispatcher.dispatch(
        Batch(PREFILL, 1, 9, 0, 4)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_batch(policy):
    """
    Nothing to run, nothing said, with graphs and without.
    """
    for plan in (PLAN, CapturePlan()):
        assert StepPlan(()) == Dispatcher(plan, policy=policy, max_num_seqs=8).dispatch(Batch.of([]))


def test_classification_before_padding():
    """
    Seven decodes stay uniform in a graph of eight; seven and a prompt's last token are as many, and mixed.
    """
    decode = ScheduledRequest(1, 102, 103, num_prompt=100)
    tail = ScheduledRequest(1, 99, 100, num_prompt=100)
    dispatcher = Dispatcher(CapturePlan((8,), (8,)), max_num_seqs=8)

    assert route(dispatcher, Batch.of([decode] * 7)) == (FULL, 8, Reason.PADDED)
    assert route(dispatcher, Batch.of([decode] * 8)) == (FULL, 8, Reason.EXACT)
    assert route(dispatcher, Batch.of([*[decode] * 7, tail])) == (PIECEWISE, 8, Reason.MIXED)


def test_defaults():
    """
    Unless told otherwise, decodes of one token meet FULL graphs and the rest PIECEWISE ones.
    """
    dispatcher = Dispatcher(CapturePlan((3,), (8,)), max_num_seqs=4)

    [part] = dispatcher.dispatch(decodes(3)).parts
    assert BatchDescriptor(FULL, 3, num_reqs=3, query_len=1) == part.descriptor
    assert dispatcher.policy == "full_and_piecewise"


# After a vote


def test_idle_vote():
    """
    Without a batch a rank goes along with any other.
    """
    dispatcher = Dispatcher(PLAN, max_num_seqs=4)
    empty = Batch.of([])

    assert Vote.idle() == dispatcher.vote(empty, dispatcher.dispatch(empty))


def test_vote():
    """
    A rank says what it would do alone, how many tokens it has, and how many with padded drafts.
    """
    dispatcher = Dispatcher(CapturePlan((4, 8), (16,)), query_len=4, max_num_seqs=4)

    for batch, vote in (
        (decodes(1, 4), Vote(FULL, 4, 4)),
        (ragged(2, 5, 4), Vote(FULL, 5, 8)),
        (Batch(MIXED, 2, 9, 1, 4), Vote(PIECEWISE, 9, 9)),
        (Batch(PREFILL, 1, 17, 0, 4, 0), Vote(NONE, 17, 17)),
        (Batch(PREFILL, 1, 17, 0, 4, 2), Vote(NONE, 17, 17, 2)),
    ):
        assert vote == dispatcher.vote(batch, dispatcher.dispatch(batch))


@pytest.mark.parametrize(
    ("agreed", "expected"),
    [
        # The rank's own batch is of 2 decodes, that alone would meet FULL-2.
        (Vote(FULL, 2, 2), (FULL, 2, Reason.EXACT)),
        (Vote(FULL, 3, 3), (FULL, 4, Reason.RANK_VOTE)),
        (Vote(PIECEWISE, 2, 2), (PIECEWISE, 3, Reason.RANK_VOTE)),
        (Vote(PIECEWISE, 7, 7), (PIECEWISE, 8, Reason.RANK_VOTE)),
        (Vote(NONE, 7, 7), (NONE, 2, Reason.RANK_VOTE)),
        # What all wanted, but not together: a size that no graph has, and adapters likewise.
        (Vote(FULL, 5, 5), (PIECEWISE, 8, Reason.RANK_VOTE)),
        (Vote(PIECEWISE, 9, 9), (NONE, 2, Reason.RANK_VOTE)),
        (Vote(FULL, 2, 2, 1), (NONE, 2, Reason.RANK_VOTE)),
        # Nobody has anything to do.
        (Vote.idle(), None),
    ],
)
def test_settle(agreed, expected):
    """
    Mode and size are those of the merged vote, and the reason says so where it changed anything.
    """
    dispatcher = Dispatcher(PLAN, max_num_seqs=4)
    batch = decodes(2)
    settled = dispatcher.settle(batch, dispatcher.dispatch(batch), agreed)

    if expected is None:
        assert StepPlan(()) == settled
    else:
        [part] = settled.parts
        assert expected == (part.mode, part.num_padded_tokens, part.reason)
        assert (0, 2) == part.requests == part.tokens
        assert settled is dispatcher.settle(batch, dispatcher.dispatch(batch), agreed)


@pytest.mark.parametrize(
    ("agreed", "mode", "num_padded_tokens"),
    [(Vote(FULL, 2, 8), FULL, 8), (Vote(PIECEWISE, 9, 9), PIECEWISE, 16), (Vote(NONE, 900, 900), NONE, 4)],
)
def test_idle_rank_is_all_padding(agreed, mode, num_padded_tokens):
    """
    A rank without requests runs what the others run; eagerly that is one dummy decode.
    """
    dispatcher = Dispatcher(CapturePlan((4, 8), (16,)), query_len=4, max_num_seqs=4)
    [part] = dispatcher.settle(Batch.of([]), StepPlan(()), agreed).parts

    assert (mode, num_padded_tokens, 0) == (part.mode, part.num_padded_tokens, part.num_tokens)
    assert not part.pads_drafts


def test_agreed_adapters():
    """
    A rank of the base model replays the graph of the adapters that another one has.
    """
    dispatcher = Dispatcher(CapturePlan((2,), (3,), (0, 1, 4)), max_num_seqs=4)
    own = dispatcher.dispatch(decodes(2))
    [part] = dispatcher.settle(decodes(2), own, Vote(FULL, 2, 2, 3)).parts

    assert BatchDescriptor(FULL, 2, 2, 1, num_active_loras=4) == part.descriptor
    assert own.parts[0].descriptor.num_active_loras == 0


@pytest.mark.parametrize("full_graphs", [FullGraphs.NEVER, FullGraphs.SINGLE_TOKEN])
def test_all_ranks_idle(full_graphs):
    """
    Nobody objects to a FULL graph where nobody has requests; a backend that has none still has none.
    """
    dispatcher = Dispatcher(
        CapturePlan((4,), (6,)), query_len=4, max_num_seqs=4, traits=BackendTraits(full_graphs)
    )
    dummy = Batch(UNIFORM, 1, 4, 0, 4)
    [part] = dispatcher.settle(dummy, dispatcher.dispatch(dummy), Vote.idle(4)).parts

    assert PIECEWISE is part.mode


def test_padded_drafts_after_a_vote():
    """
    Drafts are padded in the size that the ranks agreed on, and only in FULL graphs of one length.
    """
    batch = ragged(1, 3, 4)
    for full_graphs, agreed, pads in (
        (FullGraphs.UNIFORM, Vote(FULL, 8, 8), True),
        (FullGraphs.UNIFORM, Vote(PIECEWISE, 8, 8), False),
        (FullGraphs.RAGGED, Vote(FULL, 8, 8), False),
    ):
        traits = BackendTraits(full_graphs)
        dispatcher = Dispatcher(CapturePlan((4, 8), (8,)), query_len=4, max_num_seqs=2, traits=traits)
        [part] = dispatcher.settle(batch, dispatcher.dispatch(batch), agreed).parts

        assert (agreed.mode, pads) == (part.mode, part.pads_drafts)


# Properties


def choices(dispatcher, batch, allowed):
    """
    The descriptors that *batch* may meet, in the policy's order of modes, smallest first, eager last.
    """
    plan, traits = dispatcher.plan, dispatcher.traits
    is_uniform = batch.kind is UNIFORM and batch.query_len == dispatcher.query_len
    can_pad = batch.can_pad_drafts and batch.query_len == dispatcher.query_len
    has_full = traits.full_graphs in (FullGraphs.UNIFORM, FullGraphs.RAGGED) or (
        traits.full_graphs is FullGraphs.SINGLE_TOKEN and dispatcher.query_len == 1
    )
    modes = POLICIES[dispatcher.policy].get(batch.kind, ())
    cases = [case for case in plan.lora_cases if case >= batch.num_active_loras]
    found = []
    for mode in modes:
        if allowed is not None and mode not in allowed:
            continue
        room = batch.num_tokens
        if mode is FULL:
            if not has_full or not (is_uniform or can_pad or traits.full_graphs is FullGraphs.RAGGED):
                continue
            room = max(room, batch.num_reqs * dispatcher.query_len)
        found += [
            plan.descriptor(mode, size, cases[0], query_len=dispatcher.query_len, role=dispatcher.role)
            for size in plan.sizes(mode)
            if size >= room and cases
        ]
    return [*found, BatchDescriptor(NONE, batch.num_tokens, role=dispatcher.role)]


def check_step(step):
    """
    The whole contract of `dispatch`, for one step.

    Its parts run every request and every token once, in order, each in a captured graph with room for it or
    eagerly, for a reason. Nothing possible is cheaper, or, without costs, better by the policy, and of equals
    nothing has less padding.
    """
    dispatcher, batch, allowed = step
    parts = dispatcher.dispatch(batch, allowed).parts

    assert len(parts) == min(batch.num_tokens, 1)
    request = token = 0
    for part in parts:
        event(f"{batch.kind.name} {part.mode.name} {part.reason.name}")
        assert (request, token) == (part.requests[0], part.tokens[0])
        assert part.requests[0] < part.requests[1]
        assert part.tokens[0] < part.tokens[1]
        request, token = part.requests[1], part.tokens[1]

        possible = choices(dispatcher, batch, allowed)
        assert part.descriptor in possible
        assert part.mode is part.descriptor.mode
        if part.mode is not NONE:
            assert part.descriptor in dispatcher.plan.descriptors(
                query_len=dispatcher.query_len, role=dispatcher.role
            )
        if part.mode is FULL:
            assert part.requests[1] - part.requests[0] <= part.descriptor.num_reqs
        is_uniform = batch.num_tokens == batch.num_reqs * dispatcher.query_len
        one_length = dispatcher.traits.full_graphs is not FullGraphs.RAGGED
        assert part.pads_drafts is (part.mode is FULL and one_length and not is_uniform)

        if dispatcher.cost is None:
            assert possible[0] == part.descriptor
            assert part.seconds is None
        else:
            seconds = {d: dispatcher.cost.seconds(d.mode, d.num_tokens) for d in possible}
            assert part.seconds == seconds[part.descriptor]
            if len(possible) > 1:
                best = min((seconds[d], d.num_tokens) for d in possible)
                assert best == (part.seconds, part.descriptor.num_tokens)
        check_reason(part, possible, dispatcher, batch)
    assert (batch.num_reqs, batch.num_tokens) == (request, token)


def check_reason(part, possible, dispatcher, batch):
    """
    The reason names no obstacle where there was none, and one that is there where there was.
    """
    reason = part.reason
    graphs = [descriptor.mode for descriptor in possible[:-1]]
    assert (reason is Reason.CHEAPER_EAGER) is (part.mode is NONE and bool(graphs))
    assert (reason is Reason.CHEAPER) is (part.mode is not NONE and part.mode is not graphs[0])
    if reason in (Reason.EXACT, Reason.PADDED):
        assert part.mode is POLICIES[dispatcher.policy][UNIFORM][0]
        assert (reason is Reason.EXACT) is (part.num_paddings == 0)
    assert (reason is Reason.DISABLED) is (not POLICIES[dispatcher.policy])
    if reason is Reason.OVER_MAX:
        assert any(dispatcher.plan.sizes(mode) for mode in POLICIES[dispatcher.policy][batch.kind])
    if reason is Reason.RAGGED:
        assert RAGGED is batch.kind or batch.query_len != dispatcher.query_len
    if reason in (Reason.MIXED, Reason.PREFILL):
        assert reason.name == batch.kind.name
    assert reason is not Reason.RANK_VOTE


@settings(max_examples=500)
@given(steps())
def test_steps(step):
    """
    Whatever the scheduler can form meets what it should.
    """
    check_step(step)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=100_000)
@given(steps())
def test_many_steps(step):
    """
    The same, a hundred thousand times.
    """
    check_step(step)


@given(steps(), steps())
def test_pure(step, other):
    """
    The same step is answered the same by any rank at any time, and within the captured sizes by one object.
    """
    dispatcher, batch, allowed = step
    first = dispatcher.dispatch(batch, allowed)
    dispatcher.dispatch(*other[1:])
    second = dispatcher.dispatch(batch, allowed)
    twin = twin_of(dispatcher)
    twin.dispatch(*other[1:])

    assert first == second == twin.dispatch(batch, allowed)
    if first.parts and first.parts[0].mode is not NONE:
        assert first is second


@given(steps())
def test_all_modes_are_the_default(step):
    """
    To name all modes is to name none.
    """
    dispatcher, batch, _ = step

    assert dispatcher.dispatch(batch) == dispatcher.dispatch(batch, frozenset(RuntimeMode))


def test_interned():
    """
    Up to the largest captured size, a step's plan is built once, eager or not; another batch gets another.
    """
    dispatcher = Dispatcher(CapturePlan((2,), (4,)), max_num_seqs=4)
    batches = [
        decodes(1),
        decodes(2),
        Batch(MIXED, 2, 4, 1),
        Batch(MIXED, 3, 4, 1),
        Batch(MIXED, 3, 4, 2),
        ragged(3, 4, 1),
    ]
    for batch in batches:
        for allowed in (None, {FULL}, frozenset()):
            assert dispatcher.dispatch(batch, allowed) is dispatcher.dispatch(batch, allowed)

    # How many of the requests decode changes nothing.
    assert len({id(dispatcher.dispatch(batch)) for batch in batches}) == 5


def test_kept_plans_are_not_mixed_up():
    """
    Batches that differ in anything are told apart, in whatever modes are allowed, before a vote and after it.
    """

    def build():
        return Dispatcher(CapturePlan((4, 8), (6, 16), (0, 1)), query_len=4, max_num_seqs=2)

    batches = [
        Batch(kind, num_reqs, num_tokens, 1, query_len, num_loras, can_pad)
        for kind in (UNIFORM, RAGGED, MIXED, PREFILL)
        for num_reqs, num_tokens in ((1, 3), (2, 3), (2, 5))
        for query_len in (2, 4)
        for num_loras in (0, 1)
        for can_pad in (False, True)
    ]
    dispatcher = build()
    for batch in batches:
        for allowed in (None, {FULL}, {PIECEWISE}, set()):
            assert build().dispatch(batch, allowed) == dispatcher.dispatch(batch, allowed)
        for agreed in (Vote(FULL, 8, 8), Vote(PIECEWISE, 8, 8), Vote(PIECEWISE, 5, 8, 1), Vote(NONE, 8, 8)):
            own = dispatcher.dispatch(batch)
            assert build().settle(batch, own, agreed) == dispatcher.settle(batch, own, agreed)


def test_bounded_memory(monkeypatch):
    """
    However many different batches come, only so many plans are kept; the others are made anew, and equal.
    """
    monkeypatch.setattr("aclgraph_dispatch.dispatcher.MAX_INTERNED", 2)
    dispatcher = Dispatcher(CapturePlan((2,), (8,)), max_num_seqs=4)
    kept, too_many = [Batch(MIXED, 2, n, 1) for n in (3, 4)], Batch(MIXED, 2, 5, 1)
    for batch in kept:
        assert dispatcher.dispatch(batch) is dispatcher.dispatch(batch)
    own = dispatcher.dispatch(too_many)

    assert own is not dispatcher.dispatch(too_many)
    assert own == dispatcher.dispatch(too_many)
    assert dispatcher.settle(too_many, own, Vote(NONE, 9, 9)) == dispatcher.settle(too_many, own, Vote(NONE, 9, 9))


def test_oversized_steps_leave_room(monkeypatch):
    """
    Of steps beyond the largest size there is no end, so they take half of the room and no more.
    """
    monkeypatch.setattr("aclgraph_dispatch.dispatcher.MAX_INTERNED", 4)
    dispatcher = Dispatcher(CapturePlan((2,), (8,)), max_num_seqs=4)
    oversized = [Batch(PREFILL, 1, n, 0) for n in (9, 10, 11)]
    others = [Batch(PREFILL, 1, n, 0) for n in (3, 4, 5)]
    is_kept = [dispatcher.dispatch(b) is dispatcher.dispatch(b) for b in [*oversized, *others]]

    assert [True, True, False, True, True, False] == is_kept


def peak_bytes(dispatcher, num_reqs, last):
    """
    The most memory that one decision takes, once the same was decided before.

    The batch has *num_reqs* decodes of full length, but the last, which has the scheduled and draft tokens *last*.
    """
    query_len = dispatcher.query_len
    lengths, drafts = np.full(512, query_len, np.int32), np.full(512, query_len - 1, np.int32)
    lengths[num_reqs - 1], drafts[num_reqs - 1] = last
    computed, prompts = np.full(512, 102, np.int32), np.full(512, 100, np.int32)
    buffers = lengths, computed + lengths, computed + 1, drafts, prompts
    classifier = Classifier(max_num_seqs=512, query_len=query_len)

    def decide():
        batch = classifier.classify(*[buffer[:num_reqs] for buffer in buffers])
        return dispatcher.dispatch(batch)

    for _ in range(3):
        step_plan = decide()
    assert step_plan.parts[0].mode is not NONE
    tracemalloc.start()
    try:
        decide()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("query_len", "last"),
    [(1, (1, 0)), (4, (4, 3)), (4, (2, 1)), (4, (3, 0))],
    ids=["decodes", "drafts", "ragged drafts", "mixed"],
)
def test_no_memory_that_grows(query_len, last):
    """
    A decision about 512 requests takes as much memory as one about 8: views of arrays, and numbers.
    """
    sizes = range(32, 2049, 32)
    dispatcher = Dispatcher(CapturePlan(sizes, sizes), query_len=query_len, max_num_seqs=2048 // query_len)
    few, many = (peak_bytes(dispatcher, num_reqs, last) for num_reqs in (8, 512))

    # Python has the integers up to 256 at hand; larger ones are objects of 28 bytes.
    assert abs(many - few) <= 8 * 32
    assert many < 4096


# Errors


def test_unknown_policy():
    """
    The known policies are listed.
    """
    with pytest.raises(ConfigError) as excinfo:
        Dispatcher(PLAN, policy="fastest", max_num_seqs=8)

    known = "eager, piecewise, full_decode_only, full_and_piecewise"
    assert f"'policy' must be one of {known}: 'fastest'" == str(excinfo.value)


@pytest.mark.parametrize(
    ("sizes", "query_len", "message"),
    [
        ((3, 4), 3, "'full_sizes' must be multiples of the query length 3: 4; remove it"),
        (
            (4, 5),
            1,
            "'full_sizes' must be <= max_num_seqs * query length = 4, more can never be filled: 5; "
            "remove it or raise max_num_seqs",
        ),
        (
            (12, 15),
            3,
            "'full_sizes' must be <= max_num_seqs * query length = 12, more can never be filled: 15; "
            "remove it or raise max_num_seqs",
        ),
    ],
)
def test_sizes_no_batch_fills(sizes, query_len, message):
    """
    A FULL size that no batch of this server can fill is refused at startup, with the remedy.
    """
    with pytest.raises(PlanError) as excinfo:
        Dispatcher(CapturePlan(sizes), query_len=query_len, max_num_seqs=4)

    assert message == str(excinfo.value)
    assert isinstance(excinfo.value, DispatchError)


@pytest.mark.parametrize(("query_len", "max_num_seqs"), [(0, 4), (4, 0), (-1, 4)])
def test_numbers_below_one(query_len, max_num_seqs):
    """
    A decode has a token, and a batch a request.
    """
    with pytest.raises(ConfigError) as excinfo:
        Dispatcher(CapturePlan(), query_len=query_len, max_num_seqs=max_num_seqs)

    assert f"'query_len' and 'max_num_seqs' must be >= 1: {query_len}, {max_num_seqs}" == str(excinfo.value)


def test_piecewise_sizes_are_free():
    """
    PIECEWISE graphs need no whole requests.
    """
    dispatcher = Dispatcher(CapturePlan((), (5, 100)), query_len=3, max_num_seqs=4)

    assert route(dispatcher, decodes(1, 3)) == (PIECEWISE, 5, Reason.NOT_CAPTURED)
