"""The commands `aclgraph-dispatch bench ...`."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.errors import ConfigError

from .case import Case
from .compare import compare, simulate_case
from .contenders import CONTENDERS
from .files import check_writable, whole_file
from .sweep import grid, sweep
from .synthetic import PRESETS
from .table import markdown as to_markdown
from .table import stem, table

_PATH = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


def _listed(
    convert: Callable[[str], Any] = str,
) -> Callable[[click.Context, click.Parameter, str], tuple[Any, ...]]:
    """
    The callback of an option that takes values with commas between them.
    """

    def values(ctx: click.Context, param: click.Parameter, text: str) -> tuple[Any, ...]:
        try:
            return tuple(convert(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"must be numbers with commas between them: {text!r}", ctx, param) from None

    return values


_POSITIVE = click.IntRange(min=1)
_SHARED_OPTIONS = (
    click.option("--policies", callback=_listed(), default="all", show_default=True, help=", ".join(CONTENDERS)),
    click.option(
        "--start", "start_seconds", type=click.FloatRange(min=0), default=0.0, help="Of the trace, in s."
    ),
    click.option("--end", "end_seconds", type=click.FloatRange(min=0), help="Of the trace, in s."),
    click.option("--limit", type=_POSITIVE, help="The most requests."),
    click.option("--max-num-seqs", type=_POSITIVE, default=256, show_default=True),
    click.option("--max-num-batched-tokens", type=_POSITIVE, default=2048, show_default=True),
    click.option("--max-model-len", type=click.IntRange(min=2), default=32768, show_default=True),
    click.option("--num-blocks", type=click.IntRange(min=2), help="Of the KV cache; default: what fits."),
    click.option("--prefix-caching/--no-prefix-caching", "enable_prefix_caching", default=True),
    click.option("--async/--sync", "async_scheduling", default=True, show_default=True, help="Scheduling."),
    click.option("--spec-tokens", "num_spec_tokens", type=click.IntRange(0, 16), default=0, show_default=True),
    click.option("--acceptance", "acceptance_rate", type=click.FloatRange(0, 1), default=0.7, show_default=True),
    click.option(
        "--tensor-parallel", type=_POSITIVE, help="Ranks that share a layer; default: the catalogue's, or 1."
    ),
    click.option("--weight-bytes", type=click.FloatRange(0.25, 4), help="Default: what the model says."),
    click.option("--ranks", type=click.IntRange(1, 64), default=1, show_default=True, help="Data-parallel ranks."),
    click.option("--slo-ttft-ms", type=click.FloatRange(min=0), default=2000.0, show_default=True),
    click.option("--slo-tpot-ms", type=click.FloatRange(min=0), default=100.0, show_default=True),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    click.option("--fast", "is_fast", is_flag=True, help="A compact scheduler, the same steps."),
    click.option("--jobs", type=_POSITIVE, default=1, show_default=True, help="Processes."),
)


def _shared(command: Any) -> Any:
    for option in reversed(_SHARED_OPTIONS):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """
    Compare routing policies on traces; check the simulator against real runs.
    """


@bench.command("compare")
@click.option("--trace", required=True, help=f"A file, or a preset: {', '.join(PRESETS)}.")
@click.option("--model", required=True, help=f"{', '.join(catalogue('models'))}, gqa, mla, or a config.json.")
@click.option("--device", required=True, help=f"{', '.join(catalogue('devices'))}, or a calibration's file.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="How many times as fast requests arrive.")
@_shared
@click.option("--html", type=_PATH, help="Write a page with plots.")
@click.option("--json", "json_path", type=_PATH, help="Write all figures.")
@click.option("--timeline", type=_PATH, help="Write a Chrome trace; Perfetto opens it.")
@click.option(
    "--timeline-of", type=click.Choice(list(CONTENDERS)), help="The policy of the trace; default: the first."
)
def compare_command(
    policies: Sequence[str],
    jobs: int,
    html: Path | None,
    json_path: Path | None,
    timeline: Path | None,
    timeline_of: str | None,
    **fields: Any,
) -> None:
    """
    Simulate policies on the same requests and compare them.

    The last line is a JSON object with all figures but those of the plots.
    """
    case = _case(fields)
    names = _names(policies)
    _check_outputs(html, json_path, timeline)
    with _Progress(len(names)) as done:
        document = compare(case, names, jobs=jobs, on_done=lambda _name: done(1), command=_command())
    if html is not None:
        from .report import write_report

        write_report(document, html)
    if json_path is not None:
        with whole_file(json_path) as file:
            json.dump(document, file, allow_nan=False)
    if timeline is not None:
        _write_timeline(case, timeline_of or names[0], timeline)
    click.echo(table(document))
    click.echo(json.dumps(without_series(document), allow_nan=False))


@bench.command("sweep")
@click.option("--traces", callback=_listed(), required=True, help=f"Files, or presets: {', '.join(PRESETS)}.")
@click.option("--models", callback=_listed(), required=True, help=f"{', '.join(catalogue('models'))}, or files.")
@click.option("--devices", callback=_listed(), required=True, help=f"{', '.join(catalogue('devices'))}, or files.")
@click.option("--rates", callback=_listed(float), default="1", show_default=True)
@_shared
@click.option("--out", type=_PATH, required=True, help="Folder that keeps results.")
@click.option("--markdown", type=_PATH, help="Write tables of mean TPOT and TTFT.")
@click.option("--html", "with_pages", is_flag=True, help="Write a page for each comparison into it.")
def sweep_command(
    traces: Sequence[str],
    models: Sequence[str],
    devices: Sequence[str],
    rates: Sequence[float],
    policies: Sequence[str],
    jobs: int,
    out: Path,
    with_pages: bool,
    markdown: Path | None,
    **fields: Any,
) -> None:
    """
    Compare over a grid of traces, models, devices and rates; stopped, it goes on where it was.

    The last line is a JSON list of all comparisons but the figures of the plots.
    """
    axes = {"trace": traces, "model": models, "device": devices, "rate": rates}
    first = _case(fields | {axis: _first(axis, values) for axis, values in axes.items()})
    names = _names(policies)
    cases = grid(first, axes)
    _check_outputs(markdown)
    with _Progress(len(cases) * len(names)) as done:
        documents = sweep(cases, names, out, jobs=jobs, on_done=done, command=_command())
    if with_pages:
        from .report import write_report

        for number, document in enumerate(documents):
            title = "-".join((stem(document["trace"]["name"]), document["model"]["name"]))
            write_report(document, out / f"{number:03}-{title}.html")
    if markdown is not None:
        with whole_file(markdown) as file:
            file.write(to_markdown(documents))
    for document in documents:
        click.echo(table(document) + "\n")
    click.echo(json.dumps([without_series(document) for document in documents], allow_nan=False))


@bench.command()
@click.option("--profile", type=_FOLDER, required=True, help="Folder of a card's layer profile.")
@click.option("--run", type=_FOLDER, required=True, help="Folder of a real run on that card.")
@click.option("--model-config", type=_PATH, help="The model's config.json, if it is not in the catalogue.")
@click.option("--num-blocks", type=click.IntRange(min=2), help="Blocks of the KV cache, if known.")
@click.option("--fast", is_flag=True, help="The compact scheduler instead of vLLM's.")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the last line.")
def fidelity(
    profile: Path, run: Path, model_config: Path | None, num_blocks: int | None, fast: bool, as_json: bool
) -> None:
    """
    Replay a real vLLM run on its scheduler and compare the times.

    The last line is JSON. The exit code is 1 if an error is outside the gate.
    """
    from .fidelity import describe, figures, run_fidelity

    if fast:
        from .compact_scheduler import CompactScheduler as Scheduler
    else:
        _need_vllm()
        from .vllm_scheduler import VllmScheduler as Scheduler  # type: ignore[assignment]

    result = run_fidelity(profile, run, make_scheduler=Scheduler, model_config=model_config, num_blocks=num_blocks)
    if not as_json:
        click.echo(describe(result))
    click.echo(json.dumps(figures(result)))
    if result.failures:
        raise SystemExit(1)


def without_series(document: Mapping[str, Any]) -> dict[str, Any]:
    """
    A comparison without the figures of the plots.
    """
    contenders = [{k: v for k, v in c.items() if k != "series"} for c in document["contenders"]]
    return {**document, "contenders": contenders}


def _case(fields: Mapping[str, Any]) -> Case:
    if not fields["is_fast"]:
        _need_vllm()
    try:
        return Case(**fields)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None


def _names(policies: Sequence[str]) -> list[str]:
    return list(CONTENDERS) if list(policies) == ["all"] else list(policies)


def _first(axis: str, values: Sequence[Any]) -> Any:
    if not values:
        raise ConfigError(f"'--{axis}s' must name at least one {axis}")
    return values[0]


def _check_outputs(*paths: Path | None) -> None:
    # Before minutes of work, not after.
    for path in paths:
        if path is not None:
            check_writable(path)


def _need_vllm() -> None:
    if find_spec("vllm") is None:
        raise ConfigError("vLLM's scheduler needs vLLM, which is not installed; --fast does without")
    # Of warnings about a model that is never built.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _command() -> str:
    return " ".join(["aclgraph-dispatch", *sys.argv[1:]])


class _Progress:
    """
    A bar on stderr, where that is a terminal.
    """

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="run", disable=None)

    def __enter__(self) -> Callable[[int], Any]:
        return self._bar.update

    def __exit__(self, *_exc: object) -> None:
        self._bar.close()


def _write_timeline(case: Case, name: str, path: Path) -> None:
    from .timeline import TimelineStep, write_timeline

    simulation = simulate_case(case, name)
    steps = [
        TimelineStep(
            index=index,
            start_seconds=step.start_seconds,
            mode=step.part.mode.name,
            reason=step.part.reason.value,
            num_reqs=step.num_reqs,
            num_tokens=step.part.num_tokens,
            num_padded_tokens=step.part.num_padded_tokens,
            prepare_seconds=step.time.prepare_seconds,
            host_seconds=step.time.host_seconds,
            update_seconds=step.time.update_seconds,
            device_seconds=step.time.device_seconds,
            sync_seconds=step.time.sync_seconds,
            sample_seconds=step.time.sample_seconds,
        )
        for index, step in enumerate(simulation.steps)
        if step.rank == 0
    ]
    write_timeline(steps, path, name=name)


@bench.command()
@click.option("--trace", required=True, help=f"A file, or a preset: {', '.join(PRESETS)}.")
@click.option("--model", required=True, help="gqa, mla, or a checkpoint's directory.")
@click.option(
    "--policies",
    callback=_listed(),
    default="stock,full_and_piecewise",
    show_default=True,
    help="stock (vLLM without us, on a CPU eager), stock_compiled (as it comes on a CPU; texts are not compared), "
    "or as in `compare`; the first is what the others are compared with.",
)
@click.option("--rounds", type=_POSITIVE, default=4, show_default=True, help="How often each serves the requests.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="How many times as fast requests arrive.")
@click.option("--limit", type=_POSITIVE, help="The most requests.")
@click.option(
    "--scale-lengths/--no-scale-lengths",
    "is_scaled",
    default=None,
    help="Divide the lengths for a model of a few layers; default: for gqa and mla.",
)
@click.option("--max-num-seqs", type=_POSITIVE, default=16, show_default=True)
@click.option("--max-num-batched-tokens", type=_POSITIVE, default=512, show_default=True)
@click.option("--max-model-len", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--kv-cache-bytes", type=_POSITIVE, default=1 << 28, show_default=True, help="Of each server.")
@click.option("--worker-cls", help="Our worker's class; default: the one for this machine's device.")
@click.option("--port", type=click.IntRange(1, 65535), help="Of the first server; default: any that are free.")
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0), default=2000.0, show_default=True)
@click.option("--slo-tpot-ms", type=click.FloatRange(min=0), default=100.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, show_default=True)
@click.option("--json", "json_path", type=_PATH, help="Write all figures.")
@click.option("--keep", type=_PATH, help="A new folder for vLLM's result files and the servers' logs.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def live(
    policies: Sequence[str], is_scaled: bool | None, json_path: Path | None, keep: Path | None, **fields: Any
) -> None:
    """
    Serve policies with real vLLM on this machine and compare them: paired runs, requests in real time.

    ARGUMENTS, after `--`, are passed on to all servers; none that this command sets itself. The last line is a
    JSON object with all figures. The exit code is 1 if a policy generates other texts than the first, or if none
    of them could be compared.
    """
    if find_spec("vllm") is None:
        raise ConfigError("live runs need vLLM, which is not installed; in a checkout, `make demo` installs it")
    from .checkpoints import MODELS
    from .live import run_live
    from .live_case import LiveCase
    from .live_table import live_table, nothing_compared, wrong_texts

    _check_outputs(json_path)
    try:
        case = LiveCase(is_scaled=fields["model"] in MODELS if is_scaled is None else is_scaled, **fields)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    with _Progress(len(policies) * case.rounds) as done:
        document = run_live(case, policies, keep=keep, on_done=lambda _name: done(1), command=_command())
    click.echo(live_table(document))
    click.echo(json.dumps(document, allow_nan=False))
    if json_path is not None:
        with whole_file(json_path) as file:
            json.dump(document, file, allow_nan=False)
    if wrong_texts(document) or nothing_compared(document):
        raise SystemExit(1)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the last line.")
def anchors(as_json: bool) -> None:
    """
    Compare the cost model with published numbers.

    The last line is JSON. It is a report: the exit code is 0 whatever it says.
    """
    from .anchors import describe, figures, results
    from .published import ANCHORS

    found = results(ANCHORS)
    if not as_json:
        click.echo(describe(found))
    click.echo(json.dumps(figures(found), allow_nan=False))
