"""Which graphs exist."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch import BatchDescriptor, CapturePlan, RuntimeMode
from aclgraph_dispatch.errors import DispatchError, PlanError

from .strategies import capture_plans, query_lens

NONE, PIECEWISE, FULL = RuntimeMode


def test_empty_plan():
    """
    Nothing captured is a plan too.
    """
    assert CapturePlan(full_sizes=(), piecewise_sizes=()) == CapturePlan()
    assert CapturePlan().descriptors() == ()


def test_sizes_by_mode():
    """
    Each mode has its own sizes, whatever they were given in, and eager has none.
    """
    plan = CapturePlan([1, 2], range(8, 10))

    assert [plan.sizes(mode) for mode in RuntimeMode] == [(), (8, 9), (1, 2)]


def test_capture_order():
    """
    PIECEWISE comes first, then FULL, each from the largest, with the requests that fill a FULL graph.
    """
    descriptors = CapturePlan((4, 8), (6, 16)).descriptors(query_len=4)

    assert (
        BatchDescriptor(PIECEWISE, 16),
        BatchDescriptor(PIECEWISE, 6),
        BatchDescriptor(FULL, 8, num_reqs=2, query_len=4),
        BatchDescriptor(FULL, 4, num_reqs=1, query_len=4),
    ) == descriptors


def test_one_token_a_request_by_default():
    """
    Without drafts a FULL graph of 2 tokens serves 2 requests.
    """
    assert (BatchDescriptor(FULL, 2, num_reqs=2, query_len=1),) == CapturePlan((2,)).descriptors()


@given(query_lens.flatmap(lambda q: st.tuples(st.just(q), capture_plans(query_len=q))))
def test_one_descriptor_a_graph(query_len_and_plan):
    """
    Every size appears once, under a key of its own.
    """
    query_len, plan = query_len_and_plan
    descriptors = plan.descriptors(query_len=query_len)

    assert len(plan.full_sizes) + len(plan.piecewise_sizes) == len(set(descriptors))
    assert all(d.num_tokens == d.num_reqs * query_len for d in descriptors if d.mode is FULL)


@pytest.mark.parametrize("name", ["full_sizes", "piecewise_sizes"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "must hold integers >= 1: 0; remove it"),
        ((-1,), "must hold integers >= 1: -1; remove it"),
        ((True,), "must hold integers >= 1: True; remove it"),
        ((1.0,), "must hold integers >= 1: 1.0; remove it"),
        (("12",), "must hold integers >= 1: '12'; remove it"),
        ((2, 1), r"must ascend without repetition: \[2, 1\]; write \[1, 2\]"),
        ((1, 2, 2), r"must ascend without repetition: \[1, 2, 2\]; write \[1, 2\]"),
    ],
)
def test_wrong_sizes(name, sizes, message):
    """
    Sizes are positive integers that ascend; anything else is named, with the remedy.
    """
    with pytest.raises(PlanError, match=f"^'{name}' {message}$") as excinfo:
        CapturePlan(**{name: sizes})

    assert isinstance(excinfo.value, DispatchError)
