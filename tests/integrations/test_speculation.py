"""Speculative decoding on the emulated NPU, compared with stock vLLM under the same speculation."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from aclgraph_dispatch.bench.engine import EngineFailedError, EngineRun
from aclgraph_dispatch.integrations.compat import UNSUPPORTED
from aclgraph_dispatch.integrations.drafter import role_of

from ..engines import CHECK, EXPLORE, start, started

pytestmark = pytest.mark.engine

slow = pytest.mark.slow
NUM_DRAFTS = {"gqa-ngram-1": 1, "gqa-ngram-3": 3, "gqa-drafter": 3, "gqa-lora-ngram": 3}
PADDED = ["gqa-ngram-1", "gqa-ngram-3", "gqa-drafter", pytest.param("gqa-lora-ngram", marks=slow)]
DISPATCHED = [
    ("gqa-ngram-1", "full_and_piecewise"),
    ("gqa-ngram-3", "full_and_piecewise"),
    ("gqa-drafter", "full_and_piecewise"),
    ("gqa-ngram-dynamic", "full_and_piecewise"),
    ("gqa-sampled", "full_and_piecewise"),
    pytest.param("gqa-lora-ngram", "full_and_piecewise", marks=slow),
    pytest.param("gqa-drafter", "full_decode_only", marks=slow),
    pytest.param("mla-ngram-1", "piecewise", marks=slow),
]
COMPARED = ("tokens", "texts", "samples", "logprobs", "prompt_logprobs")

IMPORTS = """
from aclgraph_dispatch.integrations import model_runner
from aclgraph_dispatch.integrations.draft_padding import DraftPadding
"""
FAULTS = {
    "pads that write": (
        "gqa-ngram-3",
        "lay_out = DraftPadding.lay_out_tokens\n"
        "DraftPadding.lay_out_tokens = lambda self, buffer, *, dim=0, pad=None: lay_out(self, buffer, dim=dim)",
        {"tokens"},
    ),
    "lengths without pads": (
        "gqa-ngram-3",
        "DraftPadding.lay_out_lengths = lambda self, lengths: None",
        {"tokens"},
    ),
    "starts not uniform": ("gqa-ngram-3", "DraftPadding.lay_out_starts = lambda self, starts: None", {"tokens"}),
    "nothing gathered": ("gqa-ngram-3", "DraftPadding.gather = lambda self, output: output", {"tokens"}),
    "hidden states that the drafter overwrites": (
        "gqa-drafter",
        "model_runner.tree_map_only = lambda kind, function, tree: tree",
        {"prompt_logprobs"},
    ),
}
"""Name: variant, statements that bring it about, and what is not that of stock then. No engine fails."""


@pytest.fixture(scope="module", autouse=True)
def _engines(request: pytest.FixtureRequest) -> None:
    """
    Start in the background what the selected tests will ask for.
    """
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.function is test_outputs_are_those_of_stock:
            started(item.callspec.params["variant"], None)
            started(item.callspec.params["variant"], item.callspec.params["policy"])


def routes(run: EngineRun, mode: str) -> dict[str, int]:
    """
    Steps in *mode* by reason.
    """
    return {route["reason"]: route["steps"] for route in run.report["routes"] if route["mode"] == mode}


def speculation(run: EngineRun) -> dict[str, float]:
    """
    What vLLM counts of drafts.
    """
    return {name: value for name, value in run.metrics.items() if "spec_decode" in name}


def decodes(run: EngineRun, query_len: int) -> Iterable[tuple[str, bool]]:
    """
    Of every step that was no prefill: its mode, and whether all its requests had *query_len* tokens.
    """
    for step in run.report["decisions"]:
        if step["reason"] not in ("MIXED", "PREFILL"):
            yield step["mode"], step["tokens"] == step["requests"] * query_len


@pytest.mark.parametrize(("variant", "policy"), DISPATCHED)
def test_outputs_are_those_of_stock(variant: str, policy: str) -> None:
    """
    Tokens, log probabilities (bit for bit), outputs by a grammar and all outputs of a request are stock's.
    """
    stock = attrs.asdict(started(variant, None).result())
    run = attrs.asdict(started(variant, policy).result())

    for name in COMPARED:
        assert stock[name] == run[name], name


@pytest.mark.parametrize("variant", PADDED)
def test_acceptance_is_that_of_stock(variant: str) -> None:
    """
    As many drafts are proposed and accepted, so neither the drafter nor the statistics see a pad.
    """
    counts = speculation(started(variant, None).result())

    assert counts == speculation(started(variant, "full_and_piecewise").result())
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("variant", PADDED)
def test_decodes_go_full(variant: str) -> None:
    """
    Uniform drafts and ragged ones replay FULL graphs; that their sizes are whole requests nobody had to say.
    """
    run = started(variant, "full_and_piecewise").result()
    query_len = 1 + NUM_DRAFTS[variant]
    steps = list(decodes(run, query_len))

    assert ("FULL", True) in steps
    assert ("FULL", False) in steps
    assert all(size % query_len == 0 for size in run.report["full_sizes"])
    assert 0 == run.report["host_synchronizations"]


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("full_and_piecewise", "PIECEWISE"), pytest.param("full_decode_only", "NONE", marks=slow)],
)
def test_ragged_drafts_that_must_stay(policy: str, mode: str) -> None:
    """
    Where a request would grow beyond the model's maximum length its drafts are not padded, and the reason is told.
    """
    run = started("gqa-drafter", policy).result()

    assert routes(run, mode)["RAGGED"] > 0
    assert "RAGGED" not in routes(run, "FULL")


def test_drafter_has_graphs_of_its_own() -> None:
    """
    A drafter replays PIECEWISE graphs, one a size and piece (layers + 1) and counted apart; it has no FULL ones.
    """
    report = started("gqa-drafter", "full_and_piecewise").result().report
    num_sizes = len(report["piecewise_sizes"])

    assert {"PIECEWISE": 4 * num_sizes} == report["draft_graphs"]
    assert {"PIECEWISE": 5 * num_sizes, "FULL": len(report["full_sizes"])} == report["graphs"]
    assert sum(report["graphs"].values()) == sum(report["graphs_per_size"].values())
    assert report["streams_held"] == sum(report["graphs"].values()) + sum(report["draft_graphs"].values())
    assert report["draft_passes"]["PIECEWISE"] > 50


@slow
def test_drafter_without_graphs() -> None:
    """
    Where the target has no PIECEWISE graphs the drafter, which vLLM gives no others, runs eagerly.
    """
    report = started("gqa-drafter", "full_decode_only").result().report

    assert {} == report["draft_graphs"]
    assert {"NONE"} == set(report["draft_passes"])


@slow
def test_single_token_backend() -> None:
    """
    A backend whose FULL graphs take one token a request verifies no drafts in them.
    """
    run = started("mla-ngram-1", "piecewise").result()

    assert {} == routes(run, "FULL")
    assert routes(run, "PIECEWISE")["PADDED"] > 20


@slow
def test_single_token_backend_and_full_graphs() -> None:
    """
    A policy that wants more of such a backend than it can do is refused.
    """
    with pytest.raises(EngineFailedError, match=r"'full_and_piecewise' cannot be run here: .* PIECEWISE"):
        start("mla-ngram-1", "full_and_piecewise").result()


@slow
def test_explored() -> None:
    """
    With the device behind the host, padded drafts and all, the tokens are those of stock.
    """
    run = start("gqa-ngram-3", "full_and_piecewise", EXPLORE.format(seed=0)).result()

    assert started("gqa-ngram-3", None).result().tokens == run.tokens


@slow
def test_checked() -> None:
    """
    The check mode finds every replay equal to its operators, the drafter's among them, and changes no token.
    """
    run = start("gqa-drafter", "full_and_piecewise", CHECK).result()

    assert started("gqa-drafter", None).result().tokens == run.tokens


@slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_part_matters(fault: str) -> None:
    """
    With any part left out the engine runs on, and what is compared with stock is not the same: the comparison can
    fail.
    """
    variant, statements, differing = FAULTS[fault]
    stock = attrs.asdict(started(variant, None).result())
    run = attrs.asdict(start(variant, "full_and_piecewise", IMPORTS + statements).result())

    assert differing <= {name for name in COMPARED if stock[name] != run[name]}


@pytest.mark.parametrize(
    ("tag", "role"),
    [("draft_model", "draft"), ("backbone", "target"), ("cross_decoder", "target"), (None, "target")],
)
def test_role(tag: str | None, role: str) -> None:
    """
    A piece belongs to the drafter if it was compiled under a drafter's tag.
    """
    piece: Any = SimpleNamespace(vllm_backend=SimpleNamespace(prefix=tag)) if tag else SimpleNamespace()

    assert role == role_of(piece)


SPECULATION = {
    "method": "draft_model",
    "parallel_drafting": False,
    "has_inner_state": False,
    "use_mla": False,
    "draft_model_config": SimpleNamespace(use_mla=False),
}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, set()),
        ({"method": "ngram"}, set()),
        ({"method": "medusa"}, {"speculative decoding by the method"}),
        ({"use_mla": True}, {"a draft model with or for multi-head latent attention"}),
        (
            {"draft_model_config": SimpleNamespace(use_mla=True)},
            {"a draft model with or for multi-head latent attention"},
        ),
        ({"method": "ngram", "use_mla": True}, set()),
        ({"parallel_drafting": True}, {"parallel drafting"}),
        ({"has_inner_state": True}, {"speculative decoding of recurrent and hybrid models"}),
    ],
)
def test_refused(changes: dict[str, Any], refused: set[str]) -> None:
    """
    Of speculation, what was never run is refused.
    """
    fields = SimpleNamespace(**SPECULATION | changes)
    config: Any = SimpleNamespace(speculative_config=fields, model_config=fields)
    rows = [row for row in UNSUPPORTED if "specul" in row.name or "draft" in row.name]

    assert refused == {row.name for row in rows if row.is_used(config)}


def test_dynamic_speculation() -> None:
    """
    Where vLLM chooses the number of drafts by the number of requests, there are FULL graphs for each; vLLM itself
    would give them up.
    """
    run = started("gqa-ngram-dynamic", "full_and_piecewise").result()
    lengths = {
        step["padded"] // step["requests"]
        for step in run.report["decisions"]
        if (step["mode"], step["reason"]) == ("FULL", "EXACT")
    }

    assert [1, 2, 4] == run.report["query_lens"] == sorted(lengths)
    assert 3 * len(run.report["full_sizes"]) == run.report["graphs"]["FULL"]
    assert started("gqa-ngram-dynamic", None).result().tokens == run.tokens
