"""
The main job, shown: real vLLM over a slice of a request trace, once stock and once dispatched.

Both runs get the same requests at the same steps, so the batches are the same, and so must be the tokens.
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.config import KEY
from aclgraph_dispatch.errors import ConfigError

from .checkpoints import MODELS, SPECIAL_TOKENS, VOCABULARY, cached_checkpoint
from .engine import EngineRequest, EngineRun, run_engine
from .synthetic import conversation
from .traces import TraceRequest, read_trace

TRACE = "traces/azure_conv_2023_5min.csv.gz"

STEPS_PER_SECOND = 16
"""Engine steps that stand for a second of the trace: a step of 60 ms."""
PROMPT_SCALE, LONGEST_PROMPT = 16, 150
OUTPUT_SCALE, LONGEST_OUTPUT = 8, 40
"""The trace's lengths are divided and cut, to suit a model of a few layers on a CPU."""
SHORTEST_ANSWER = 16
"""Tokens of an answer that is to be read."""

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "How do I boil an egg?",
    "What does a compiler do?",
    "Write one sentence about the moon.",
    "What is the largest planet of the solar system?",
    "Give me a synonym of happy.",
)


@attrs.frozen
class DemoResult:
    """
    Two runs over the same requests.
    """

    model: str
    policy: str
    trace: str
    requests: tuple[EngineRequest, ...]
    stock: EngineRun
    dispatched: EngineRun

    @property
    def differing(self) -> list[str]:
        """
        Requests whose tokens differ.
        """
        return [name for name, tokens in self.stock.tokens.items() if self.dispatched.tokens[name] != tokens]

    def figures(self) -> dict[str, Any]:
        """
        All there is to say, as JSON values.
        """
        report = self.dispatched.report
        routes = dict.fromkeys(("FULL", "PIECEWISE", "NONE"), 0)
        for route in report["routes"]:
            routes[route["mode"]] += route["steps"]
        return {
            "model": self.model,
            "policy": self.policy,
            "trace": self.trace,
            "num_requests": len(self.requests),
            "num_tokens_generated": sum(map(len, self.stock.tokens.values())),
            "tokens_identical": not self.differing,
            "requests_differing": self.differing,
            "steps_by_route": routes,
            "routes": report["routes"],
            "num_tokens": sum(route["tokens"] for route in report["routes"]),
            "num_paddings": sum(route["paddings"] for route in report["routes"]),
            "full_sizes": report["full_sizes"],
            "piecewise_sizes": report["piecewise_sizes"],
            "graphs": report["graphs"],
            "streams_held": report["streams_held"],
            "capture_seconds": round(report["capture_seconds"], 3),
            "stock_seconds": round(self.stock.seconds, 3),
            "dispatched_seconds": round(self.dispatched.seconds, 3),
        }


