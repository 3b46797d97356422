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


def test_capture_order_of_adapters():
    """
    Each size is captured for every number of adapters, the most first.
    """
    plan = CapturePlan((2,), (6,), [0, 1, 4])

    assert (
        *(BatchDescriptor(PIECEWISE, 6, num_active_loras=n, role="draft") for n in (4, 1, 0)),
        *(BatchDescriptor(FULL, 2, 2, 1, n, "draft") for n in (4, 1, 0)),
    ) == plan.descriptors(role="draft")


def test_no_adapters_by_default():
    """
    Unless told otherwise there is the base model alone.
    """
    assert CapturePlan((2,), (6,), (0,)) == CapturePlan((2,), (6,))


@given(query_lens.flatmap(lambda q: st.tuples(st.just(q), capture_plans(query_len=q))))
def test_descriptor_of_a_size(query_len_and_plan):
    """
    A graph's key is the same whether all are asked for or one.
    """
    query_len, plan = query_len_and_plan

    assert set(plan.descriptors(query_len=query_len)) == {
        CapturePlan.descriptor(mode, size, case, query_len=query_len)
        for mode in RuntimeMode
        for size in plan.sizes(mode)
        for case in plan.lora_cases
    }


def test_one_token_a_request_by_default():
    """
    Without drafts a FULL graph of 2 tokens serves 2 requests.
    """
    assert (BatchDescriptor(FULL, 2, num_reqs=2, query_len=1),) == CapturePlan((2,)).descriptors()


@given(query_lens.flatmap(lambda q: st.tuples(st.just(q), capture_plans(query_len=q))))
def test_one_descriptor_a_graph(query_len_and_plan):
    """
    Every size appears once for every number of adapters, under a key of its own.
    """
    query_len, plan = query_len_and_plan
    descriptors = plan.descriptors(query_len=query_len)

    num_sizes = len(plan.full_sizes) + len(plan.piecewise_sizes)
    assert num_sizes * len(plan.lora_cases) == len(descriptors) == len(set(descriptors))
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


@pytest.mark.parametrize("cases", [(), (-1, 0), (1, 0), (0, 0), (0, True), (0, 1.0), ("1",)])
def test_wrong_lora_cases(cases):
    """
    There is one case at least, and none twice.
    """
    rule = "'lora_cases' must be one or more integers >= 0, ascending without repetition: "
    with pytest.raises(PlanError) as excinfo:
        CapturePlan(lora_cases=cases)

    assert f"{rule}{list(cases)}" == str(excinfo.value)
