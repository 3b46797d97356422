"""
Runs one real engine over a list of requests, in a process of its own.

Which platform vLLM uses is settled once per process, by the environment; a comparison of an engine with and
without our dispatcher is therefore a comparison of two processes. Requests arrive at given *steps*, not at
given times, so that both engines see the same batches however fast they are.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.errors import DispatchError

WORKER_CLS = "aclgraph_dispatch.integrations.cpu.DispatchWorker"
KV_CACHE_BYTES = 1 << 28
"""Room enough for the tiny models; by default vLLM takes most of the machine's memory."""

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_RUN_SPEC = "from aclgraph_dispatch.bench.engine import run_spec; run_spec(*sys.argv[1:])"


@attrs.frozen
class EngineRequest:
    """
    A request to an engine.

    Args:
        request_id: Unique name.
        prompt: Token ids, or text for the model's tokenizer.
        num_output_tokens: Tokens to generate, no fewer unless `sampling` allows it.
        arrival_step: The engine step before which it is added.
        abort_step: The engine step before which it is given up, if ever.
        sampling: More keyword arguments of `vllm.SamplingParams`, JSON values only; by default greedy and without
            an end. `structured_outputs` holds those of `StructuredOutputsParams`.
        lora: Directory of the LoRA adapter that it wants, if any.
    """

    request_id: str
    prompt: list[int] | str
    num_output_tokens: int
    arrival_step: int = 0
    abort_step: int | None = None
    sampling: dict[str, Any] = attrs.field(factory=dict)
    lora: str | None = None


@attrs.frozen
class EngineRun:
    """
    What came out of an engine.

    Args:
        tokens: Generated token ids by request; of an aborted one, those it got.
        texts: The same as text, where the engine detokenises.
        num_steps: Steps the engine took.
        seconds: Time of all steps, start-up excluded.
        start_seconds: Time to build the engine.
        report: The worker's own account (`DispatchWorker.dispatch_report`); empty without our worker.
        metrics: vLLM's counters, where the engine collects statistics.
        samples: Token ids of all outputs of a request that has several (`n`); `tokens` and `texts` hold its first.
        logprobs: Of requests that ask for them, by output and token: token id (a string) to log probability.
        prompt_logprobs: The same of prompts, by token; of the first token there is none.
        worker_reports: Of every worker of this engine; `report` is the first.
    """

    tokens: dict[str, list[int]]
    texts: dict[str, str]
    num_steps: int
    seconds: float
    start_seconds: float
    report: dict[str, Any]
    metrics: dict[str, float]
    samples: dict[str, list[list[int]]] = attrs.field(factory=dict)
    logprobs: dict[str, list[list[dict[str, float]]]] = attrs.field(factory=dict)
    prompt_logprobs: dict[str, list[dict[str, float]]] = attrs.field(factory=dict)
    worker_reports: list[dict[str, Any]] = attrs.field(factory=list)


class EngineFailedError(DispatchError):
    """
    A process of an engine, or one that it serves, failed; the message ends with what it printed last.
    """


def run_engine(
    engine: dict[str, Any], requests: Sequence[EngineRequest], *, emulate: bool, prelude: str = ""
) -> EngineRun:
    """
    Run *requests* through an engine in a new process.

    Args:
        engine: Keyword arguments of `vllm.LLM`; JSON values only.
        requests: In order of arrival.
        emulate: Whether on the emulated NPU with our worker, or on vLLM's own CPU platform and worker.
        prelude: Python statements for the new process to run first.

    Raises:
        EngineFailedError: The engine could not be built or failed in a step.
    """
    engine = _engine_with_defaults(engine, emulate=emulate)
    return _run_processes([({"engine": engine, "requests": requests}, {})], emulate=emulate, prelude=prelude)[0]


