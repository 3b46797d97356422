"""What the simulator adds to a step is less than what vLLM's scheduler takes for it."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from aclgraph_dispatch.bench.contenders import CONTENDERS
from aclgraph_dispatch.bench.ladders import Limits
from aclgraph_dispatch.bench.scheduling import Delivery, ScheduledStep, SchedulerSettings, SimulatedRequest
from aclgraph_dispatch.bench.simulate import simulate
from aclgraph_dispatch.bench.timers import CostTimer
from aclgraph_dispatch.bench.vllm_scheduler import VllmScheduler
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.model_shape import ModelShape

from .conftest import RATIOS

ROUNDS = 7
STEPS = 60
LIMIT = 1.0


class Timed(VllmScheduler):
    """
    vLLM's scheduler, and the time spent in it.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self.seconds = 0.0

    def schedule(self) -> ScheduledStep:
        start = perf_counter()
        step = super().schedule()
        self.seconds += perf_counter() - start
        return step

    def update(self, step: ScheduledStep, num_sampled: Sequence[int]) -> list[Delivery]:
        start = perf_counter()
        deliveries = super().update(step, num_sampled)
        self.seconds += perf_counter() - start
        return deliveries


@pytest.mark.parametrize("num_reqs", [16, 64, 256])
def test_own_share(benchmark: Any, pytestconfig: pytest.Config, num_reqs: int) -> None:
    """
    Of a simulation of decodes, the median over rounds of the time outside of vLLM's scheduler by that within.
    """
    settings = SchedulerSettings(num_reqs, 1 << 16, 1 << 12, 100 * num_reqs)
    cost = CostModel(ModelShape.named("deepseek-v2-lite"), Device.named("ascend-910b"))
    dispatcher = CONTENDERS["full_and_piecewise"].dispatcher(Limits(num_reqs, 1 << 16), cost)
    requests = [SimulatedRequest(i, 0.0, 100, STEPS) for i in range(num_reqs)]
    schedulers: list[Timed] = []

    def fresh() -> tuple[tuple[Timed], dict[str, Any]]:
        schedulers.append(Timed(settings))
        return (schedulers[-1],), {}

    def run(scheduler: Timed) -> None:
        simulate(requests, [scheduler], [dispatcher], CostTimer(cost))

    benchmark.pedantic(run, setup=fresh, rounds=ROUNDS, warmup_rounds=1)
    within = [scheduler.seconds for scheduler in schedulers[-ROUNDS:]]
    outside = [total - part for total, part in zip(benchmark.stats.stats.data, within, strict=True)]
    ratio = median(own / theirs for own, theirs in zip(outside, within, strict=True))

    microseconds = [1e6 * median(seconds) / STEPS for seconds in (within, outside)]
    benchmark.extra_info.update(num_reqs=num_reqs, vllm_us=microseconds[0], ours_us=microseconds[1], ratio=ratio)
    pytestconfig.stash[RATIOS].append(("simulator's own share", num_reqs, *microseconds, ratio))
    assert ratio <= LIMIT, f"the simulator takes {ratio:.2f} of the scheduler's time"
