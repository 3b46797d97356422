"""
A real vLLM run, simulated from a profile of its card, and how far the two are apart.

Theory of operation
-------------------
The run's requests (`real_run`) arrive at the same times at vLLM's scheduler on a virtual clock, with the settings
of the run, and each step takes what the profile of the card says (`layer_profile`). Nothing is fitted: there is no
factor and no overhead to set; what the run does not say is vLLM's default then, and the command tells it.

Times are counted as the engine counts them: TTFT and E2EL start when the engine core takes a request in
(`queued_ts`), not when it was sent.

The gate is that of the simulator this layout comes from, and two tighter ones. Three negative controls, each a
mistake that is easy to make, must fall outside; a gate that lets them pass would say nothing.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from aclgraph_dispatch.capture_plan import CapturePlan
from aclgraph_dispatch.constants import catalogue, entry
from aclgraph_dispatch.dispatcher import Dispatcher
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks

from .ladders import Limits, vllm
from .layer_profile import LayerProfile, ProfileTimer, read_profile
from .real_run import RealRun, read_run
from .scheduling import Scheduler, SchedulerSettings, SimulatedRequest
from .simulate import Simulation, simulate

FIRST = 100
"""Requests whose TTFT is looked at by itself: before a queue forms it shows what the means hide."""

GATE = {
    "mean TPOT": 0.05,
    "mean E2EL": 0.05,
    "mean TTFT": 0.15,
    f"mean TTFT of the first {FIRST}": 0.15,
    "median |error| of a request's TPOT": 0.02,
}
"""The largest relative errors."""

CARD_BYTES = {
    # Reported by the driver in a public run's description (LLMServingSim, bench/examples).
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 101_976_440_832,
    # Nominal 24 GiB, less what the driver keeps; recalled from torch's device properties.
    "NVIDIA GeForce RTX 4090": 25_393_364_992,
    "NVIDIA H100 80GB HBM3": 85_029_158_912,
    "NVIDIA H200": 150_109_880_320,
    "NVIDIA A100-SXM4-80GB": 85_097_971_712,
}
"""Memory of cards, for runs that do not say how many blocks their KV cache had; but for the first, recalled."""

GIB = 1 << 30

LINKS = {"fast links": (10e-6, 50e9), "slow links": (30e-6, 20e9)}
"""
Seconds of an exchange between cards without bytes, and bytes a second: two guesses about PCIe that a truth should
lie between. A profile says nothing about links, so runs on several cards are told as a band and not judged.
"""

CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "attention of mixed steps added up": {"additive": True},
    "longest decode context instead of the mean": {"max_context": True},
    "token budget of 512": {"token_budget": 512},
}
"""Mistakes that the gate must find."""


@attrs.frozen
class Times:
    """
    Of every request, in seconds; a request of one token has no TPOT (NaN).
    """

    ttft: npt.NDArray[np.float64]
    tpot: npt.NDArray[np.float64]
    e2el: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        queued: npt.NDArray[np.float64],
        first: npt.NDArray[np.float64],
        last: npt.NDArray[np.float64],
        num_tokens: npt.NDArray[np.int64],
    ) -> "Times":
        """
        From the moments a request was taken in and got its first and last token.
        """
        gaps = np.where(num_tokens > 1, num_tokens - 1, np.nan)
        return cls(first - queued, (last - first) / gaps, last - queued)


@attrs.frozen
class Comparison:
    """
    Real and simulated times of the same requests.

    Args:
        real: As measured.
        simulated: As simulated.
        num_steps: Simulated steps.
        num_preemptions: Simulated preemptions.
        real_wait_seconds: Mean time from arrival until the engine core took the request in.
        simulated_wait_seconds: The same, simulated.
    """

    real: Times
    simulated: Times
    num_steps: int
    num_preemptions: int
    real_wait_seconds: float
    simulated_wait_seconds: float

    def means(self) -> dict[str, tuple[float, float]]:
        """
        Real and simulated means, in seconds, by the name they have in `GATE`.
        """
        real, simulated = self.real, self.simulated
        return {
            "mean TPOT": (float(np.nanmean(real.tpot)), float(np.nanmean(simulated.tpot))),
            "mean E2EL": (float(real.e2el.mean()), float(simulated.e2el.mean())),
            "mean TTFT": (float(real.ttft.mean()), float(simulated.ttft.mean())),
            f"mean TTFT of the first {FIRST}": (
                float(real.ttft[:FIRST].mean()),
                float(simulated.ttft[:FIRST].mean()),
            ),
        }

    def errors(self) -> dict[str, float]:
        """
        Relative errors by the name they have in `GATE`: simulated / real - 1, or the median of absolute ones.
        """
        errors = {name: simulated / real - 1 for name, (real, simulated) in self.means().items()}
        per_request = np.abs(self.simulated.tpot / self.real.tpot - 1)
        return errors | {"median |error| of a request's TPOT": float(np.nanmedian(per_request))}

    def outside(self) -> list[str]:
        """
        What the gate does not let pass.
        """
        return [name for name, error in self.errors().items() if not abs(error) <= GATE[name]]


@attrs.frozen
class Setup:
    """
    How a run is simulated, and what of it the run itself did not say.
    """

    settings: SchedulerSettings
    num_ranks: int
    capture_sizes: tuple[int, ...]
    assumptions: tuple[str, ...]


def set_up(run: RealRun, profile: LayerProfile, model: ModelShape, *, num_blocks: int | None = None) -> Setup:
    """
    Take the settings from a run.

    Args:
        run: The run.
        profile: Of its card and model.
        model: The model on one rank.
        num_blocks: Blocks of the KV cache, if they are known better than from the run.

    Raises:
        ConfigError: A setting is missing or wrong, or the card's memory is not known.
    """
    assumptions: list[str] = []
    max_num_seqs = _integer(run, "max_num_seqs")
    max_num_batched_tokens = _integer(run, "max_num_batched_tokens")
    block_size = int(run.setting("block_size", default=16))
    longest = max(r.prompt_tokens + r.output_tokens for r in run.requests) + 1
    max_model_len = int(run.setting("max_model_len", default=max(longest, 1 << 17)))
    blocks = num_blocks or run.setting("num_gpu_blocks_override", "num_gpu_blocks")
    if blocks is None:
        blocks = _estimated_blocks(run, profile, model, block_size, max_num_seqs, max_num_batched_tokens)
        assumptions.append(f"{blocks} blocks of the KV cache, from the card's memory; --num-blocks sets them")
    is_eager = bool(run.setting("enforce_eager", default=False))
    sizes = run.setting("cudagraph_capture_sizes")
    if sizes is None:
        sizes = vllm(Limits(max_num_seqs, max_num_batched_tokens))
        assumptions.append("vLLM's default capture sizes")
    settings = SchedulerSettings(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        int(blocks),
        block_size=block_size,
        enable_prefix_caching=bool(run.setting("enable_prefix_caching", default=True)),
        async_scheduling=bool(run.setting("async_scheduling", default=True)),
        long_prefill_token_threshold=int(run.setting("long_prefill_token_threshold", default=0)),
    )
    if not any(r.blocks for r in run.requests) and settings.enable_prefix_caching:
        assumptions.append("no prompt shares a prefix with another: there is no blocks.jsonl.gz")
    num_ranks = int(run.setting("data_parallel_size", default=1))
    return Setup(settings, num_ranks, () if is_eager else tuple(sizes), tuple(assumptions))


def _integer(run: RealRun, name: str) -> int:
    value = run.setting(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"meta.json, engine_kwargs.{name}: must be an integer >= 1: {value!r}")
    return value


def _estimated_blocks(
    run: RealRun,
    profile: LayerProfile,
    model: ModelShape,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    memory = (run.meta.get("hardware") or {}).get("device_total_memory_bytes") or CARD_BYTES.get(profile.card)
    if memory is None:
        msg = f"the memory of {profile.card!r} is not known, nor the blocks of the KV cache; give --num-blocks"
        raise ConfigError(msg)
    # vLLM's default share was 0.90 until it became 0.92 (seen in runs of 0.19 and 0.28).
    minor = re.match(r"0\.(\d+)", str(run.meta.get("vllm_version", "")))
    is_old = minor is not None and int(minor[1]) < 20
    share = float(run.setting("gpu_memory_utilization", default=0.9 if is_old else 0.92))
    return kv_blocks(
        model, float(memory), gpu_memory_utilization=share, block_size=block_size, activation_bytes=1.2 * GIB
    )


def find_model(
    name: str, *, config: Path | None = None, tensor_parallel: int = 1, expert_parallel: int = 1
) -> ModelShape:
    """
    The model of a run, on one rank.

    Args:
        name: As the profile has it: the catalogue's name is its last part, or the beginning of that.
        config: The model's `config.json`, for one that is not in the catalogue.
        tensor_parallel: Ranks that share a layer.
        expert_parallel: Ranks that share the experts.

    Raises:
        ConfigError: The model is not known.
    """
    source: Any = config
    if source is None:
        last = name.rstrip("/").rsplit("/", 1)[-1].lower()
        known = [key for key in catalogue("models") if last == key or last.startswith(f"{key}-")]
        if not known:
            msg = f"the model {name!r} must be one of {', '.join(catalogue('models'))}; give --model-config"
            raise ConfigError(msg)
        source = entry("models", max(known, key=len))["config"]
    return ModelShape.from_config(
        source, name=name, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel
    )


def compare(
    run: RealRun,
    setup: Setup,
    timer: ProfileTimer,
    make_scheduler: Callable[[SchedulerSettings], Scheduler],
    *,
    token_budget: int | None = None,
) -> Comparison:
    """
    Simulate a run.

    Args:
        run: The run.
        setup: From `set_up`.
        timer: Says how long steps take.
        make_scheduler: `VllmScheduler`, or another of its protocol.
        token_budget: A negative control: another `max_num_batched_tokens` than the run's.
    """
    settings = setup.settings
    if token_budget is not None:
        settings = attrs.evolve(settings, max_num_batched_tokens=token_budget)
    requests = [
        SimulatedRequest(i, r.arrival_seconds, r.prompt_tokens, r.output_tokens, r.blocks)
        for i, r in enumerate(run.requests)
    ]
    full = tuple(size for size in setup.capture_sizes if size <= settings.max_num_seqs)
    dispatcher = Dispatcher(CapturePlan(full, setup.capture_sizes), max_num_seqs=settings.max_num_seqs)
    ranks = range(setup.num_ranks)
    schedulers = [make_scheduler(settings) for _ in ranks]
    simulation = simulate(requests, schedulers, [dispatcher for _ in ranks], timer)
    return _comparison(run, simulation)


def _comparison(run: RealRun, simulation: Simulation) -> Comparison:
    requests = run.requests
    tokens = np.array([r.output_tokens for r in requests])
    queued = np.array([r.queued_seconds for r in requests])
    arrived = np.array([r.arrival_seconds for r in requests])
    real = Times.of(
        queued,
        np.array([r.first_token_seconds for r in requests]),
        np.array([r.last_token_seconds for r in requests]),
        tokens,
    )
    first, last = (np.array([seconds[i] for seconds in simulation.token_seconds]) for i in (0, -1))
    counts = np.array([len(seconds) for seconds in simulation.token_seconds])
    simulated = Times.of(simulation.admitted_seconds, first, last, counts)
    return Comparison(
        real,
        simulated,
        len(simulation.steps),
        simulation.num_preemptions,
        float((queued - arrived).mean()),
        float((simulation.admitted_seconds - arrived).mean()),
    )


@attrs.frozen
class Fidelity:
    """
    How far a run and its simulation are apart.

    Args:
        setup: How it was simulated.
        model: Name of the model.
        card: Name of the card.
        comparisons: By name: "simulated" on one card, else one for each of `LINKS`.
        controls: The negative controls, by name; of a run on one card.
    """

    setup: Setup
    model: str
    card: str
    comparisons: Mapping[str, Comparison]
    controls: Mapping[str, Comparison]

    @property
    def is_judged(self) -> bool:
        """
        Whether the gate applies: it needs a single card.
        """
        return "simulated" in self.comparisons

    @property
    def failures(self) -> list[str]:
        """
        What is wrong: errors outside the gate, controls inside.
        """
        if not self.is_judged:
            return []
        failures = [f"{name} is outside the gate" for name in self.comparisons["simulated"].outside()]
        return failures + [f"{name} is inside the gate" for name, c in self.controls.items() if not c.outside()]


def run_fidelity(
    profile_directory: Path,
    run_directory: Path,
    *,
    make_scheduler: Callable[[SchedulerSettings], Scheduler],
    model_config: Path | None = None,
    num_blocks: int | None = None,
) -> Fidelity:
    """
    Simulate a run, and the negative controls.

    Args:
        profile_directory: Of the card's profile.
        run_directory: Of the run.
        make_scheduler: `VllmScheduler`, or another of its protocol.
        model_config: The model's `config.json`, for one that is not in the catalogue.
        num_blocks: Blocks of the KV cache, if they are known better than from the run.

    Raises:
        ConfigError: A description or table is missing or broken, or the model is not known.
        TraceError: A row of the run is broken.
    """
    run = read_run(run_directory)
    tensor_parallel = int(run.setting("tensor_parallel_size", default=1))
    data_parallel = int(run.setting("data_parallel_size", default=1))
    is_expert_parallel = bool(run.setting("enable_expert_parallel", default=False))
    expert_parallel = tensor_parallel * data_parallel if is_expert_parallel else 1
    profile = read_profile(profile_directory, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)
    model = find_model(
        profile.model or str(run.meta.get("model", "")),
        config=model_config,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
    )
    setup = set_up(run, profile, model, num_blocks=num_blocks)
    timer = ProfileTimer(profile, model, expert_ranks=max(expert_parallel, 1))
    if tensor_parallel * data_parallel > 1:
        comparisons = {
            name: compare(run, setup, attrs.evolve(timer, link=link), make_scheduler)
            for name, link in LINKS.items()
        }
        return Fidelity(setup, model.name, profile.card, comparisons, {})
    controls = {}
    for name, changes in CONTROLS.items():
        of_timer = {key: value for key, value in changes.items() if key != "token_budget"}
        controls[name] = compare(
            run,
            setup,
            attrs.evolve(timer, **of_timer),
            make_scheduler,
            token_budget=changes.get("token_budget"),
        )
    comparisons = {"simulated": compare(run, setup, timer, make_scheduler)}
    return Fidelity(setup, model.name, profile.card, comparisons, controls)


def figures(fidelity: Fidelity) -> dict[str, Any]:
    """
    All there is to say, as JSON values; times in milliseconds.
    """

    def of(comparison: Comparison) -> dict[str, Any]:
        return {
            "errors": comparison.errors(),
            "milliseconds": {
                name: {"real": 1e3 * real, "simulated": 1e3 * simulated}
                for name, (real, simulated) in comparison.means().items()
            },
            "wait_milliseconds": {
                "real": 1e3 * comparison.real_wait_seconds,
                "simulated": 1e3 * comparison.simulated_wait_seconds,
            },
            "num_steps": comparison.num_steps,
            "num_preemptions": comparison.num_preemptions,
        }

    return {
        "model": fidelity.model,
        "card": fidelity.card,
        "settings": attrs.asdict(fidelity.setup.settings),
        "ranks": fidelity.setup.num_ranks,
        "assumptions": list(fidelity.setup.assumptions),
        "gate": GATE if fidelity.is_judged else None,
        "comparisons": {name: of(c) for name, c in fidelity.comparisons.items()},
        "controls": {name: of(c) for name, c in fidelity.controls.items()},
        "failures": fidelity.failures,
    }


def describe(fidelity: Fidelity) -> str:
    """
    The figures for people.
    """
    lines = [f"{fidelity.model} on {fidelity.card}", *(f"assumed: {a}" for a in fidelity.setup.assumptions), ""]
    for name, comparison in fidelity.comparisons.items():
        lines.append(f"{name:<40} {'real':>10} {'simulated':>10} {'error':>8} {'gate':>6}")
        means = comparison.means()
        for quantity, error in comparison.errors().items():
            real, simulated = (f"{1e3 * v:.2f} ms" for v in means[quantity]) if quantity in means else ("", "")
            gate = f"{100 * GATE[quantity]:.0f} %" if fidelity.is_judged else "-"
            lines.append(f"  {quantity:<38} {real:>10} {simulated:>10} {100 * error:>+7.1f}% {gate:>6}")
        waits = 1e3 * comparison.real_wait_seconds, 1e3 * comparison.simulated_wait_seconds
        lines.append(f"  {'mean wait before the engine core':<38} {waits[0]:>7.2f} ms {waits[1]:>7.2f} ms")
        lines += [f"  {comparison.num_steps} simulated steps, {comparison.num_preemptions} preemptions", ""]
    if fidelity.controls:
        lines.append("negative controls, which must fall outside:")
    for name, comparison in fidelity.controls.items():
        outside = comparison.outside()
        verdict = f"outside: {', '.join(outside)}" if outside else "INSIDE"
        errors = " / ".join(f"{100 * e:+.1f}" for e in comparison.errors().values())
        lines.append(f"  {name:<44} {errors} %  {verdict}")
    lines += [
        "",
        *(fidelity.failures or (["inside the gate"] if fidelity.is_judged else ["several cards: not judged"])),
    ]
    return "\n".join(lines)
