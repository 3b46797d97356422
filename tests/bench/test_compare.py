import json
import os

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aclgraph_dispatch.bench import case as case_module
from aclgraph_dispatch.bench.case import Case, find_model, load_trace
from aclgraph_dispatch.bench.compare import compare, run_all, simulate_case
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
    st.sampled_from(["deepseek-v2-lite", "deepseek-v3"]),
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
        ({"model": "qwen2.5-7b", "ranks": 4}, ConfigError, "must be 1: 4; simulate one .*--rate 0.25"),
        (
            {"device": "h200", "model": "qwen3-235b-a22b", "tensor_parallel": 1},
            ConfigError,
            "share it among more ranks",
        ),
        ({"num_spec_tokens": 17}, ValueError, "'num_spec_tokens' must be <= 16"),
        ({"slo_tpot_ms": float("nan")}, ValueError, "'slo_tpot_ms' must be >= 0"),
        ({"slo_tpot_ms": float("inf")}, ValueError, "'slo_tpot_ms' must be <= "),
        ({"rate": 1e-300}, ConfigError, "'rate' must leave all arrivals below"),
        ({"max_model_len": 2}, ConfigError, "'max_model_len' must be above the shortest prompt"),
    ],
)
def test_impossible_case(changes, error, message):
    """
    What cannot be simulated is one error that names the setting.
    """
    if error is None:
        assert compare(attrs.evolve(CASE, **changes), ["eager"])["contenders"]
        return
    with pytest.raises(error, match=message):
        compare(attrs.evolve(CASE, **changes), ["eager"])


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

    with pytest.raises(ConfigError, match="'num_spec_tokens' must be 0 and 'ranks' 1 with a calibration"):
        compare(attrs.evolve(case, num_spec_tokens=1), ["eager"])
    with pytest.raises(ConfigError, match="'tensor_parallel' and 'weight_bytes' are those of the calibration"):
        compare(attrs.evolve(case, weight_bytes=1.0), ["eager"])
    with pytest.raises(ConfigError, match="'num_blocks' must be given with a calibration"):
        compare(attrs.evolve(case, num_blocks=None), ["eager"])
    with pytest.raises(ConfigError, match="'device' must be a calibration of the model that is compared"):
        compare(attrs.evolve(case, model="deepseek-v2-lite"), ["eager"])


def tpot(case: Case, name: str = "full_and_piecewise") -> float:
    return float(compare(case, [name])["contenders"][0]["metrics"]["tpot_ms"]["mean"])


def test_settings_reach_the_cost():
    """
    Steps without async scheduling take longer, heavier weights too, and layers shared by more ranks less.
    """
    case = attrs.evolve(CASE, model="qwen3-8b", limit=10)

    assert tpot(attrs.evolve(case, async_scheduling=False)) > tpot(case) + 2
    assert tpot(attrs.evolve(case, weight_bytes=1.0)) < tpot(case)
    assert tpot(attrs.evolve(case, tensor_parallel=4)) < tpot(case)


def test_experts_are_spread_over_ranks():
    """
    Ranks of an expert model share the experts, and those see the tokens of all ranks.
    """
    alone, _ = find_model(CASE)
    shared, tensor_parallel = find_model(attrs.evolve(CASE, ranks=4))
    group, of_group = find_model(attrs.evolve(CASE, model="deepseek-v3", ranks=2))

    assert (1, 16) == (tensor_parallel, of_group)
    assert alone.expert_bytes / 4 == shared.expert_bytes
    assert (1.0, 4.0, 2.0) == (alone.expert_tokens, shared.expert_tokens, group.expert_tokens)


def test_groups_of_ranks_take_streams():
    """
    The legacy ladder has fewer sizes the more kinds of parallelism there are.
    """
    sizes = [
        len(compare(case, ["legacy"])["contenders"][0]["piecewise_sizes"])
        for case in (
            CASE,
            attrs.evolve(CASE, ranks=2),
            attrs.evolve(CASE, tensor_parallel=2),
            attrs.evolve(CASE, ranks=2, tensor_parallel=2),
        )
    ]

    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]


def test_graphs_take_memory():
    """
    The more graphs are captured, the more memory they are said to take; the KV cache is the same for all.
    """
    found = compare(CASE, ["eager", "full_and_piecewise", "to_budget"])
    taken = [c["metrics"]["graph_bytes"] for c in found["contenders"]]

    assert 0 == taken[0] < taken[1] < taken[2]
    assert found["settings"]["num_blocks"] > 50_000


def test_graphs_and_streams():
    """
    A FULL size is a graph, a PIECEWISE one as many as there are pieces; each takes a stream, and with groups of
    ranks those of their communication.
    """
    alone, grouped = (
        compare(attrs.evolve(CASE, tensor_parallel=ways), ["full_and_piecewise"])["contenders"][0]
        for ways in (1, 2)
    )
    graphs = len(alone["full_sizes"]) + 28 * len(alone["piecewise_sizes"])

    assert graphs == alone["metrics"]["graphs"] == alone["metrics"]["streams"]
    assert 3 * graphs == grouped["metrics"]["streams"]


def test_limit_counts_inside_a_slice():
    """
    A limit takes the first requests of the slice, not of the trace; what is cut or left out is counted.
    """
    sliced = attrs.evolve(CASE, start_seconds=60.0, limit=5, max_model_len=1000)
    whole = load_trace(attrs.evolve(CASE, limit=None))
    found = compare(sliced, ["eager"])["trace"]
    expected = [r for r in whole.requests if r.arrival_seconds >= 60][:5]

    assert [r.prompt_tokens for r in expected] == [r.prompt_tokens for r in load_trace(sliced).requests]
    assert sum(r.prompt_tokens >= 1000 for r in expected) == found["num_too_long"]
    assert sum(r.prompt_tokens < 1000 < r.prompt_tokens + r.output_tokens for r in expected) == found["num_cut"]


def test_luck_depends_on_the_seed():
    """
    Another seed accepts other drafts of the same requests; so do the intervals depend on it.
    """
    path_free = {"num_spec_tokens": 3, "model": "qwen2.5-7b", "limit": 40}
    first, second = (attrs.evolve(CASE, seed=seed, **path_free) for seed in (0, 1))
    requests = load_trace(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_module, "load_trace", lambda _case: requests)

        assert tpot(first) != tpot(second)


def test_choosing_by_cost_is_not_worse():
    """
    On a dense model, where padding costs, and on one with many kernels, where eager does, choosing by cost is as
    good as the better fixed ladder.
    """
    for model in ("qwen2.5-7b", "deepseek-v2-lite", "deepseek-v3"):
        case = attrs.evolve(CASE, model=model, limit=150)
        best = min(tpot(case, name) for name in ("full_and_piecewise", "to_budget"))

        assert tpot(case, "by_cost") <= 1.005 * best


def test_process_that_is_killed():
    """
    A process that dies is one error, not a traceback of the pool.
    """
    with pytest.raises(ConfigError, match="a process of '--jobs' was killed"):
        list(run_all([(CASE, "die"), (CASE, "eager")], jobs=2, run=die))


def die(_case: Case, _name: str) -> dict:
    os._exit(9)
