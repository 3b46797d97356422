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
mistake that is easy to make, show what it can tell apart on the run: one that falls inside, such as a lower token
budget in a run that never fills its own, is told, and is no failure of the simulation.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from aclgraph_dispatch.dispatcher import Dispatcher

from .layer_profile import ProfileTimer, read_profile
from .real_run import RealRun, read_run
from .run_setup import Parallelism, Setup, check_followed, find_model, set_up
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
"""Mistakes that the gate finds in a run that has something for them to bite on."""


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
        Real and simulated means, in seconds, by the name they have in `GATE`; NaN where no request has the figure.
        """
        real, simulated = self.real, self.simulated
        return {
            "mean TPOT": (_of_any(np.mean, real.tpot), _of_any(np.mean, simulated.tpot)),
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
        # Stamps may be coarse: a time of nothing cannot be met.
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = {name: float(np.divide(new, old) - 1) for name, (old, new) in self.means().items()}
            per_request = np.abs(self.simulated.tpot / self.real.tpot - 1)
        return errors | {"median |error| of a request's TPOT": _of_any(np.median, per_request)}

    def outside(self) -> list[str]:
        """
        What the gate does not let pass; what no request has passes.
        """
        return [name for name, error in self.errors().items() if abs(error) > GATE[name]]


def _of_any(statistic: Callable[[npt.NDArray[np.float64]], Any], values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(statistic(known)) if known.size else math.nan


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
    dispatcher = Dispatcher(setup.capture_plan, max_num_seqs=settings.max_num_seqs)
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
        What is wrong: errors of the simulation outside the gate.
        """
        if not self.is_judged:
            return []
        return [f"{name} is outside the gate" for name in self.comparisons["simulated"].outside()]


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
    parallelism = Parallelism.of(run)
    profile = read_profile(
        profile_directory, tensor_parallel=parallelism.tensor, expert_parallel=parallelism.expert
    )
    check_followed(run, profile)
    model = find_model(
        profile.model or str(run.meta.get("model") or ""),
        config=model_config,
        tensor_parallel=parallelism.tensor,
        expert_parallel=parallelism.expert,
    )
    setup = set_up(run, profile, model, num_blocks=num_blocks)
    timer = ProfileTimer(profile, model, expert_ranks=parallelism.expert)
    if parallelism.num_cards > 1:
        comparisons = {
            name: compare(run, setup, attrs.evolve(timer, link=link), make_scheduler)
            for name, link in LINKS.items()
        }
        return Fidelity(setup, model.name, profile.card, comparisons, {})
    comparisons = {"simulated": compare(run, setup, timer, make_scheduler)}
    controls = {}
    for name, changes in CONTROLS.items():
        of_timer = {key: value for key, value in changes.items() if key != "token_budget"}
        budget = changes.get("token_budget")
        # An engine's budget holds a token of every request.
        if budget is None or budget >= setup.settings.max_num_seqs:
            evolved = attrs.evolve(timer, **of_timer)
            controls[name] = compare(run, setup, evolved, make_scheduler, token_budget=budget)
    return Fidelity(setup, model.name, profile.card, comparisons, controls)


def figures(fidelity: Fidelity) -> dict[str, Any]:
    """
    All there is to say, as JSON values; times in milliseconds, None for what no request has.
    """

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def of(comparison: Comparison) -> dict[str, Any]:
        return {
            "errors": {name: finite(error) for name, error in comparison.errors().items()},
            "milliseconds": {
                name: {"real": finite(1e3 * real), "simulated": finite(1e3 * simulated)}
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
        "controls": {name: {**of(c), "inside": not c.outside()} for name, c in fidelity.controls.items()},
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
            if math.isnan(error):
                lines.append(f"  {quantity:<38} no request has a second token")
                continue
            gate = f"{100 * GATE[quantity]:.0f} %" if fidelity.is_judged else "-"
            lines.append(f"  {quantity:<38} {real:>10} {simulated:>10} {100 * error:>+7.1f}% {gate:>6}")
        waits = 1e3 * comparison.real_wait_seconds, 1e3 * comparison.simulated_wait_seconds
        lines.append(f"  {'mean wait before the engine core':<38} {waits[0]:>7.2f} ms {waits[1]:>7.2f} ms")
        lines += [f"  {comparison.num_steps} simulated steps, {comparison.num_preemptions} preemptions", ""]
    if fidelity.controls:
        lines.append("negative controls:")
    for name, comparison in fidelity.controls.items():
        outside = comparison.outside()
        verdict = f"outside: {', '.join(outside)}" if outside else "inside: this run cannot tell it apart"
        errors = " / ".join("-" if math.isnan(e) else f"{100 * e:+.1f}" for e in comparison.errors().values())
        lines.append(f"  {name:<44} {errors} %  {verdict}")
    lines += [
        "",
        *(fidelity.failures or (["inside the gate"] if fidelity.is_judged else ["several cards: not judged"])),
    ]
    return "\n".join(lines)
