"""The demonstration, on runs made up by hand: what it asks of engines and what it makes of their answers."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from aclgraph_dispatch.bench import demo
from aclgraph_dispatch.bench.checkpoints import SPECIAL_TOKENS, VOCABULARY
from aclgraph_dispatch.bench.demo import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    QUESTIONS,
    TRACE,
    DemoResult,
    describe,
    load_trace,
    random_requests,
    run_demo,
    text_requests,
)
from aclgraph_dispatch.bench.engine import EngineRequest, EngineRun
from aclgraph_dispatch.bench.synthetic import conversation
from aclgraph_dispatch.bench.traces import TraceRequest
from aclgraph_dispatch.errors import ConfigError, TraceError

TOKENS = {"request-0": [5, 6, 7], "request-1": [8, 9]}
TEXTS = {"request-0": " a bird sings", "request-1": " a boat"}
REPORT: dict[str, Any] = {
    "policy": "full_and_piecewise",
    "full_sizes": [1, 2],
    "piecewise_sizes": [1, 2, 4],
    "graphs": {"FULL": 2, "PIECEWISE": 15},
    "streams_held": 17,
    "capture_seconds": 0.12345,
    "routes": [
        {"mode": "FULL", "reason": "EXACT", "steps": 3, "tokens": 6, "paddings": 0},
        {"mode": "FULL", "reason": "PADDED", "steps": 1, "tokens": 1, "paddings": 1},
        {"mode": "PIECEWISE", "reason": "PREFILL", "steps": 2, "tokens": 7, "paddings": 1},
        {"mode": "NONE", "reason": "OVER_MAX", "steps": 1, "tokens": 40, "paddings": 0},
    ],
}
STOCK = EngineRun(TOKENS, TEXTS, 7, 1.5, 9.0, {}, {})
DISPATCHED = attrs.evolve(STOCK, seconds=2.25, report=REPORT)
REQUESTS = tuple(EngineRequest(name, [4], len(tokens)) for name, tokens in TOKENS.items())
RESULT = DemoResult("gqa", "full_and_piecewise", "a trace", REQUESTS, STOCK, DISPATCHED)
ONE_WRONG = attrs.evolve(
    RESULT,
    dispatched=attrs.evolve(
        DISPATCHED,
        tokens=TOKENS | {"request-1": [8, 8]},
        texts=TEXTS | {"request-1": " a a"},
    ),
)


def test_figures() -> None:
    """
    Steps are summed by route, tokens and paddings over all of them; every value is JSON.
    """
    figures = RESULT.figures()

    assert figures == json.loads(json.dumps(figures))
    assert {
        "model": "gqa",
        "policy": "full_and_piecewise",
        "trace": "a trace",
        "num_requests": 2,
        "num_tokens_generated": 5,
        "tokens_identical": True,
        "requests_differing": [],
        "steps_by_route": {"FULL": 4, "PIECEWISE": 2, "NONE": 1},
        "routes": REPORT["routes"],
        "num_tokens": 54,
        "num_paddings": 2,
        "full_sizes": [1, 2],
        "piecewise_sizes": [1, 2, 4],
        "graphs": {"FULL": 2, "PIECEWISE": 15},
        "streams_held": 17,
        "capture_seconds": 0.123,
        "stock_seconds": 1.5,
        "dispatched_seconds": 2.25,
    } == figures


def test_routes_not_taken_are_counted_too() -> None:
    """
    A route without a step has a count of zero.
    """
    eager = {"policy": "eager", "routes": REPORT["routes"][-1:], "graphs": {}}
    run = attrs.evolve(DISPATCHED, report=REPORT | eager)

    assert attrs.evolve(RESULT, dispatched=run).figures()["steps_by_route"] == {
        "FULL": 0,
        "PIECEWISE": 0,
        "NONE": 1,
    }


@pytest.mark.parametrize(
    "tokens",
    [
        {"request-1": [8, 8]},  # another token
        {"request-1": [8]},  # one fewer
        {"request-1": [8, 9, 9]},  # one more
        {"request-1": []},  # none
    ],
)
def test_one_token_differs(tokens: dict[str, list[int]]) -> None:
    """
    One token is enough to say so, with the name of its request.
    """
    result = attrs.evolve(RESULT, dispatched=attrs.evolve(DISPATCHED, tokens=TOKENS | tokens))
    figures = result.figures()

    assert ["request-1"] == result.differing == figures["requests_differing"]
    assert not figures["tokens_identical"]


def test_describe() -> None:
    """
    The table for people has a line for every route and reason, then what is held, taken and said.
    """
    assert (
        describe(RESULT)
        == """
route      reason         steps  tokens  paddings
FULL       exact              3       6         0
FULL       padded             1       1         1
PIECEWISE  prefill            2       7         1
eager      over_max           1      40         0

graphs     FULL 2 for sizes [1, 2]
           PIECEWISE 15 for sizes [1, 2, 4]
streams    17 held
capture    0.12 s
run        1.50 s stock, 2.25 s dispatched (one run each: no benchmark)

request-0, stock:      'a bird sings'
request-0, dispatched: 'a bird sings'

5 tokens of 2 requests: all identical"""
    )


def test_describe_shows_the_difference() -> None:
    """
    Where tokens differ, what is shown is a request that differs, and all of them are named.
    """
    lines = describe(ONE_WRONG).splitlines()

    assert lines[-4:] == [
        "request-1, stock:      'a boat'",
        "request-1, dispatched: 'a a'",
        "",
        "5 tokens of 2 requests: DIFFERENT in request-1",
    ]


def test_synthetic_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where no trace is recorded there is a synthetic one, and its name says so.
    """
    monkeypatch.setenv("ACLGRAPH_DISPATCH_SHARED", str(tmp_path))

    assert ("a synthetic trace of its shape", conversation(12)) == load_trace(12)


