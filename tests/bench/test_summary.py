import numpy as np
import pytest

from aclgraph_dispatch import Batch, BatchKind, CapturePlan, Dispatcher
from aclgraph_dispatch.bench.simulate import Simulation, StepRecord
from aclgraph_dispatch.bench.summary import metrics, per_request, series
from aclgraph_dispatch.cost_model import StepTime


def record(
    start: float, num_reqs: int, num_tokens: int, kind: BatchKind, host: float, device: float
) -> StepRecord:
    dispatcher = Dispatcher(CapturePlan((4,), (4, 16)), max_num_seqs=4)
    [part] = dispatcher.dispatch(Batch(kind, num_reqs, num_tokens, 0, 1)).parts
    time = StepTime(0.25, 0.0, host, 0.0, device, 0.25)
    return StepRecord(0, start, time.seconds, part, num_reqs, time)


@pytest.fixture
def simulation() -> Simulation:
    steps = [
        record(0.0, 1, 30, BatchKind.PREFILL, 1.0, 3.0),  # eager: 3.5 s
        record(3.5, 2, 12, BatchKind.MIXED, 1.0, 1.0),  # PIECEWISE 16: 1.5 s
        record(5.0, 3, 3, BatchKind.UNIFORM_DECODE, 1.0, 0.5),  # FULL 4: 1.5 s
    ]
    return Simulation(steps, np.zeros(2), np.zeros(2), [np.array([3.5, 6.5]), np.array([5.0])], 1)


def test_metrics_of_steps(simulation):
    """
    Shares of steps, of time, of padding and of an idle device are those counted by hand.
    """
    found = metrics(simulation, slo_ttft_ms=4000, slo_tpot_ms=4000, seed=0)

    assert {"FULL": 1 / 3, "PIECEWISE": 1 / 3, "NONE": 1 / 3} == found["route_shares"]
    assert {"FULL": 1.5 / 6.5, "PIECEWISE": 1.5 / 6.5, "NONE": 3.5 / 6.5} == found["time_shares"]
    assert (4 + 1) / (30 + 16 + 4) == found["padding_share"]
    assert 1 - (3.25 + 1.25 + 0.75) / 6.5 == pytest.approx(found["device_idle_share"])
    assert {"mixed": 1, "over_max": 1, "padded": 1} == found["reasons"]
    assert (3, 1) == (found["num_steps"], found["num_preemptions"])
    assert 4250.0 == found["ttft_ms"]["mean"]


def test_series_count_every_step(simulation):
    """
    Each plot's figures count every step once, by mode.
    """
    found = series(simulation)

    for name in ("routes_over_time", "step_ms"):
        assert [1, 1, 1] == [sum(found[name][mode]) for mode in ("FULL", "PIECEWISE", "NONE")]
    assert {"sizes": [4, 16], "steps": [1, 1], "paddings": [1, 4]} == found["padding_by_size"]
    assert 6.5 == found["routes_over_time"]["edges_seconds"][-1]
    assert found["step_ms"]["edges_ms"][0] <= 1500
    assert found["step_ms"]["edges_ms"][-1] >= 3500


def test_per_request_in_order(simulation):
    """
    Each request's latencies, in milliseconds; a single token has a TPOT of 0.
    """
    assert {"ttft_ms": [3500.0, 5000.0], "tpot_ms": [3000.0, 0.0], "e2el_ms": [6500.0, 5000.0]} == per_request(
        simulation
    )
