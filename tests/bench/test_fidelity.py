import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from aclgraph_dispatch.bench.compact_scheduler import CompactScheduler
from aclgraph_dispatch.bench.fidelity import CONTROLS, GATE, LINKS, Fidelity, describe, figures, run_fidelity
from aclgraph_dispatch.bench.vllm_scheduler import VllmScheduler
from aclgraph_dispatch.cli import main
from aclgraph_dispatch.errors import ConfigError
from tests.bench.profiles import write_profile, write_run

ANCHOR = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "anchors/RTXPRO6000_Llama-3.1-8B")
needs_anchor = pytest.mark.skipif(not ANCHOR.is_dir(), reason="the recorded run is not beside the checkout")


def rows(scale: float = 1.0) -> list[dict]:
    """
    Requests of a run whose times are *scale* times those that the made-up profile gives.
    """
    return [
        {
            "input_toks": 40,
            "output_toks": 5,
            "arrival_time": 1000.0 + i,
            "queued_ts": 50.0 + i,
            "first_token_ts": 50.0 + i + scale * (FIRST_MS / 1e3),
            "last_token_ts": 50.0 + i + scale * (FIRST_MS + 4 * NEXT_MS) / 1e3,
        }
        for i in range(30)
    ]


# Of the made-up profile: a prompt of 40 tokens, and four decodes behind it.
FIRST_MS, NEXT_MS = 0.9, 0.6


@pytest.fixture(scope="module")
def anchor() -> Fidelity:
    if not ANCHOR.is_dir():
        pytest.skip("the recorded run is not beside the checkout")
    return run_fidelity(ANCHOR / "profile", ANCHOR / "run", make_scheduler=VllmScheduler)


def test_recorded_run_is_met(anchor):
    """
    On vLLM's scheduler the recorded run comes out within the gate, in as many steps as it had.
    """
    comparison = anchor.comparisons["simulated"]

    assert [] == comparison.outside()
    assert comparison.errors().keys() == GATE.keys()
    assert 2408 == comparison.num_steps
    assert 0 == comparison.num_preemptions
    # Nobody is fitted: what is left is an engine's overhead, which the profile does not have.
    assert -0.02 < comparison.errors()["mean TPOT"] < 0


def test_negative_controls_are_found(anchor):
    """
    Every negative control falls outside the gate.
    """
    assert CONTROLS.keys() == anchor.controls.keys()
    assert all(control.outside() for control in anchor.controls.values())
    assert [] == anchor.failures


@needs_anchor
def test_compact_scheduler_gives_the_same(anchor):
    """
    The compact scheduler gives the same errors, to the last bit.
    """
    fast = run_fidelity(ANCHOR / "profile", ANCHOR / "run", make_scheduler=CompactScheduler)

    assert figures(anchor) == figures(fast)


def simulate(tmp_path: Path, *, settings: dict | None = None, requests: list[dict] | None = None, **options):
    profile = write_profile(tmp_path / "profile", skew="tensor_parallel_size" not in (settings or {}))
    run = write_run(tmp_path / "run", requests or rows(), settings=settings)
    return run_fidelity(profile, run, make_scheduler=CompactScheduler, **options)


def test_another_card_and_model(tmp_path):
    """
    A run of another card and model is simulated from what its files say, and what they do not say is told.
    """
    result = simulate(tmp_path)

    assert "NVIDIA GeForce RTX 4090" == result.card
    assert 2000 < result.setup.settings.num_blocks < 3500
    assert ["blocks of the KV cache", "default capture sizes", "no prompt shares"] == [
        part
        for part, assumption in zip(
            ("blocks of the KV cache", "default capture sizes", "no prompt shares"),
            result.setup.assumptions,
            strict=True,
        )
        if part in assumption
    ]


def test_gate_finds_a_slower_run(tmp_path):
    """
    A run that took much longer than the simulation is outside the gate, and named.
    """
    slow = simulate(tmp_path, requests=rows(scale=5))

    assert "mean TPOT is outside the gate" in slow.failures
    assert slow.comparisons["simulated"].errors()["mean TPOT"] < -0.5


def test_several_cards_are_a_band(tmp_path):
    """
    A run on several cards is simulated with fast and slow links, and not judged.
    """
    result = simulate(tmp_path, settings={"tensor_parallel_size": 2})
    fast, slow = (result.comparisons[name].means()["mean TPOT"][1] for name in LINKS)

    assert fast < slow
    assert not result.is_judged
    assert [] == result.failures
    assert "several cards" in describe(result)
    assert figures(result)["gate"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"max_num_seqs": None}}, "engine_kwargs.max_num_seqs: must be an integer >= 1: None"),
        ({"settings": {"max_num_seqs": "8"}}, "engine_kwargs.max_num_seqs: must be an integer >= 1: '8'"),
        ({"num_blocks": 2}, "'num_blocks' must hold the longest request"),
        ({"model_config": Path("nowhere.json")}, r"nowhere.json must be a model's config.json"),
    ],
)
def test_impossible_run(tmp_path, options, message):
    """
    What cannot be simulated is one error.
    """
    with pytest.raises(ConfigError, match=message):
        simulate(tmp_path, **options)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "someone/Nothing-3B", "the model 'someone/Nothing-3B' must be one of .*--model-config"),
        ("gpu", "A card", "the memory of 'A card' is not known.*--num-blocks"),
    ],
)
def test_unknown_model_or_card(tmp_path, key, value, message):
    """
    An unknown model or card is an error that names the option which helps.
    """
    profile, run = write_profile(tmp_path / "profile", skew=False), write_run(tmp_path / "run", rows())
    meta = {"model": "someone/Llama-3.1-8B", "gpu": "NVIDIA GeForce RTX 4090"} | {key: value}
    (profile / "meta.yaml").write_text(json.dumps(meta))

    with pytest.raises(ConfigError, match=message):
        run_fidelity(profile, run, make_scheduler=CompactScheduler)


def test_command(tmp_path):
    """
    The command prints a table and, as its last line, JSON; it fails where the gate does.
    """
    profile = write_profile(tmp_path / "profile")
    slow = write_run(tmp_path / "slow", rows(scale=5))
    arguments = ["bench", "fidelity", "--profile", str(profile), "--run", str(slow), "--fast"]
    result = CliRunner().invoke(main, arguments)
    printed = json.loads(result.output.splitlines()[-1])

    assert 1 == result.exit_code
    assert printed["failures"]
    assert "  mean TPOT" in result.output
    assert [] == [
        line for line in CliRunner().invoke(main, [*arguments, "--json"]).output.splitlines()[1:] if line
    ]


def test_command_without_its_folders(tmp_path):
    """
    A folder that does not exist is one error, with exit code 2.
    """
    arguments = ["bench", "fidelity", "--profile", str(tmp_path / "no"), "--run", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)

    assert 2 == result.exit_code
    assert "does not exist" in result.output
