import json

import pytest
from click.testing import CliRunner

from aclgraph_dispatch.cli import main

COMPARE = ["bench", "compare", "--trace", "azure-conv", "--model", "qwen2.5-7b", "--device", "ascend-910b"]
FEW = ["--limit", "15", "--fast"]


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_compare(tmp_path):
    """
    The command prints a table and, as its last line, JSON; it writes the page, all figures and a timeline.
    """
    paths = [tmp_path / name for name in ("out.html", "out.json", "timeline.json")]
    result = invoke(
        *COMPARE,
        *FEW,
        *("--policies", "eager, full_and_piecewise"),
        *("--html", str(paths[0]), "--json", str(paths[1]), "--timeline", str(paths[2])),
    )
    lines = result.output.splitlines()
    printed, written = json.loads(lines[-1]), json.loads(paths[1].read_text())

    assert 0 == result.exit_code, result.output
    assert ["eager", "full_and_piecewise"] == [c["name"] for c in printed["contenders"]]
    assert written["contenders"][0]["metrics"] == printed["contenders"][0]["metrics"]
    assert "series" in written["contenders"][0]
    assert any(line.startswith("full_and_piecewise ") for line in lines)
    assert "<svg" in paths[0].read_text()
    assert json.loads(paths[2].read_text())["traceEvents"]


def test_sweep(tmp_path):
    """
    A sweep prints a table for each comparison, and keeps results and pages.
    """
    arguments = ["bench", "sweep", "--traces", "azure-conv,sharegpt", "--models", "qwen2.5-7b"]
    arguments += ["--devices", "h200", "--rates", "1,2", "--policies", "eager", "--out", str(tmp_path), "--html"]
    result = invoke(*arguments, *FEW)

    assert 0 == result.exit_code, result.output
    assert 4 == len(json.loads(result.output.splitlines()[-1]))
    assert 4 == len(list(tmp_path.glob("*.html"))) == len(list(tmp_path.glob("eager-*.json")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fastest"], "'policies' must be among"),
        (["--policies", ""], "'policies' must be among"),
        (["--rate", "0"], "rate must be finite and > 0"),
        (["--rate", "nan"], "rate must be finite and > 0"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--device", "abacus"], "'device' must be one of"),
        (["--device", "no.json"], "no.json must be a file written by calibrate"),
        (["--model", "nothing"], "'model' must be one of"),
        (["--model", "no.json"], "no.json must be a model's config.json"),
        (["--trace", "no.csv"], "no.csv cannot be read as a trace"),
        (["--acceptance", "2"], "Invalid value for '--acceptance'"),
        (["--max-model-len", "9999999"], "'max_model_len' must fit into the KV cache"),
        (["--json", "/nowhere/out.json"], "cannot be written"),
        (["--html", "/nowhere/out.html"], "cannot be written"),
        (["--polices", "eager"], "No such option"),
    ],
)
def test_bad_options(arguments, message):
    """
    A bad option is one error with exit code 2, without a traceback.
    """
    result = invoke(*COMPARE, *FEW, *arguments)

    assert 2 == result.exit_code
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("--traces", "", "'--traces' must name at least one trace"),
        ("--rates", "1,fast", "must be numbers with commas between them: '1,fast'"),
        ("--devices", "abacus", "'device' must be one of"),
    ],
)
def test_bad_axes(tmp_path, axis, value, message):
    """
    A bad axis of a sweep is one error with exit code 2.
    """
    axes = {"--traces": "azure-conv", "--models": "qwen2.5-7b", "--devices": "h200", "--rates": "1"} | {
        axis: value
    }
    flat = [part for pair in axes.items() for part in pair]
    result = invoke("bench", "sweep", *flat, "--out", str(tmp_path), *FEW)

    assert 2 == result.exit_code
    assert message in result.output


def test_help_names_the_choices():
    """
    The help lists policies, presets, models and devices.
    """
    text = " ".join(invoke("bench", "compare", "--help").output.split())

    for word in ("to_budget", "azure-conv", "deepseek-v3", "ascend-910c"):
        assert word in text
    assert "bench" in invoke("--help").output
