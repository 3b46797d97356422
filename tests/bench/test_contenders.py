import pytest

from aclgraph_dispatch import POLICIES, Batch, BatchKind, RuntimeMode
from aclgraph_dispatch.bench.contenders import CONTENDERS, ORACLE
from aclgraph_dispatch.bench.ladders import LADDERS, Limits
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.model_shape import ModelShape

LIMITS = Limits(64, 1024, num_layers=27)


@pytest.fixture(scope="module")
def cost():
    return CostModel(ModelShape.named("deepseek-v2-lite"), Device.named("ascend-910b"))


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_contenders_decide(name, cost):
    """
    Every contender makes a dispatcher that decides about decodes and mixed batches.
    """
    contender = CONTENDERS[name]
    dispatcher = contender.dispatcher(LIMITS, cost)
    decode = dispatcher.dispatch(Batch(BatchKind.UNIFORM_DECODE, 3, 3, 3, 1)).parts[0]
    mixed = dispatcher.dispatch(Batch(BatchKind.MIXED, 3, 900, 2, 1)).parts[0]

    assert contender.policy in POLICIES
    assert contender.ladder in LADDERS
    if contender.policy == "eager":
        assert (RuntimeMode.NONE, RuntimeMode.NONE) == (decode.mode, mixed.mode)
    elif not contender.by_cost:
        assert decode.mode is not RuntimeMode.NONE
        assert (mixed.mode is RuntimeMode.PIECEWISE) == (contender.ladder == "to_budget")


def test_defaults_are_vllms():
    """
    `full_and_piecewise` captures vLLM's default sizes: FULL as far as requests go, PIECEWISE as far as tokens do.
    """
    plan = CONTENDERS["full_and_piecewise"].plan(LIMITS)

    assert (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64) == plan.full_sizes
    assert 128 == plan.piecewise_sizes[-1]


def test_speculation_captures_whole_requests():
    """
    With drafts FULL sizes are whole requests, up to all of them.
    """
    plan = CONTENDERS["legacy"].plan(Limits(64, 1024, query_len=4, num_layers=61, num_groups=1))

    assert all(size % 4 == 0 for size in plan.full_sizes)
    assert 256 == plan.full_sizes[-1]


def test_oracle_captures_nothing():
    """
    The oracle has no graphs: it neither pads nor waits.
    """
    plan = CONTENDERS[ORACLE].plan(LIMITS)

    assert ((), ()) == (plan.full_sizes, plan.piecewise_sizes)


def test_by_cost_asks_the_model(cost):
    """
    By cost, a decode takes the route that the cost model predicts to be the fastest.
    """
    dispatcher = CONTENDERS["by_cost"].dispatcher(LIMITS, cost)
    part = dispatcher.dispatch(Batch(BatchKind.UNIFORM_DECODE, 3, 3, 3, 1)).parts[0]
    assert dispatcher.cost is not None
    fastest = min(
        [dispatcher.cost.seconds(RuntimeMode.NONE, 3)]
        + [
            dispatcher.cost.seconds(mode, size)
            for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE)
            for size in dispatcher.plan.sizes(mode)
            if size >= 3
        ]
    )

    assert fastest == part.seconds
