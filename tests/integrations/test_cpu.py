"""Real vLLM on the emulated NPU, compared with stock vLLM token by token."""

import os
import subprocess
import sys

import pytest

from aclgraph_dispatch.bench.checkpoints import cached_checkpoint
from aclgraph_dispatch.bench.engine import EngineFailedError, EngineRun

from ..engines import CHECK, EXPLORE, MAX_NUM_SEQS, NO_REFRESH, SHIFTED_INPUT, start, started

pytestmark = pytest.mark.engine

POLICIES = ("full_and_piecewise", "full_decode_only", "piecewise", "eager")
DISPATCHED = [
    *[(model, policy) for model in ("mla", "gqa") for policy in POLICIES],
    ("gqa-prefix_caching", "full_and_piecewise"),
    ("gqa-preemption", "full_and_piecewise"),
]
NUM_LAYERS = {"mla": 3, "gqa": 4}


@pytest.fixture(scope="module", autouse=True)
def _engines(request: pytest.FixtureRequest) -> None:
    """
    Start in the background what the selected tests will ask for.
    """
    if len(request.session.items) > 1:
        for variant in ("gqa", "mla", "gqa-prefix_caching", "gqa-preemption"):
            started(variant, None)
        for variant, policy in DISPATCHED:
            started(variant, policy)


def steps(run: EngineRun) -> dict[str, int]:
    """
    Steps by route.
    """
    routes = run.report["routes"]
    return {mode: sum(r["steps"] for r in routes if r["mode"] == mode) for mode in ("FULL", "PIECEWISE", "NONE")}


@pytest.mark.parametrize(("variant", "policy"), DISPATCHED)
def test_tokens_are_those_of_stock(variant: str, policy: str) -> None:
    """
    Whatever the route, every request gets the tokens that stock vLLM gives it; also one that is given up.
    """
    stock = started(variant, None).result()
    run = started(variant, policy).result()

    assert stock.tokens == run.tokens


def test_requests_are_aborted_on_their_way() -> None:
    """
    The load of these comparisons holds requests that got some of their tokens and not all.
    """
    tokens = started("gqa", None).result().tokens
    lengths = [len(tokens[f"request-{i}"]) for i in (9, 19, 29, 39)]

    assert any(0 < n < 30 for n in lengths)


@pytest.mark.parametrize("model", ["mla", "gqa"])
@pytest.mark.parametrize(
    ("policy", "used"),
    [
        ("full_and_piecewise", {"FULL", "PIECEWISE", "NONE"}),
        ("full_decode_only", {"FULL", "NONE"}),
        ("piecewise", {"PIECEWISE", "NONE"}),
        ("eager", {"NONE"}),
    ],
)
def test_policy_takes_its_routes(model: str, policy: str, used: set[str]) -> None:
    """
    A policy takes exactly the routes it stands for, and every step of the engine is counted.
    """
    run = started(model, policy).result()
    counts = steps(run)

    assert used == {mode for mode, n in counts.items() if n}
    assert run.metrics["vllm:generation_tokens"] == sum(map(len, run.tokens.values()))
    # Under these loads some request is scheduled in every step, save those that only report an abort.
    assert 0 <= run.num_steps - sum(counts.values()) <= 4


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_graphs_per_size(model: str) -> None:
    """
    FULL holds one graph per size, PIECEWISE one per size and piece (layers + 1), and each holds a stream.
    """
    report = started(model, "full_and_piecewise").result().report
    pieces = NUM_LAYERS[model] + 1
    expected = {f"FULL-{n}": 1 for n in report["full_sizes"]}
    expected |= {f"PIECEWISE-{n}": pieces for n in report["piecewise_sizes"]}

    assert expected == report["graphs_per_size"]
    assert sum(expected.values()) == report["streams_held"]
    assert report["full_sizes"][-1] == MAX_NUM_SEQS


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_eager_policy_captures_nothing(model: str) -> None:
    """
    Where no graph is wanted none is captured.
    """
    report = started(model, "eager").result().report

    assert report["graphs"] == {}
    assert report["streams_held"] == 0