def test_recorded_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A recorded trace is preferred: the one of the variable's folder, or of `../shared`.
    """
    working_directory = tmp_path / "main"
    working_directory.mkdir()
    for folder, prompt_tokens in (("shared", 8), ("elsewhere", 9)):
        path = tmp_path / folder / TRACE
        path.parent.mkdir(parents=True)
        path.write_text(f"arrival_ms,prompt_tokens,output_tokens\n0,{prompt_tokens},4\n500,8,4\n")
    monkeypatch.chdir(working_directory)
    monkeypatch.delenv("ACLGRAPH_DISPATCH_SHARED", raising=False)
    by_default = load_trace(1)
    monkeypatch.setenv("ACLGRAPH_DISPATCH_SHARED", str(tmp_path / "elsewhere"))

    name = "Azure LLM inference 2023 (conversation)"

    assert (name, (TraceRequest(0.0, 8, 4),)) == by_default
    assert (name, (TraceRequest(0.0, 9, 4), TraceRequest(0.5, 8, 4))) == load_trace(5)


def test_bad_recorded_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A recorded trace that cannot be read is an error, not a reason to take a synthetic one.
    """
    path = tmp_path / TRACE
    path.parent.mkdir(parents=True)
    path.write_text("arrival_ms\n0\n")
    monkeypatch.setenv("ACLGRAPH_DISPATCH_SHARED", str(tmp_path))

    with pytest.raises(TraceError, match="columns output_tokens, prompt_tokens are missing"):
        load_trace(1)


@pytest.mark.parametrize(
    ("request_", "step", "num_prompt", "num_output"),
    [
        (TraceRequest(100.0, 160, 80), 0, 10, 10),
        (TraceRequest(101.0, 160, 80), 16, 10, 10),  # sixteen steps a second
        (TraceRequest(101.99, 160, 80), 31, 10, 10),
        (TraceRequest(100.0, 1, 1), 0, 1, 2),  # no prompt is empty, and some decoding is left
        (TraceRequest(100.0, 100_000, 100_000), 0, LONGEST_PROMPT, LONGEST_OUTPUT),
    ],
)
def test_scaling(request_: TraceRequest, step: int, num_prompt: int, num_output: int) -> None:
    """
    Arrivals count from the first request, in steps; lengths are divided and cut.
    """
    scaled = random_requests([TraceRequest(100.0, 16, 8), request_])[1]

    assert (step, num_prompt, num_output) == (
        scaled.arrival_step,
        len(scaled.prompt),
        scaled.num_output_tokens,
    )


def test_random_requests() -> None:
    """
    Prompts are words of the vocabulary, the same for the same seed; names are unique.
    """
    trace = conversation(20)
    requests = random_requests(trace)

    assert requests == random_requests(trace)
    assert requests != random_requests(trace, seed=1)
    assert {f"request-{i}" for i in range(20)} == {r.request_id for r in requests}
    assert set(range(len(SPECIAL_TOKENS), len(VOCABULARY))) >= {token for r in requests for token in r.prompt}


def test_text_requests() -> None:
    """
    Prompts are our questions in turn; arrivals are those of the random ones, answers long enough to be read.
    """
    trace = conversation(2 * len(QUESTIONS))
    requests = text_requests(trace)

    assert [f"Question: {question}\nAnswer:" for question in 2 * QUESTIONS] == [r.prompt for r in requests]
    assert [(r.request_id, r.arrival_step, max(r.num_output_tokens, 16)) for r in random_requests(trace)] == [
        (r.request_id, r.arrival_step, r.num_output_tokens) for r in requests
    ]


def test_both_engines_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Stock runs eagerly without us, the other with the policy; model, limits and requests are the same.
    """
    calls: list[tuple[dict[str, Any], list[EngineRequest], bool]] = []

    def run_engine(engine: dict[str, Any], requests: list[EngineRequest], *, emulate: bool) -> EngineRun:
        calls.append((engine, requests, emulate))
        return DISPATCHED if emulate else STOCK

    monkeypatch.setattr(demo, "run_engine", run_engine)
    monkeypatch.setenv("ACLGRAPH_DISPATCH_SHARED", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    said: list[str] = []
    result = run_demo(str(tmp_path), "piecewise", 3, said.append)
    (stock, requests, emulate), (dispatched, *same) = calls

    assert stock.pop("enforce_eager")
    assert dispatched.pop("additional_config") == {"aclgraph_dispatch": {"policy": "piecewise"}}
    assert stock == dispatched
    assert str(tmp_path) == stock["model"]
    assert [requests, not emulate] == same
    assert text_requests(conversation(3)) == requests == list(result.requests)
    assert not emulate
    assert len(said) == 2


@pytest.mark.parametrize("model", ["gpa", "MLA", "", "/nowhere"])
def test_unknown_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What is neither a name nor a checkpoint is refused before any engine starts.
    """
    monkeypatch.delattr(demo, "run_engine")

    with pytest.raises(ConfigError) as caught:
        run_demo(model, "eager", 1, print)

    assert f"model must be one of gqa, mla, or a directory with a config.json: {model!r}" == str(caught.value)
