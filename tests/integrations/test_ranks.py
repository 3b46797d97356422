"""Real vLLM on several ranks, each with graphs of its own, compared with stock vLLM token by token."""

from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest

from aclgraph_dispatch.bench.checkpoints import cached_adapter, cached_checkpoint
from aclgraph_dispatch.bench.engine import EngineFailedError, EngineRequest, EngineRun, run_engine, run_ranks
from aclgraph_dispatch.config import KEY

from .. import engines, rank_processes

HERE = Path(__file__).parent
SIZES = {"full_sizes": [1, 2, 4, 8], "piecewise_sizes": [8, 16, 32]}
TIMEOUT_SECONDS = 240

# As `tensor_parallel` names them.
TORCH = "torch"
BUILT = "what is built"


def options(model: str, **more: Any) -> dict[str, Any]:
    """
    What all engines of *model* here are told.
    """
    common = {"model": str(cached_checkpoint(model)), "dtype": "float32", "max_model_len": 512, "seed": 0}
    own = {"max_num_batched_tokens": 64, "enable_prefix_caching": False} if model == "gqa" else {}
    return {**common, "max_num_seqs": 8, **own, **more}


def dispatched(**more: Any) -> dict[str, Any]:
    """
    What dispatched engines are told besides.
    """
    return {"additional_config": {KEY: {"policy": "full_and_piecewise", **SIZES}}, **more}


@cache
def tensor_parallel(model: str, through: str, *, emulate: bool, prelude: str = "") -> "Future[EngineRun]":
    """
    Start an engine of two workers that communicate *through* torch, or by what vLLM has built for that.
    """
    more: dict[str, Any] = dispatched() if emulate else {"enforce_eager": True}
    more["tensor_parallel_size"] = 2
    if through == TORCH:
        more["worker_extension_cls"] = "no_shared_memory.NoSharedMemory"
        # Processes that this one starts get its path, too.
        prelude = f"import sys; sys.path.append({str(HERE)!r})\n{prelude}"
    requests = engines.churn()[:14]
    return engines.submit(run_engine, options(model, **more), requests, emulate=emulate, prelude=prelude)


def two_ranks() -> list[list[EngineRequest]]:
    """
    Two loads that meet in all ways: the second rank idles at first, then prefills while the first decodes, once
    within the sizes of graphs and once beyond them, and has work long after the first has none.
    """
    by_number = engines.churn()
    first, second = {5: 0, 10: 0, 8: 2, 27: 4}, {28: 9, 2: 14, 12: 15, 11: 16}
    return [
        [attrs.evolve(by_number[number], arrival_step=step) for number, step in arrivals.items()]
        for arrivals in (first, second)
    ]


@cache
def data_parallel(model: str, *, emulate: bool, prelude: str = "") -> "Future[list[EngineRun]]":
    """
    Start two data-parallel ranks.
    """
    more = dispatched() if emulate else {"enforce_eager": True}
    return engines.submit(
        run_ranks,
        options(model, **more),
        two_ranks(),
        emulate=emulate,
        prelude=prelude,
        timeout_seconds=TIMEOUT_SECONDS,
    )


def tokens_by_request(runs: list[EngineRun]) -> dict[str, list[int]]:
    """
    Tokens of all ranks.
    """
    return {name: tokens for run in runs for name, tokens in run.tokens.items()}


