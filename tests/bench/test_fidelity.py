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
    assert [False] * 3 == [control["inside"] for control in figures(anchor)["controls"].values()]
    assert "cannot tell" not in describe(anchor)
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
        ({"settings": {"max_num_seqs": None}}, "meta.json, max_num_seqs: must be an integer >= 1: None"),
        ({"settings": {"max_num_seqs": "8"}}, "meta.json, max_num_seqs: must be an integer >= 1: '8'"),
        ({"settings": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size: 2 is not simulated"),
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


def settled(requests: list[dict], comparison) -> list[dict]:
    """
    The same requests, with the times that were simulated.
    """
    times = zip(comparison.simulated.ttft, comparison.simulated.e2el, strict=True)
    return [
        row | {"first_token_ts": row["queued_ts"] + ttft, "last_token_ts": row["queued_ts"] + e2el}
        for row, (ttft, e2el) in zip(requests, times, strict=True)
    ]


def test_control_inside_is_told(tmp_path):
    """
    A negative control that a run cannot tell apart is told, and is no failure: here nobody decodes beside a
    prefill, and no step comes near a budget of 512.
    """
    requests = settled(rows(), simulate(tmp_path / "first").comparisons["simulated"])
    result = simulate(tmp_path / "second", requests=requests)

    assert [] == result.failures
    assert [True, True, True] == [c["inside"] for c in figures(result)["controls"].values()]
    assert 3 == describe(result).count("inside: this run cannot tell it apart")
    assert "inside the gate" == describe(result).splitlines()[-1]


def test_budget_that_holds_not_every_request(tmp_path):
    """
    A token budget below a run's number of requests is no engine's, and left out of the controls.
    """
    result = simulate(tmp_path, settings={"max_num_seqs": 600, "max_num_batched_tokens": 2048})

    assert [name for name in CONTROLS if "512" not in name] == list(result.controls)


@pytest.mark.parametrize("make_scheduler", [CompactScheduler, VllmScheduler])
def test_no_request_has_a_second_token(tmp_path, make_scheduler):
    """
    Without a second token there is no TPOT: it is told, null in the JSON, and judged by nobody.
    """
    requests = [row | {"output_toks": 1, "last_token_ts": row["first_token_ts"]} for row in rows()]
    profile = write_profile(tmp_path / "profile")
    first = run_fidelity(profile, write_run(tmp_path / "first", requests), make_scheduler=make_scheduler)
    requests = settled(requests, first.comparisons["simulated"])
    result = run_fidelity(profile, write_run(tmp_path / "run", requests), make_scheduler=make_scheduler)
    printed = json.loads(json.dumps(figures(result), allow_nan=False))

    assert [] == result.failures
    assert printed["comparisons"]["simulated"]["errors"]["mean TPOT"] is None
    assert {"real": None, "simulated": None} == printed["comparisons"]["simulated"]["milliseconds"]["mean TPOT"]
    assert 2 == describe(result).count("no request has a second token")


def test_times_of_nothing(tmp_path):
    """
    A measured time of zero, from a coarse clock, cannot be met: it is outside the gate, and null in the JSON.
    """
    requests = [row | {"first_token_ts": row["queued_ts"], "last_token_ts": row["queued_ts"]} for row in rows()]
    result = simulate(tmp_path, requests=requests)
    printed = json.loads(json.dumps(figures(result), allow_nan=False))

    assert [f"{name} is outside the gate" for name in GATE] == result.failures
    assert {None} == set(printed["comparisons"]["simulated"]["errors"].values())


@pytest.mark.parametrize("make_scheduler", [CompactScheduler, VllmScheduler])
def test_request_longer_than_the_model(tmp_path, make_scheduler):
    """
    A prompt that the longest sequence cannot hold is the same error with both schedulers.
    """
    profile = write_profile(tmp_path / "profile")
    run = write_run(tmp_path / "run", rows(), settings={"max_model_len": 40})

    with pytest.raises(ConfigError, match="prompt and output together must be <= max_model_len = 40: 45"):
        run_fidelity(profile, run, make_scheduler=make_scheduler)


@pytest.mark.parametrize("make_scheduler", [CompactScheduler, VllmScheduler])
def test_small_cache_and_failed_requests(tmp_path, make_scheduler):
    """
    A run of a newer vLLM with few blocks is simulated with its preemptions, without the requests that failed.
    """
    long = [row | {"output_toks": 60, "arrival_time": 1000.0, "queued_ts": 50.0} for row in rows()]
    for row in long:
        row |= {"first_token_ts": 50.5, "last_token_ts": 52.0}
    long[3] |= {"first_token_ts": None, "last_token_ts": None}
    meta = {
        "vllm_version": "0.28.0",
        "kv_cache": {"num_gpu_blocks": 20},
        "resolved_config": {
            "cache_config": {"block_size": 16, "enable_prefix_caching": True},
            "compilation_config": {"cudagraph_capture_sizes": [64, 32, 8, 4, 2, 1]},
        },
    }
    profile = write_profile(tmp_path / "profile")
    run = write_run(tmp_path / "run", long, settings={"model": "/models/Llama-3.1-8B"}, meta=meta, blocks=False)
    result = run_fidelity(profile, run, make_scheduler=make_scheduler)
    comparison = result.comparisons["simulated"]

    assert 20 == result.setup.settings.num_blocks
    assert comparison.num_preemptions > 0
    assert 29 == len(comparison.real.ttft) == len(comparison.simulated.ttft)
    assert "assumed: 1 of 30 requests failed: they are left out, and took no time" in describe(result)


def test_experts_on_two_engines(tmp_path):
    """
    A data-parallel run of a model with experts is simulated on as many engines, each with its own blocks.
    """
    names = {"model": "Qwen/Qwen3-30B-A3B"}
    profile = write_profile(tmp_path / "profile", skew=False, moe=True, more_meta=names)
    table = (profile / "moe.csv").read_text().splitlines()
    (profile / "moe.csv").write_text("\n".join([table[0], *(f"2{line[1:]}" for line in table[1:])]))
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": None}
    meta = names | {"kv_cache": {"num_gpu_blocks": 75638}}
    run = write_run(tmp_path / "run", rows(), settings=settings, meta=meta)
    result = run_fidelity(profile, run, make_scheduler=CompactScheduler)

    assert (2, 37819) == (result.setup.num_ranks, result.setup.settings.num_blocks)
    assert [] == result.failures
    assert LINKS.keys() == result.comparisons.keys()


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
    profile = write_profile(tmp_path / "profile", skew=False, more_meta={key: value})
    run = write_run(tmp_path / "run", rows(), meta={key: value})

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


def test_command_with_controls_inside(tmp_path):
    """
    A run that the simulation meets gives exit code 0, though no negative control can be told apart on it.
    """
    profile = write_profile(tmp_path / "profile")
    first = run_fidelity(profile, write_run(tmp_path / "first", rows()), make_scheduler=CompactScheduler)
    run = write_run(tmp_path / "run", settled(rows(), first.comparisons["simulated"]))
    result = CliRunner().invoke(
        main, ["bench", "fidelity", "--profile", str(profile), "--run", str(run), "--fast"]
    )

    assert 0 == result.exit_code
    assert all(control["inside"] for control in json.loads(result.output.splitlines()[-1])["controls"].values())


def test_command_without_its_folders(tmp_path):
    """
    A folder that does not exist is one error, with exit code 2.
    """
    arguments = ["bench", "fidelity", "--profile", str(tmp_path / "no"), "--run", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)

    assert 2 == result.exit_code
    assert "does not exist" in result.output
