import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aclgraph_dispatch.bench.compare import Case, compare, load_trace, simulate_case
from aclgraph_dispatch.bench.contenders import CONTENDERS
from aclgraph_dispatch.bench.table import table
from aclgraph_dispatch.errors import ConfigError, TraceError
from tests.test_calibration import CALIBRATION, EAGER, written

CASE = Case(trace="azure-conv", model="deepseek-v2-lite", device="ascend-910b", limit=60, is_fast=True)


def without_vllm(document):
    return {**document, "settings": {**document["settings"], "scheduler": None}}


@pytest.fixture(scope="module")
def document():
    return compare(CASE, list(CONTENDERS))


def test_jobs_do_not_change_the_document(document):
    """
    The document is the same, bit for bit, however many processes made it.
    """
    assert json.dumps(document) == json.dumps(compare(CASE, list(CONTENDERS), jobs=2))


def test_schedulers_give_the_same_document(document):
    """
    vLLM's scheduler and the compact one give the same document, bit for bit.
    """
    real = compare(attrs.evolve(CASE, is_fast=False), list(CONTENDERS))

    assert json.dumps(without_vllm(document)) == json.dumps(without_vllm(real))


def test_nobody_beats_the_oracle(document):
    """
    No contender has a lower TPOT than the oracle, and eager decodes are the slowest on a model of many kernels.
    """
    tpot = {c["name"]: c["metrics"]["tpot_ms"]["mean"] for c in document["contenders"]}

    assert tpot["oracle"] == min(tpot.values())
    assert tpot["eager"] == max(tpot.values())


def test_seed_changes_the_trace():
    """
    Another seed gives other requests.
    """
    other = attrs.evolve(CASE, seed=1)

    assert load_trace(CASE).sha256 != load_trace(other).sha256


def test_document_says_what_was_simulated(document):
    """
    The document holds the settings, the trace's hash, and what each contender captured.
    """
    by_name = {c["name"]: c for c in document["contenders"]}

    assert "fast" == document["settings"]["scheduler"]
    assert 60 == document["trace"]["num_requests"]
    assert load_trace(CASE).sha256 == document["trace"]["sha256"]
    assert 2048 == by_name["to_budget"]["piecewise_sizes"][-1]
    assert [] == by_name["eager"]["full_sizes"]
    assert 0 == by_name["eager"]["metrics"]["graphs"]
    assert by_name["full_and_piecewise"]["metrics"]["capture_seconds"] > 0


@given(
    st.sampled_from(list(CONTENDERS)),
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["qwen2.5-7b", "deepseek-v3"]),
    st.floats(0.2, 20),
)
@settings(max_examples=25, deadline=None)
def test_every_case_serves_all_requests(name, is_async, num_spec_tokens, ranks, model, rate):
    """
    Whatever the contender and the settings, every request gets its tokens, and ranks take as many steps.
    """
    case = attrs.evolve(
        CASE,
        model=model,
        limit=25,
        rate=rate,
        async_scheduling=is_async,
        num_spec_tokens=num_spec_tokens,
        ranks=ranks,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    simulation = simulate_case(case, name)
    trace = load_trace(case)

    assert [r.output_tokens for r in trace.requests] == [len(times) for times in simulation.token_seconds]
    counts = {rank: sum(s.rank == rank for s in simulation.steps) for rank in range(ranks)}
    assert 1 == len(set(counts.values()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trace": "nowhere.csv"}, TraceError, "nowhere.csv cannot be read as a trace"),
        ({"model": "gpt-9"}, ConfigError, "'model' must be one of .*: 'gpt-9'"),
        ({"device": "abacus"}, ConfigError, "'device' must be one of .*: 'abacus'"),
        ({"rate": 0.0}, ConfigError, "rate must be finite and > 0"),
        ({"start_seconds": 5.0, "end_seconds": 4.0}, ConfigError, "start must be >= 0 and before the end"),
        (
            {"num_blocks": 100},
            ConfigError,
            "'max_model_len' must fit into the KV cache of 100 blocks, 1584",
        ),
        ({"model": "qwen3-235b-a22b", "device": "ascend-910c", "num_blocks": None}, None, ""),
        (
            {"num_spec_tokens": 3, "max_num_batched_tokens": 3},
            ConfigError,
            "must hold a decode with its drafts, 4 tok",
        ),
        ({"max_model_len": 2}, ConfigError, "'max_model_len' must be above the shortest prompt"),
    ],
)
def test_impossible_case(changes, error, message):
    """
    What cannot be simulated is one error that names the setting.
    """
    case = attrs.evolve(CASE, **changes)
    if error is None:
        assert compare(case, ["eager"])["contenders"]
        return
    with pytest.raises(error, match=message):
        compare(case, ["eager"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eager", "fastest"], "must be among .*: 'fastest'"),
        (["eager", "eager"], "each once: 'eager, eager'"),
        ([], "must be among"),
    ],
)
def test_unknown_contender(names, message):
    """
    A contender that is unknown or named twice is an error, and so is none.
    """
    with pytest.raises(ConfigError, match=message):
        compare(CASE, names)


def test_ratios_by_the_default(document):
    """
    Each contender's latencies are compared with those of vLLM's default over the same requests.
    """
    by_name = {c["name"]: c for c in document["contenders"]}
    ratio = by_name["eager"]["versus_default"]["tpot_ms"]

    assert {"ratio": 1.0, "low": 1.0, "high": 1.0} == by_name["full_and_piecewise"]["versus_default"]["tpot_ms"]
    assert 1 < ratio["low"] < ratio["ratio"] < ratio["high"]
    assert "per_request" not in by_name["eager"]
    assert compare(CASE, ["eager"])["contenders"][0]["versus_default"] is None


def test_calibration_as_a_device(tmp_path):
    """
    Steps may be timed by a calibration; what lies beyond its measurements is said, and so is what nobody measured.
    """
    calibration = attrs.evolve(CALIBRATION, passes=dict.fromkeys(("NONE", "PIECEWISE", "FULL"), EAGER))
    path = written(tmp_path, calibration.dumps())
    case = attrs.evolve(CASE, device=str(path), model="qwen2.5-7b", num_blocks=5000, limit=20)
    found = compare(case, ["full_and_piecewise", "oracle"])
    metrics = found["contenders"][0]["metrics"]

    assert "cpu" == found["device"]["name"]
    assert 0 < metrics["extrapolated_share"] <= 1
    assert metrics["capture_seconds"] is None
    assert f"up to {100 * metrics['extrapolated_share']:.0f} % of steps lie beyond what was measured" in table(
        found
    )

    with pytest.raises(ConfigError, match="'num_blocks' must be given with a calibration"):
        compare(attrs.evolve(case, num_blocks=None), ["eager"])
    with pytest.raises(ConfigError, match="'device' must be a calibration of the model that is compared"):
        compare(attrs.evolve(case, model="deepseek-v2-lite"), ["eager"])