@pytest.fixture(scope="module", autouse=True)
def _engines(request: pytest.FixtureRequest) -> None:
    """
    Start in the background what the selected tests will ask for.
    """
    selected = [i for i in request.session.items if i.path == request.path and i.get_closest_marker("engine")]
    if sum(i.get_closest_marker("slow") is None for i in selected) > 1:
        for emulate in (False, True):
            tensor_parallel("gqa", TORCH, emulate=emulate)
        for model in ("gqa", "mla"):
            data_parallel(model, emulate=True)
            engines.started(model, None)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "through"),
    [
        ("gqa", TORCH),
        pytest.param("gqa", BUILT, marks=pytest.mark.slow),
        pytest.param("mla", TORCH, marks=pytest.mark.slow),
        pytest.param("mla", BUILT, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel(model: str, through: str) -> None:
    """
    The tokens are those of stock vLLM with as many workers; both kinds of graph are used, and both workers decide
    alike.
    """
    stock = tensor_parallel(model, through, emulate=False).result()
    run = tensor_parallel(model, through, emulate=True).result()
    first, second = run.worker_reports

    assert stock.tokens == run.tokens
    assert {d["mode"] for d in first["decisions"]} == {"FULL", "PIECEWISE", "NONE"}
    assert first["decisions"] == second["decisions"]
    assert first["graphs_per_size"] == second["graphs_per_size"]
    assert first["graphs_per_size"].keys() == {
        *(f"FULL-{size}" for size in SIZES["full_sizes"]),
        *(f"PIECEWISE-{size}" for size in SIZES["piecewise_sizes"]),
    }


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("prelude", [engines.CHECK, engines.EXPLORE.format(seed=7)], ids=["checked", "explored"])
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_replays_on_several_ranks(model: str, prelude: str) -> None:
    """
    Replays are what their operators are, with the device behind the host as well.
    """
    stock = tensor_parallel(model, TORCH, emulate=False).result()
    run = tensor_parallel(model, TORCH, emulate=True, prelude=prelude).result()
    ranks = data_parallel(model, emulate=True, prelude=prelude).result()

    assert stock.tokens == run.tokens
    assert tokens_by_request(data_parallel(model, emulate=True).result()) == tokens_by_request(ranks)


@pytest.mark.engine
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_data_parallel(model: str) -> None:
    """
    Every rank's tokens are those of stock vLLM on one rank: on a CPU, stock mixture of experts cannot run on two.
    """
    stock = engines.started(model, None).result()
    tokens = tokens_by_request(data_parallel(model, emulate=True).result())

    assert {name: stock.tokens[name] for name in tokens} == tokens


@pytest.mark.engine
@pytest.mark.slow
def test_data_parallel_is_stock() -> None:
    """
    A dense model's tokens are those of stock vLLM on as many ranks.
    """
    stock = data_parallel("gqa", emulate=False).result()
    runs = data_parallel("gqa", emulate=True).result()

    assert [run.tokens for run in stock] == [run.tokens for run in runs]


@pytest.mark.engine
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_ranks_agree(model: str) -> None:
    """
    In every step all ranks take the same route with equally many tokens, whatever each has to do; without graphs
    each runs as many tokens as it has.
    """
    reports = [run.report["decisions"] for run in data_parallel(model, emulate=True).result()]
    steps = list(zip(*reports, strict=True))

    assert all(first["mode"] == second["mode"] for first, second in steps)
    assert all(first["padded"] == second["padded"] for first, second in steps if first["mode"] != "NONE")
    assert all(d["padded"] == d["tokens"] for step in steps for d in step if d["mode"] == "NONE")


def adapted(loads: list[list[EngineRequest]]) -> list[list[EngineRequest]]:
    """
    Every other request wants an adapter, so that in some steps one rank has it active and the other has not.
    """
    adapter = str(cached_adapter("gqa"))
    return [
        [attrs.evolve(request, lora=adapter if i % 2 == rank else None) for i, request in enumerate(load)]
        for rank, load in enumerate(loads)
    ]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", ["n-gram", "drafter", "LoRA"])
def test_ranks_that_have_more_to_agree_on(name: str) -> None:
    """
    With drafts, a drafter that has exchanges of its own, or an adapter on one rank, nothing hangs, all ranks meet
    the same graphs, and the tokens are those of stock vLLM.
    """
    more, loads = {
        "n-gram": lambda: ({"speculative_config": engines.ngram(3)}, two_ranks()),
        "drafter": lambda: ({"speculative_config": engines.drafter(2)}, two_ranks()),
        # One slot stays empty, see engines.py.
        "LoRA": lambda: ({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, adapted(two_ranks())),
    }[name]()
    policy = {"additional_config": {KEY: {"policy": "full_and_piecewise"}}}
    runs = run_ranks(options("gqa", **more, **policy), loads, emulate=True, timeout_seconds=TIMEOUT_SECONDS)
    stock = [run_engine(options("gqa", **more, enforce_eager=True), load, emulate=False) for load in loads]
    first, second = (
        [(d["mode"], d["loras"], d["padded"]) for d in run.report["decisions"] if d["mode"] != "NONE"]
        for run in runs
    )

    assert [run.tokens for run in stock] == [run.tokens for run in runs]
    assert first == second
    assert {"FULL", "PIECEWISE"} == {mode for mode, _, _ in first}
    assert (len({loras for _, loras, _ in first}) > 1) == (name == "LoRA")


@pytest.mark.engine
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_ranks_meet_in_all_ways(model: str) -> None:
    """
    The load has steps of each kind: one rank idle, in either order, one prefilling while the other decodes.
    """
    first, second = (run.report["decisions"] for run in data_parallel(model, emulate=True).result())
    kinds = {
        (one["mode"], "idle" if one["idle"] else one["reason"], "idle" if two["idle"] else two["reason"])
        for one, two in zip(first, second, strict=True)
    }

    assert {
        ("PIECEWISE", "PREFILL", "idle"),
        ("FULL", "PADDED", "idle"),
        ("FULL", "idle", "EXACT"),
        ("PIECEWISE", "RANK_VOTE", "PREFILL"),  # alone, the first would have replayed a FULL graph
        ("NONE", "RANK_VOTE", "OVER_MAX"),
        ("FULL", "RANK_VOTE", "PADDED"),
    } <= kinds


def test_communicator(tmp_path: Path) -> None:
    """
    Parts of different sizes are gathered and reduced; see the script.
    """
    outputs = rank_processes.run_ranks(HERE / "communicator.py", tmp_path)

    assert all(output.endswith("is_captured\n") for output in outputs), "\n".join(outputs)


def test_rank_that_fails_ends_all() -> None:
    """
    The others would wait forever; what each printed is told.
    """
    prelude = """
import os, sys, time
print('this is rank', os.environ['RANK'], flush=True)
time.sleep(1 if os.environ['RANK'] == '1' else 600)
sys.exit(3)
"""
    with pytest.raises(EngineFailedError, match=r"(?s)exit code 3.*this is rank 0.*this is rank 1"):
        run_ranks({}, [[], []], emulate=False, prelude=prelude)


def test_ranks_that_hang_end() -> None:
    """
    Ranks that wait for each other forever are an error; what each printed is told.
    """
    prelude = "import os, time; print('this is rank', os.environ['RANK'], flush=True); time.sleep(600)"

    with pytest.raises(EngineFailedError, match=r"(?s)not done after 2 s.*this is rank 0.*this is rank 1"):
        run_ranks({}, [[], []], emulate=False, prelude=prelude, timeout_seconds=2)