def run_ranks(
    engine: dict[str, Any],
    requests: Sequence[Sequence[EngineRequest]],
    *,
    emulate: bool,
    prelude: str = "",
    timeout_seconds: float = 300,
) -> list[EngineRun]:
    """
    Run data-parallel ranks, each in a new process with its own requests; return what came out of each.

    Steps are counted alike on all ranks: one without requests idles, which in vLLM means that it takes part in
    the steps of the others with a dummy batch.

    Args:
        engine: Keyword arguments of `vllm.LLM`, the same on all ranks; JSON values only.
        requests: Those of each rank.
        emulate: As in `run_engine`.
        prelude: Python statements for each process to run first.
        timeout_seconds: Time for all of it; ranks that have not ended then wait for each other forever.

    Raises:
        EngineFailedError: A rank failed, or the time is over; the message ends with what each printed last.
    """
    # vLLM's own way to data parallelism without a server. It is not allowed to start the ranks itself.
    engine = {
        "data_parallel_size": len(requests),
        "distributed_executor_backend": "external_launcher",
    } | _engine_with_defaults(engine, emulate=emulate)
    last = max((r.arrival_step for of_rank in requests for r in of_rank), default=0)
    port = _free_port()
    ranks = []
    for rank, of_rank in enumerate(requests):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(requests)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(({"engine": engine, "requests": of_rank, "last_arrival_step": last}, environment))
    return _run_processes(ranks, emulate=emulate, prelude=prelude, timeout_seconds=timeout_seconds)


def _engine_with_defaults(engine: dict[str, Any], *, emulate: bool) -> dict[str, Any]:
    engine = {"kv_cache_memory_bytes": KV_CACHE_BYTES} | engine
    return {"worker_cls": WORKER_CLS} | engine if emulate else engine


