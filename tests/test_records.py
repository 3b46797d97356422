"""What the dispatcher did."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch import (
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    Dispatcher,
    Part,
    Reason,
    RuntimeMode,
    StepPlan,
)
from aclgraph_dispatch.records import RouteCount, StepRecords

from .strategies import steps

NONE, PIECEWISE, FULL = RuntimeMode


def part(mode, padded, first, last, reason):
    """
    A part of the tokens from *first* to *last*, padded to *padded*.
    """
    return Part(mode, BatchDescriptor(mode, padded), (0, 1), (first, last), reason)


def test_nothing_observed():
    """
    No steps, no rows; an empty step leaves none either.
    """
    records = StepRecords()
    records.observe(StepPlan(()))

    assert records.counts() == ()


def test_rows():
    """
    One row a route and reason, the most frequent first, every part of a step counted.
    """
    records = StepRecords()
    records.observe(StepPlan((part(FULL, 8, 0, 5, Reason.PADDED), part(NONE, 95, 5, 100, Reason.MIXED))))
    records.observe(StepPlan((part(PIECEWISE, 16, 0, 16, Reason.MIXED),)))
    records.observe(StepPlan((part(FULL, 8, 0, 7, Reason.PADDED),)))

    assert (
        RouteCount(FULL, Reason.PADDED, num_parts=2, num_tokens=12, num_paddings=4),
        RouteCount(NONE, Reason.MIXED, num_parts=1, num_tokens=95, num_paddings=0),
        RouteCount(PIECEWISE, Reason.MIXED, num_parts=1, num_tokens=16, num_paddings=0),
    ) == records.counts()


def test_counts_are_a_snapshot():
    """
    What was read stays as it was, while counting goes on.
    """
    dispatcher = Dispatcher(CapturePlan((1,)), max_num_seqs=1)
    step_plan = dispatcher.dispatch(Batch(BatchKind.UNIFORM_DECODE, 1, 1, 1))
    records = StepRecords()
    records.observe(step_plan)
    before = records.counts()
    records.observe(step_plan)

    assert [row.num_parts for row in before] == [1]
    assert [row.num_parts for row in records.counts()] == [2]


def test_recent():
    """
    The last decisions are kept in order, and which of them were idle; no more than asked for.
    """
    first, second, third = (StepPlan((part(FULL, 8, 0, n, Reason.PADDED),)) for n in (1, 2, 3))
    records = StepRecords(num_recent=2)
    assert records.recent() == ()

    records.observe(first)
    records.observe_idle(second)
    assert ((first, False), (second, True)) == records.recent()
    records.observe(third)
    assert ((second, True), (third, False)) == records.recent()


def test_idle_steps_are_not_counted():
    """
    What is run only because other ranks run it is no step of this engine.
    """
    records = StepRecords()
    records.observe_idle(StepPlan((part(FULL, 8, 0, 0, Reason.RANK_VOTE),)))

    assert records.counts() == ()


def test_decisions_kept_by_default():
    """
    A thousand decisions and a few are kept, whatever runs.
    """
    records = StepRecords()
    for _ in range(2000):
        records.observe(StepPlan(()))

    assert len(records.recent()) == 1024


@given(st.lists(steps(), max_size=5))
def test_totals(observed):
    """
    Nothing is lost: the rows sum up to the steps.
    """
    records = StepRecords()
    total = Counter()
    for dispatcher, batch, allowed in observed:
        step_plan = dispatcher.dispatch(batch, allowed)
        records.observe(step_plan)
        total["parts"] += len(step_plan.parts)
        total["tokens"] += batch.num_tokens
        total["padded"] += sum(p.num_padded_tokens for p in step_plan.parts)

    rows = records.counts()

    assert total["parts"] == sum(row.num_parts for row in rows)
    assert total["tokens"] == sum(row.num_tokens for row in rows)
    assert total["padded"] == sum(row.num_tokens + row.num_paddings for row in rows)
    assert len(rows) == len({(row.mode, row.reason) for row in rows})