def run_demo(model: str, policy: str, num_requests: int, say: Callable[[str], None]) -> DemoResult:
    """
    Run the demonstration.

    Args:
        model: "mla", "gqa", or the directory of a checkpoint.
        policy: A name in `POLICIES`.
        num_requests: Requests taken from the start of the trace.
        say: Told what is going on.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    name, trace = load_trace(num_requests)
    if model in MODELS:
        directory = cached_checkpoint(model)
        requests = random_requests(trace)
    else:
        directory = Path(model)
        if not (directory / "config.json").is_file():
            msg = f"model must be one of {', '.join(MODELS)}, or a directory with a config.json: {model!r}"
            raise ConfigError(msg)
        requests = text_requests(trace)

    # Prefill chunks of at most 256 tokens (the CPU platform sets its own limit for MLA): with 16 requests vLLM
    # captures up to 32 tokens, so that the trace's prompts meet PIECEWISE graphs and eager steps alike.
    engine = {
        "model": str(directory),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512 if model == "mla" else 256,
        "seed": 0,
    }
    say(f"stock vLLM: {len(requests)} requests of {name}, eager on the CPU ...")
    stock = run_engine(engine | {"enforce_eager": True}, requests, emulate=False)
    say(f"dispatched: the same requests, policy {policy}, on the emulated NPU ...")
    additional_config = {KEY: {"policy": policy}}
    dispatched = run_engine(engine | {"additional_config": additional_config}, requests, emulate=True)
    return DemoResult(model, policy, name, tuple(requests), stock, dispatched)


def load_trace(num_requests: int) -> tuple[str, tuple[TraceRequest, ...]]:
    """
    The start of a recorded trace where there is one (`ACLGRAPH_DISPATCH_SHARED`), else of a synthetic one.
    """
    recorded = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), TRACE)
    if recorded.is_file():
        return "Azure LLM inference 2023 (conversation)", read_trace(recorded, limit=num_requests)
    return "a synthetic trace of its shape", conversation(num_requests)


def random_requests(trace: Sequence[TraceRequest], *, seed: int = 0) -> list[EngineRequest]:
    """
    Requests with random words for prompts, in the vocabulary of our checkpoints.
    """
    words = random.Random(seed)
    first = len(SPECIAL_TOKENS)
    return [
        EngineRequest(
            f"request-{i}",
            [words.randrange(first, len(VOCABULARY)) for _ in range(prompt_length)],
            output_length,
            arrival_step,
        )
        for i, (arrival_step, prompt_length, output_length) in enumerate(_scaled(trace))
    ]


def text_requests(trace: Sequence[TraceRequest]) -> list[EngineRequest]:
    """
    Requests with questions for prompts, for a model that can answer.
    """
    return [
        EngineRequest(
            f"request-{i}",
            f"Question: {QUESTIONS[i % len(QUESTIONS)]}\nAnswer:",
            max(output_length, SHORTEST_ANSWER),
            arrival,
        )
        for i, (arrival, _, output_length) in enumerate(_scaled(trace))
    ]


def _scaled(trace: Sequence[TraceRequest]) -> list[tuple[int, int, int]]:
    """
    Arrival step, prompt length and output length.
    """
    start = trace[0].arrival_seconds
    return [
        (
            int((r.arrival_seconds - start) * STEPS_PER_SECOND),
            min(max(r.prompt_tokens // PROMPT_SCALE, 1), LONGEST_PROMPT),
            min(max(r.output_tokens // OUTPUT_SCALE, 2), LONGEST_OUTPUT),
        )
        for r in trace
    ]


def describe(result: DemoResult) -> str:
    """
    The figures for people.
    """
    figures = result.figures()
    lines = ["", f"{'route':<10} {'reason':<13} {'steps':>6} {'tokens':>7} {'paddings':>9}"]
    lines += [
        f"{r['mode'] if r['mode'] != 'NONE' else 'eager':<10} {r['reason'].lower():<13} {r['steps']:>6} "
        f"{r['tokens']:>7} {r['paddings']:>9}"
        for r in figures["routes"]
    ]
    graphs = figures["graphs"]
    sample = next(iter(result.differing), result.requests[0].request_id)
    lines += [
        "",
        f"graphs     FULL {graphs.get('FULL', 0)} for sizes {figures['full_sizes']}",
        f"           PIECEWISE {graphs.get('PIECEWISE', 0)} for sizes {figures['piecewise_sizes']}",
        f"streams    {figures['streams_held']} held",
        f"capture    {figures['capture_seconds']:.2f} s",
        f"run        {figures['stock_seconds']:.2f} s stock, {figures['dispatched_seconds']:.2f} s dispatched "
        "(one run each: no benchmark)",
        "",
        f"{sample}, stock:      {result.stock.texts[sample].strip()!r}",
        f"{sample}, dispatched: {result.dispatched.texts[sample].strip()!r}",
        "",
        f"{figures['num_tokens_generated']} tokens of {figures['num_requests']} requests: "
        + ("all identical" if not result.differing else f"DIFFERENT in {', '.join(result.differing)}"),
    ]
    return "\n".join(lines)
