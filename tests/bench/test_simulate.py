import random
from itertools import pairwise

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aclgraph_dispatch import CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.bench.acceptance import Acceptance
from aclgraph_dispatch.bench.checkpoints import cached_checkpoint
from aclgraph_dispatch.bench.compact_scheduler import CompactScheduler
from aclgraph_dispatch.bench.engine import EngineRequest, run_engine
from aclgraph_dispatch.bench.scheduling import ScheduledStep, SchedulerSettings, SimulatedRequest
from aclgraph_dispatch.bench.simulate import Simulation, simulate
from aclgraph_dispatch.bench.vllm_scheduler import VllmScheduler
from aclgraph_dispatch.cost_model import StepTime
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.step_plan import Part, StepPlan
from tests.engines import words

SETTINGS = SchedulerSettings(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, num_blocks=64, async_scheduling=False
)
RECORD = """
from vllm.v1.core.sched.scheduler import Scheduler
from aclgraph_dispatch.integrations.cpu import DispatchModelRunner

steps, schedule, report = [], Scheduler.schedule, DispatchModelRunner.dispatch_report

def recorded(self, *args, **kwargs):
    output = schedule(self, *args, **kwargs)
    step = {
        # vLLM makes names unique by a suffix.
        name.rsplit("-", 1)[0]: [self.requests[name].num_computed_tokens - n, n]
        for name, n in output.num_scheduled_tokens.items()
    }
    if step:
        steps.append(step)
    return output

Scheduler.schedule = recorded
DispatchModelRunner.dispatch_report = lambda self: report(self) | {"steps": steps}
"""


def second(_step: ScheduledStep, _part: Part) -> StepTime:
    return StepTime(0.0, 0.0, 0.5, 0.0, 1.0, 0.0)


def run(
    requests: list[SimulatedRequest],
    settings: SchedulerSettings = SETTINGS,
    *,
    plan: CapturePlan = CapturePlan((1, 2, 4), (1, 2, 4, 8, 16)),  # noqa: B008 -- frozen
    ranks: int = 1,
    acceptance: Acceptance | None = None,
) -> tuple[Simulation, list[tuple[ScheduledStep, StepPlan]]]:
    steps: list[tuple[ScheduledStep, StepPlan]] = []
    query_len = 1 + settings.num_spec_tokens
    if query_len > 1:
        plan = CapturePlan(tuple(n * query_len for n in (1, 2, 4)), plan.piecewise_sizes)
    dispatcher = Dispatcher(plan, max_num_seqs=settings.max_num_seqs, query_len=query_len)
    simulation = simulate(
        requests,
        [CompactScheduler(settings) for _ in range(ranks)],
        [dispatcher] * ranks,
        second,
        acceptance=acceptance,
        on_step=lambda step, step_plan: steps.append((step, step_plan)),
    )
    return simulation, steps


def test_first_token_comes_after_the_prompt():
    """
    A prompt of two chunks takes two steps, and its tokens come out one a step from then on.
    """
    simulation, _ = run([SimulatedRequest(0, 1.0, 40, 3)])

    assert [3.0, 4.0, 5.0] == simulation.token_seconds[0].tolist()
    assert [1.0] == simulation.admitted_seconds.tolist()


@pytest.mark.parametrize(("is_async", "first_token"), [(False, 3.0), (True, 4.0)])
def test_async_scheduling_admits_a_step_later(is_async, first_token):
    """
    A request that arrives during a step joins the next one, or with async scheduling the one after.
    """
    requests = [SimulatedRequest(0, 0.0, 8, 10), SimulatedRequest(1, 0.5, 8, 2)]
    simulation, _ = run(requests, attrs.evolve(SETTINGS, async_scheduling=is_async))

    assert simulation.token_seconds[1][0] == first_token - 1.0


def test_steps_meet_graphs():
    """
    Each step follows the plan of the dispatcher: a prompt in two chunks eagerly, then decodes in a FULL graph.
    """
    simulation, steps = run([SimulatedRequest(0, 0.0, 40, 3)])

    assert [RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL, RuntimeMode.FULL] == [
        record.part.mode for record in simulation.steps
    ]
    assert [(0, 32), (32, 8), (40, 1), (41, 1)] == [
        (int(step.num_computed[0]), int(step.num_scheduled[0])) for step, _ in steps
    ]


def test_cache_that_is_too_small():
    """
    A request that can never be scheduled is an error that names the setting.
    """
    with pytest.raises(ConfigError, match="'num_blocks' must hold the longest request: 4 blocks of 16 tokens"):
        run([SimulatedRequest(0, 0.0, 100, 3)], attrs.evolve(SETTINGS, num_blocks=4))