def test_prefixes_are_found() -> None:
    """
    The load for prefix caching finds prefixes, dispatched as stock.
    """
    hits = [
        started("gqa-prefix_caching", policy).result().metrics["vllm:prefix_cache_hits"]
        for policy in (None, "full_and_piecewise")
    ]

    assert 0 < hits[0] == hits[1]


def test_requests_are_preempted() -> None:
    """
    The load for preemption preempts, dispatched as stock.
    """
    preemptions = [
        started("gqa-preemption", policy).result().metrics["vllm:num_preemptions"]
        for policy in (None, "full_and_piecewise")
    ]

    assert 0 < preemptions[0] == preemptions[1]


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_without_refresh_tokens_are_wrong(model: str) -> None:
    """
    A FULL graph replayed with the parameters of its capture gives other tokens: the comparison can fail.
    """
    stock = started(model, None).result()
    run = start(model, "full_decode_only", NO_REFRESH).result()
    wrong = [name for name, tokens in stock.tokens.items() if run.tokens[name] != tokens]

    assert len(wrong) > len(stock.tokens) / 2


def test_moved_input_is_an_error() -> None:
    """
    An input that lies elsewhere than at capture stops the engine with our error.
    """
    with pytest.raises(EngineFailedError, match=r"inputs of a graph must lie where they lay at its capture"):
        start("gqa", "full_decode_only", SHIFTED_INPUT).result()


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_host_never_waits(model: str) -> None:
    """
    No step makes the host wait for the device, whatever its route.
    """
    report = started(model, "full_and_piecewise").result().report

    assert 0 == report["host_synchronizations"]


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_explored(model: str) -> None:
    """
    With the device behind the host, each forward pass by a seed of its own, the tokens are those of stock.
    """
    stock = started(model, None).result()
    run = start(model, "full_and_piecewise", EXPLORE.format(seed=0)).result()

    assert stock.tokens == run.tokens
    assert steps(run)["FULL"] >= 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_explored_from_many_seeds(model: str) -> None:
    """
    The same from twenty seeds that share no forward pass.
    """
    stock = started(model, None).result()
    runs = [start(model, "full_and_piecewise", EXPLORE.format(seed=1000 * seed)) for seed in range(20)]

    assert [stock.tokens] * 20 == [run.result().tokens for run in runs]


@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_checked(model: str) -> None:
    """
    The check mode finds every replay equal to its operators, and changes no token.
    """
    stock = started(model, None).result()
    run = start(model, "full_and_piecewise", CHECK).result()

    assert stock.tokens == run.tokens


def test_check_finds_stale_parameters() -> None:
    """
    The check mode names the graph whose parameters were not refreshed.
    """
    with pytest.raises(EngineFailedError, match=r"a replay of GraphKey\(.*RuntimeMode.FULL.* differs"):
        start("gqa", "full_decode_only", CHECK + NO_REFRESH).result()


TWO_ENGINES = """
import gc, sys
from vllm import LLM
from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.bench.engine import WORKER_CLS

held = []
for _ in range(2):
    llm = LLM(
        sys.argv[1], worker_cls=WORKER_CLS, max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=1 << 24,
        additional_config={"aclgraph_dispatch": {"policy": "full_decode_only"}},
    )
    llm.generate(["river stone"], use_tqdm=False)
    held.append(emulated.hardware.streams_held)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    held.append(emulated.hardware.streams_held)
print(held)
"""


def test_shutdown_releases_the_graphs() -> None:
    """
    An engine that is shut down gives its streams back, and another one can follow in the same process.
    """
    environment = os.environ | {
        "ACLGRAPH_DISPATCH_EMULATE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", TWO_ENGINES, str(cached_checkpoint("gqa"))]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "[2, 0, 2, 0]"
