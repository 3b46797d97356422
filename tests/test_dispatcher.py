"""From a classified batch to the graphs it meets."""

import pytest
from hypothesis import event, given, settings

from aclgraph_dispatch import (
    POLICIES,
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    Dispatcher,
    Part,
    Reason,
    RuntimeMode,
    ScheduledRequest,
    StepPlan,
)
from aclgraph_dispatch.errors import ConfigError, DispatchError, PlanError

from .strategies import steps

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


def fits(dispatcher, batch, mode):
    """
    The captured sizes of *mode* that hold *batch*.
    """
    return [size for size in dispatcher.plan.sizes(mode) if size >= batch.num_tokens]


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
STEP_BY_REASON = {
    Reason.EXACT: (BOTH, PLAN, decodes(2), None, FULL, 2),
    Reason.PADDED: (BOTH, PLAN, decodes(3), None, FULL, 4),
    Reason.OVER_MAX: (BOTH, PLAN, decodes(5), None, PIECEWISE, 8),
    Reason.NOT_CAPTURED: (BOTH, FULL_ONLY, Batch(MIXED, 2, 4, 1), None, NONE, 4),
    Reason.RAGGED: (BOTH, PLAN, Batch(RAGGED, 2, 5, 2), None, PIECEWISE, 8),
    Reason.MIXED: (BOTH, PLAN, Batch(MIXED, 2, 4, 1), None, PIECEWISE, 8),
    Reason.PREFILL: (BOTH, PLAN, Batch(PREFILL, 1, 4, 0), None, PIECEWISE, 8),
    Reason.BACKEND_LIMIT: (BOTH, PLAN, decodes(2), {PIECEWISE}, PIECEWISE, 3),
    Reason.DISABLED: ("eager", PLAN, decodes(2), None, NONE, 2),
}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason(reason):
    """
    Every reason occurs, and is what stood in the way.
    """
    policy, plan, batch, allowed, mode, num_tokens = STEP_BY_REASON[reason]
    dispatcher = Dispatcher(plan, policy=policy, max_num_seqs=8)

    assert (mode, num_tokens, reason) == route(dispatcher, batch, allowed)


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


# Properties


@given(steps())
def test_parts_partition_the_batch(step):
    """
    Every request and every token is run once, in order.
    """
    dispatcher, batch, allowed = step
    parts = dispatcher.dispatch(batch, allowed).parts

    request = token = 0
    for part in parts:
        assert (request, token) == (part.requests[0], part.tokens[0])
        assert part.requests[0] < part.requests[1]
        assert part.tokens[0] < part.tokens[1]
        request, token = part.requests[1], part.tokens[1]
    assert (batch.num_reqs, batch.num_tokens) == (request, token)


@settings(max_examples=300)
@given(steps())
def test_graphs_hold_their_parts(step):
    """
    A part meets a captured graph with room for its tokens and requests, or runs eagerly at its own size.
    """
    dispatcher, batch, allowed = step
    captured = dispatcher.plan.descriptors(query_len=dispatcher.query_len)

    for part in dispatcher.dispatch(batch, allowed).parts:
        event(f"{batch.kind.name} {part.mode.name} {part.reason.name}")
        assert part.mode is part.descriptor.mode
        if part.mode is NONE:
            assert BatchDescriptor(NONE, part.num_tokens) == part.descriptor
            assert part.reason not in (Reason.EXACT, Reason.PADDED)
        else:
            assert part.descriptor in captured
            assert part.num_tokens <= part.num_padded_tokens
        if part.mode is FULL:
            assert batch.kind is UNIFORM
            assert part.requests[1] - part.requests[0] <= part.descriptor.num_reqs


@settings(max_examples=300)
@given(steps())
def test_first_mode_that_fits(step):
    """
    The mode is the first in the policy that is allowed and large enough, padded as little as possible.
    """
    dispatcher, batch, allowed = step
    wanted = [
        mode
        for mode in POLICIES[dispatcher.policy].get(batch.kind, ())
        if (allowed is None or mode in allowed) and fits(dispatcher, batch, mode) and not batch.num_active_loras
    ]

    for part in dispatcher.dispatch(batch, allowed).parts:
        assert (wanted[0] if wanted else NONE) is part.mode
        assert min(fits(dispatcher, batch, part.mode), default=part.num_tokens) == part.num_padded_tokens
        assert (part.reason is Reason.EXACT) <= (part.num_paddings == 0)
        assert (part.reason is Reason.PADDED) <= (part.num_paddings > 0)


@given(steps(), steps())
def test_pure(step, other):
    """
    The same step is answered the same by any rank at any time, and within the captured sizes by one object.
    """
    dispatcher, batch, allowed = step
    twin = Dispatcher(
        dispatcher.plan,
        policy=dispatcher.policy,
        query_len=dispatcher.query_len,
        max_num_seqs=dispatcher.max_num_seqs,
    )
    first = dispatcher.dispatch(batch, allowed)
    dispatcher.dispatch(*other[1:])
    second = dispatcher.dispatch(batch, allowed)

    assert first == second == twin.dispatch(batch, allowed)
    if first.parts and first.parts[0].mode is not NONE:
        assert first is second


def test_interned():
    """
    Up to the largest captured size, a step's plan is built once, eager or not; another batch gets another.
    """
    dispatcher = Dispatcher(CapturePlan((2,), (4,)), max_num_seqs=4)
    batches = [decodes(1), decodes(2), Batch(MIXED, 2, 4, 1), Batch(MIXED, 3, 4, 1), Batch(MIXED, 3, 4, 2)]
    for batch in batches:
        for allowed in (None, {FULL}, frozenset()):
            assert dispatcher.dispatch(batch, allowed) is dispatcher.dispatch(batch, allowed)

    # How many of the requests decode changes nothing.
    assert len({id(dispatcher.dispatch(batch)) for batch in batches}) == 4


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


def test_piecewise_sizes_are_free():
    """
    PIECEWISE graphs need no whole requests.
    """
    dispatcher = Dispatcher(CapturePlan((), (5, 100)), query_len=3, max_num_seqs=4)

    assert route(dispatcher, decodes(1, 3)) == (PIECEWISE, 5, Reason.NOT_CAPTURED)
