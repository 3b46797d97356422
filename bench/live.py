"""
Policies compared on a real engine: real servers, requests arriving in real time, vLLM's own client and metrics.

Every contender has a server of its own. All are up from the beginning to the end, and one at a time is driven:
starting one takes longer than many a run, and an idle one waits for messages (1 % of a core, as measured) and only
keeps its memory. Before the first run a server is warmed up with a few requests. Before each run the prefix cache
is emptied, and one request that shares nothing with the trace is served and not measured: the machine has just
worked for another server, and the first request after such a change takes longer.

Client and server share the machine. Where it has too few cores the client is late, and so are the times it notes:
each run says how late requests were sent.

The arrivals are the trace's, whatever the server does (open loop). Below its limit, throughput is therefore what
arrives; latencies are what differs.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from aclgraph_dispatch.errors import ConfigError

from .case import Case, load_trace
from .client import Client, client
from .demo import LONGEST_OUTPUT, LONGEST_PROMPT, OUTPUT_SCALE, PROMPT_SCALE
from .engine import EngineFailedError, environment, exit_on_signals
from .live_case import (
    SERVABLE,
    STOCK_COMPILED,
    STOCKS,
    LiveCase,
    checkpoint,
    description,
    dispatch_config,
    is_emulated,
    own_arguments,
    server_options,
)
from .paired import PERCENTILES, PairedRun, differing, medians, orders, ratios, read_run
from .server import Server, serving
from .timed_trace import BLOCK_TOKENS, scaled_lengths, timed_requests

NUM_WARM_UP_REQUESTS = 8

_LENGTHS = {
    "prompt_scale": PROMPT_SCALE,
    "longest_prompt": LONGEST_PROMPT,
    "output_scale": OUTPUT_SCALE,
    "longest_output": LONGEST_OUTPUT,
}
_SETTINGS = (
    "rate",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_bytes",
    "worker_cls",
    "arguments",
    "rounds",
)


def run_live(
    case: LiveCase,
    names: Sequence[str],
    *,
    keep: Path | None = None,
    on_done: Callable[[str], None] = lambda _name: None,
    command: str = "",
) -> dict[str, Any]:
    """
    Run the contenders on this machine; the first one is what the others are compared with.

    Args:
        case: What is run.
        names: Of `SERVABLE`.
        keep: An empty or a new folder, for logs, requests and vLLM's result files; by default a temporary one.
        on_done: Told each contender that has done a run.
        command: What makes this document, for its readers.

    Raises:
        ConfigError: The case or a contender is not possible.
        TraceError: The trace cannot be read.
        EngineFailedError: A server, or a request, failed, or a server is not what it was told to be.
    """
    wrong = sorted(set(names) - set(SERVABLE)) or [name for name in names if names.count(name) > 1]
    if wrong or not names:
        raise ConfigError(f"'policies' must be among {', '.join(SERVABLE)}, each once: {', '.join(wrong)!r}")
    model = checkpoint(case.model)
    trace = load_trace(
        Case(trace=case.trace, model=case.model, device="", rate=case.rate, limit=case.limit, seed=case.seed)
    )
    taken = scaled_lengths(trace.requests) if case.is_scaled else trace.requests
    requests = timed_requests(taken, max_model_len=case.max_model_len)
    warm_up = [{**request, "timestamp": 0} for request in requests[:NUM_WARM_UP_REQUESTS]]

    runs: dict[str, list[PairedRun]] = {name: [] for name in names}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    told = {name: {} if name in STOCKS else dispatch_config(case, name, model) for name in names}
    in_order = orders(names, case.rounds)
    variables = environment(emulate=False) | {"PYTHONHASHSEED": str(case.seed)}
    with exit_on_signals(), _folder(keep) as directory, client(directory, variables) as driver:
        device_type = driver.device_type()
        options = [server_options(case, name, model, device_type) for name in names]
        with serving(options, directory, port=case.port) as servers:
            by_name = {server.name: server for server in servers}
            for server in servers:
                _report(server, told[server.name])  # another one need not be measured
                _run(case, model, driver, server, directory / f"{server.name}.warm-up.json", warm_up)
            vllm_version = servers[0].ask("/version")["version"]
            for number, order in enumerate(in_order):
                for name in order:
                    server = by_name[name]
                    _make_ready(server, model, requests[0])
                    before = _report(server, told[name])
                    path = directory / f"{name}.{number}.json"
                    runs[name].append(_run(case, model, driver, server, path, requests))
                    reports[name].append(_since(before, _report(server, told[name])))
                    on_done(name)

    reference = runs[names[0]]
    compared = [name for name in names if name != STOCK_COMPILED]
    texts = runs[compared[0]] if compared else []
    return {
        "command": command,
        "trace": {
            "name": trace.name,
            "sha256": trace.sha256,
            "num_requests": len(requests),
            "num_left_out": trace.num_left_out,
            "num_too_long": len(taken) - len(requests),
            "seconds": requests[-1]["timestamp"],
            "mean_prompt_tokens": float(np.mean([r["input_length"] for r in requests])),
            "mean_output_tokens": float(np.mean([r["output_length"] for r in requests])),
        },
        "lengths": _LENGTHS if case.is_scaled else {},
        "model": {"name": case.model},
        "device": {"type": device_type, "is_emulated": is_emulated(device_type)},
        "settings": {name: getattr(case, name) for name in _SETTINGS},
        "slo": {"ttft_ms": case.slo_ttft_ms, "tpot_ms": case.slo_tpot_ms},
        "seed": case.seed,
        "versions": {"aclgraph-dispatch": version("aclgraph-dispatch"), "vllm": vllm_version},
        "orders": in_order,
        # The contender whose texts the others' must be: the first that is not compiled.
        "text_reference": compared[0] if compared else None,
        # Of that one against itself: where it gives different texts, others may as well.
        "unstable": differing(texts, texts[:1] * case.rounds) if compared else [],
        "contenders": [
            {
                "name": name,
                "description": description(name, device_type),
                "arguments": own_arguments(case, name, model, device_type),
                "metrics": medians(runs[name]),
                "ratios": ratios(runs[name], reference),
                "differing": differing(runs[name], texts) if name in compared else None,
                "runs": [{**run.metrics, "lateness_ms": run.lateness_ms} for run in runs[name]],
                "report": _total(reports[name]),
            }
            for name in names
        ],
    }


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        is_empty = not any(keep.iterdir())
    except OSError as exc:
        raise ConfigError(f"'keep' must be an empty folder or a new one: {keep}: {exc.strerror}") from None
    if not is_empty:
        raise ConfigError(f"'keep' must be an empty folder or a new one: {keep} has files; name another")
    yield keep


def _make_ready(server: Server, model: Path, first: Mapping[str, Any]) -> None:
    """
    Empty the prefix cache, and serve a request as long as the first one of the run, but with one decode only.
    """
    if not server.ask("/reset_prefix_cache", {})["success"]:
        raise EngineFailedError(f"the server {server.name!r} still holds blocks of requests that are done")
    # One token over and over: no prompt of a trace, whose tokens are drawn by lot, begins with a block of it.
    prompt, num_output_tokens = [1] * first["input_length"], min(first["output_length"], 2)
    body = {"model": str(model), "prompt": prompt, "max_tokens": num_output_tokens, "ignore_eos": True}
    server.ask("/v1/completions", body | {"temperature": 0})


def _run(
    case: LiveCase,
    model: Path,
    driver: Client,
    server: Server,
    path: Path,
    requests: Sequence[Mapping[str, Any]],
) -> PairedRun:
    """
    One run; vLLM's result file takes its place once it is whole.
    """
    trace = path.with_suffix(".jsonl")
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    unfinished = path.with_name(f".{path.name}")
    arguments = {
        "backend": "openai",
        "base-url": server.url,
        "endpoint": "/v1/completions",
        "model": model,
        "dataset-name": "timed_trace",
        "dataset-path": trace,
        "num-prompts": len(requests),
        "timed-trace-chunk-hash-size": BLOCK_TOKENS,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "seed": case.seed,
        "result-dir": path.parent,
        "result-filename": unfinished.name,
    }
    driver.run(
        [
            *(word for name, value in arguments.items() for word in (f"--{name}", str(value))),
            *("--goodput", f"ttft:{case.slo_ttft_ms}", f"tpot:{case.slo_tpot_ms}"),
            *("--save-result", "--save-detailed", "--disable-tqdm"),
        ],
        server.check,
    )
    try:
        run = read_run(unfinished, requests)
    except EngineFailedError as exc:
        server.check()  # that it ended says more
        raise EngineFailedError(f"the run of {server.name!r} failed: {exc}") from exc
    unfinished.replace(path)
    return run


def _report(server: Server, told: Mapping[str, Any]) -> dict[str, Any]:
    """
    The first worker's own account, which must agree with what the server was told; vLLM's has none.
    """
    if not told:
        return {}
    report: dict[str, Any] = server.ask("/collective_rpc", {"method": "dispatch_report"})["results"][0]
    for name, value in told.items():
        if report.get(name) != value:
            raise EngineFailedError(
                f"the server {server.name!r} must run {name} {value}, and reports {report.get(name)}: something "
                "else configures it, perhaps an argument after '--' or a variable of the environment"
            )
    return report


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """
    A report, its routes without those taken before.
    """
    if not after:
        return {}
    earlier = {(route["mode"], route["reason"]): route for route in before["routes"]}
    routes = []
    for route in after["routes"]:
        known = earlier.get((route["mode"], route["reason"]), {})
        counts = {name: route[name] - known.get(name, 0) for name in ("steps", "tokens", "paddings")}
        if counts["steps"]:
            routes.append({**route, **counts})
    # The last decisions one by one are too many.
    return {**{name: value for name, value in after.items() if name != "decisions"}, "routes": routes}


def _total(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    The reports of all rounds as one, their routes added up.
    """
    routes: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for route in report.get("routes", ()):
            key = route["mode"], route["reason"]
            known = routes.get(key)
            counts = {n: route[n] + known[n] if known else route[n] for n in ("steps", "tokens", "paddings")}
            routes[key] = {**route, **counts}
    return {**reports[-1], "routes": list(routes.values())} if reports[-1] else {}