@given(
    st.lists(
        st.tuples(st.integers(0, 240).map(lambda n: n / 8), st.integers(1, 100), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ).map(sorted),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_everybody_is_served(rows, is_async, num_spec_tokens, ranks):
    """
    Every request gets all of its tokens, none before its arrival, in order, at the end of a step; steps of a rank
    do not overlap; ranks run every step in the same mode and, in a graph, the same size.
    """
    requests = [SimulatedRequest(i, *row) for i, row in enumerate(rows)]
    settings = attrs.evolve(SETTINGS, async_scheduling=is_async, num_spec_tokens=num_spec_tokens)
    acceptance = Acceptance(0.6, seed=1) if num_spec_tokens else None
    simulation, _ = run(requests, settings, ranks=ranks, acceptance=acceptance)

    assert [r.output_tokens for r in requests] == [len(times) for times in simulation.token_seconds]
    ends = {record.start_seconds + record.seconds for record in simulation.steps}
    for request, times in zip(requests, simulation.token_seconds, strict=True):
        assert times[0] >= request.arrival_seconds + 1
        assert (np.diff(times) >= 0).all()
        assert set(times.tolist()) <= ends
    by_start: dict[float, list] = {}
    for record in simulation.steps:
        by_start.setdefault(record.start_seconds, []).append(record)
    starts = sorted(by_start)
    assert all(later - earlier >= 1 for earlier, later in pairwise(starts))
    for records in by_start.values():
        assert ranks == len(records)
        assert 1 == len({record.part.mode for record in records})
        if records[0].part.mode is not RuntimeMode.NONE:
            assert 1 == len({record.part.num_padded_tokens for record in records})


def test_same_input_same_steps():
    """
    Two runs over the same input are the same, bit for bit.
    """
    rng = random.Random(3)
    requests = [SimulatedRequest(i, i * 0.3, rng.randint(1, 90), rng.randint(1, 20)) for i in range(30)]
    settings = attrs.evolve(SETTINGS, num_spec_tokens=2, async_scheduling=True)
    first, second_ = (run(requests, settings, acceptance=Acceptance(0.5, seed=7))[0] for _ in range(2))

    assert first.steps == second_.steps
    assert all(map(np.array_equal, first.token_seconds, second_.token_seconds))


def test_load_goes_to_the_emptier_rank():
    """
    Of two ranks the second request takes the one that has nothing to do.
    """
    _, steps = run([SimulatedRequest(i, 0.0, 8, 4) for i in range(4)], ranks=2)

    assert [(0, 2), (1, 3)] == [step.requests for step, _ in steps[:2]]


@pytest.mark.engine
def test_steps_of_a_real_engine():
    """
    Simulated steps are those of a real engine with the same requests and settings, batch by batch and token by
    token, with chunked prefills, prefix hits and preemptions; and so are the decisions about each.
    """
    rng = random.Random(5)
    stems = [words(rng, 96) for _ in range(3)]
    requests = [
        EngineRequest(
            f"request-{i}",
            (stems[i % 3][: 32 * rng.randint(1, 3)] if i % 2 else []) + words(rng, rng.randint(5, 80)),
            rng.randint(4, 60),
            arrival_step=i,
        )
        for i in range(40)
    ]
    # The CPU's blocks have 32 tokens or a multiple.
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 32}
    engine = {
        "model": str(cached_checkpoint("gqa")),
        "dtype": "float32",
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": True,
        **limits,
    }
    real = run_engine(engine, requests, emulate=True, prelude=RECORD)

    numbers: dict[tuple[int, ...], int] = {}
    simulated_requests = []
    for i, request in enumerate(requests):
        assert isinstance(request.prompt, list)
        prefixes = [tuple(request.prompt[:end]) for end in range(32, len(request.prompt) + 1, 32)]
        blocks = tuple(numbers.setdefault(prefix, len(numbers)) for prefix in prefixes)
        simulated_requests.append(
            SimulatedRequest(
                i, float(request.arrival_step), len(request.prompt), request.num_output_tokens, blocks
            )
        )
    scheduler_settings = SchedulerSettings(**limits, num_blocks=20, async_scheduling=False)
    report = real.report
    dispatcher = Dispatcher(
        CapturePlan(tuple(report["full_sizes"]), tuple(report["piecewise_sizes"])), max_num_seqs=8
    )
    for scheduler_cls in (VllmScheduler, CompactScheduler):
        steps = []
        decisions = []

        def note(step: ScheduledStep, plan: StepPlan, steps=steps, decisions=decisions) -> None:
            columns = zip(step.requests, step.num_computed.tolist(), step.num_scheduled.tolist(), strict=True)
            steps.append({f"request-{i}": [computed, scheduled] for i, computed, scheduled in columns})
            decisions.extend((p.mode.name, p.reason.name, p.requests[1], p.num_padded_tokens) for p in plan.parts)

        scheduler = scheduler_cls(scheduler_settings)
        simulation = simulate(simulated_requests, [scheduler], [dispatcher], second, on_step=note)

        assert report["steps"] == steps
        assert [
            (d["mode"], d["reason"], d["requests"], d["padded"]) for d in report["decisions"] if not d["idle"]
        ] == decisions
        assert simulation.num_preemptions > 0
    assert any(
        computed >= 32 and name not in seen
        for seen, step in _with_seen(report["steps"])
        for name, (computed, _) in step.items()
    ), "no prompt found its prefix"


def _with_seen(steps):
    seen: set[str] = set()
    for step in steps:
        yield set(seen), step
        seen |= step.keys()