def environment(*, emulate: bool, log_level: str = "WARNING") -> dict[str, str]:
    """
    Variables of a process that runs an engine; threads and logging are the user's, where set.
    """
    # Without binding, as vLLM binds each worker to a NUMA node of its own.
    defaults = {
        "OMP_NUM_THREADS": "1",
        # The n-gram drafter's threads wait busily for one another.
        "NUMBA_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    common = {
        "ACLGRAPH_DISPATCH_EMULATE": "1" if emulate else "0",
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return defaults | os.environ | common


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """
    Let this process leave its contexts also when it is told to end, or its terminal is closed.

    To be entered before the first process or temporary file. A signal that somebody handles, or that is ignored as
    under `nohup`, is left alone; and so are all outside the main thread, which cannot handle them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]

    def leave(number: int, _frame: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut short what the first one ends
        sys.exit(128 + number)

    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """
    Let signals wait for the end of the context: a process that is started in it is known when they arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in arrived:
            signal.raise_signal(each)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """
    Kill a process with all that it started: it must be the first of a session of its own.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _run_processes(
    specs: Sequence[tuple[dict[str, Any], dict[str, str]]],
    *,
    emulate: bool,
    prelude: str,
    timeout_seconds: float | None = None,
) -> list[EngineRun]:
    """
    Run each specification, the arguments of `drive`, in a process with variables of its own besides the common.
    """
    # One process: the engine core's counters are then at hand, and a failure is not hidden in a child.
    common = environment(emulate=emulate) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    program = f"{prelude}\nimport sys\n{_RUN_SPEC}"
    with exit_on_signals(), tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(index)) for index in range(len(specs))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for path, (spec, own) in zip(paths, specs, strict=True):
                requests = [attrs.asdict(r) for r in spec["requests"]]
                path.with_suffix(".spec").write_text(json.dumps(spec | {"requests": requests}))
                arguments = [str(path.with_suffix(".spec")), str(path.with_suffix(".result"))]
                with path.with_suffix(".output").open("wb") as output, signals_wait():
                    process = subprocess.Popen(
                        [sys.executable, "-c", program, *arguments],
                        env=common | own,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                    processes.append(process)
            failure = _wait(processes, timeout_seconds)
        finally:
            for process in processes:
                kill(process)
        if failure is not None:
            tail = 6000 // len(paths)
            outputs = [path.with_suffix(".output").read_text(errors="replace")[-tail:] for path in paths]
            raise EngineFailedError(f"the engine failed ({failure}):\n" + "\n".join(outputs))
        return [EngineRun(**json.loads(path.with_suffix(".result").read_text())) for path in paths]


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", timeout_seconds: float | None) -> str | None:
    """
    Wait for all to end, or for one to fail; return what went wrong.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return f"exit code {failed[0]}"
        if None not in codes:
            return None
        if deadline is not None and time.monotonic() > deadline:
            return f"not done after {timeout_seconds} s"
        time.sleep(0.05)


def drive(engine: dict[str, Any], requests: Sequence[EngineRequest], last_arrival_step: int = 0) -> EngineRun:
    """
    Run *requests* through an engine in this process; its platform is this process's.

    Args:
        engine: As in `run_engine`.
        requests: As in `run_engine`.
        last_arrival_step: The step up to which requests may arrive at another data-parallel rank.
    """
    from vllm import LLM
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    start = time.perf_counter()
    llm = LLM(**engine)
    start_seconds = time.perf_counter() - start

    core = llm.llm_engine
    # Compiled beside the steps, a grammar would let its request start at another step each time.
    core.engine_core.engine_core.structured_output_manager._use_async_grammar_compilation = False
    waiting = sorted(requests, key=lambda r: r.arrival_step)
    aborts = {r.request_id: r.abort_step for r in requests if r.abort_step is not None}
    # By name, so that an adapter has the same id in every engine, whoever asks first.
    names = sorted({r.lora for r in requests if r.lora is not None})
    loras = {name: LoRARequest(name, number, name) for number, name in enumerate(names, start=1)}
    outputs: dict[str, dict[int, Any]] = {}
    prompts: dict[str, Any] = {}
    num_steps = 0
    start = time.perf_counter()
    last_arrival_step = max([last_arrival_step, *(r.arrival_step for r in requests)])
    while True:
        while waiting and waiting[0].arrival_step <= num_steps:
            request = waiting.pop(0)
            sampling = _sampling(request)
            prompt = request.prompt
            if not isinstance(prompt, str):
                prompt = TokensPrompt(prompt_token_ids=prompt)
            lora = None if request.lora is None else loras[request.lora]
            core.add_request(request.request_id, prompt, sampling, lora_request=lora)
        for request_id in [name for name, step in aborts.items() if step <= num_steps]:
            core.abort_request([request_id])
            del aborts[request_id]
        # In every step, as data-parallel ranks ask one another.
        if not core.has_unfinished_requests() and num_steps >= last_arrival_step:
            break
        for output in core.step():
            for sample in output.outputs:
                outputs.setdefault(output.request_id, {})[sample.index] = sample
            if output.prompt_logprobs:
                prompts[output.request_id] = output.prompt_logprobs[1:]
        num_steps += 1
    seconds = time.perf_counter() - start

    worker_reports: list[dict[str, Any]] = []
    if engine.get("worker_cls") == WORKER_CLS:
        worker_reports = llm.collective_rpc("dispatch_report")
    metrics: dict[str, float] = {}
    if engine.get("disable_log_stats") is False:
        metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return EngineRun(
        tokens={
            r.request_id: list(outputs[r.request_id][0].token_ids) if r.request_id in outputs else []
            for r in requests
        },
        texts={name: samples[0].text for name, samples in outputs.items()},
        num_steps=num_steps,
        seconds=seconds,
        start_seconds=start_seconds,
        report=worker_reports[0] if worker_reports else {},
        metrics=metrics,
        samples={
            name: [list(samples[i].token_ids) for i in sorted(samples)]
            for name, samples in outputs.items()
            if len(samples) > 1
        },
        logprobs={
            name: [_logprobs(samples[i].logprobs) for i in sorted(samples)]
            for name, samples in outputs.items()
            if samples[0].logprobs is not None
        },
        prompt_logprobs={name: _logprobs(positions) for name, positions in prompts.items()},
        worker_reports=worker_reports,
    )


def _sampling(request: EngineRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {"temperature": 0, "ignore_eos": True} | request.sampling
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return SamplingParams(max_tokens=request.num_output_tokens, **options)


def _logprobs(positions: Any) -> list[dict[str, float]]:
    return [{str(token): entry.logprob for token, entry in position.items()} for position in positions]


def run_spec(spec_path: str, result_path: str) -> None:
    """
    Do in this process what `run_engine` wrote down, and leave the result for it.
    """
    spec = json.loads(Path(spec_path).read_text())
    spec["requests"] = [EngineRequest(**request) for request in spec["requests"]]
    run = drive(**spec)
    Path(result_path).write_text(json.dumps(attrs.asdict(run)))
