"""
Runs one real engine over a list of requests, in a process of its own.

Which platform vLLM uses is settled once per process, by the environment; a comparison of an engine with and
without our dispatcher is therefore a comparison of two processes. Requests arrive at given *steps*, not at
given times, so that both engines see the same batches however fast they are.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.errors import DispatchError

WORKER_CLS = "aclgraph_dispatch.integrations.cpu.DispatchWorker"
KV_CACHE_BYTES = 1 << 28
"""Room enough for the tiny models; by default vLLM takes most of the machine's memory."""

_RUN_SPEC = "from aclgraph_dispatch.bench.live import run_spec; run_spec(*sys.argv[1:])"


@attrs.frozen
class EngineRequest:
    """
    A request to an engine.

    Args:
        request_id: Unique name.
        prompt: Token ids, or text for the model's tokenizer.
        num_output_tokens: Tokens to generate, no fewer.
        arrival_step: The engine step before which it is added.
        abort_step: The engine step before which it is given up, if ever.
    """

    request_id: str
    prompt: list[int] | str
    num_output_tokens: int
    arrival_step: int = 0
    abort_step: int | None = None


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
    """

    tokens: dict[str, list[int]]
    texts: dict[str, str]
    num_steps: int
    seconds: float
    start_seconds: float
    report: dict[str, Any]
    metrics: dict[str, float]


class EngineFailedError(DispatchError):
    """
    The engine's process failed; the message ends with what it printed last.
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
    defaults = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment = (
        defaults
        | os.environ
        | {
            "ACLGRAPH_DISPATCH_EMULATE": "1" if emulate else "0",
            # One process: the engine core's counters are then at hand, and a failure is not hidden in a child.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )
    engine = {"kv_cache_memory_bytes": KV_CACHE_BYTES} | engine
    if emulate:
        engine = {"worker_cls": WORKER_CLS} | engine
    with tempfile.TemporaryDirectory() as directory:
        spec, result = Path(directory, "spec.json"), Path(directory, "result.json")
        spec.write_text(json.dumps({"engine": engine, "requests": [attrs.asdict(r) for r in requests]}))
        program = f"{prelude}\nimport sys\n{_RUN_SPEC}"
        process = subprocess.run(
            [sys.executable, "-c", program, str(spec), str(result)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            raise EngineFailedError(
                f"the engine failed (exit code {process.returncode}):\n{process.stdout[-6000:]}"
            )
        return EngineRun(**json.loads(result.read_text()))


def drive(engine: dict[str, Any], requests: Sequence[EngineRequest]) -> EngineRun:
    """
    Run *requests* through an engine in this process; its platform is this process's.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    start = time.perf_counter()
    llm = LLM(**engine)
    start_seconds = time.perf_counter() - start

    core = llm.llm_engine
    waiting = sorted(requests, key=lambda r: r.arrival_step)
    aborts = {r.request_id: r.abort_step for r in requests if r.abort_step is not None}
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    texts: dict[str, str] = {}
    num_steps = 0
    start = time.perf_counter()
    while waiting or core.has_unfinished_requests():
        while waiting and waiting[0].arrival_step <= num_steps:
            request = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
            prompt = request.prompt
            if not isinstance(prompt, str):
                prompt = TokensPrompt(prompt_token_ids=prompt)
            core.add_request(request.request_id, prompt, sampling)
        for request_id in [name for name, step in aborts.items() if step <= num_steps]:
            core.abort_request([request_id])
            del aborts[request_id]
        for output in core.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            texts[output.request_id] = output.outputs[0].text
        num_steps += 1
    seconds = time.perf_counter() - start

    report = {}
    if engine.get("worker_cls") == WORKER_CLS:
        report = llm.collective_rpc("dispatch_report")[0]
    metrics: dict[str, float] = {}
    if engine.get("disable_log_stats") is False:
        metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return EngineRun(tokens, texts, num_steps, seconds, start_seconds, report, metrics)


def run_spec(spec_path: str, result_path: str) -> None:
    """
    Do in this process what `run_engine` wrote down, and leave the result for it.
    """
    spec = json.loads(Path(spec_path).read_text())
    run = drive(spec["engine"], [EngineRequest(**request) for request in spec["requests"]])
    Path(result_path).write_text(json.dumps(attrs.asdict(run)))
