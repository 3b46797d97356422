"""The calibrate command, without an engine."""

import json
from importlib import util

import pytest
from click.testing import CliRunner

from aclgraph_dispatch.bench import calibration
from aclgraph_dispatch.bench.calibrate_command import calibrate
from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.errors import ConfigError, DispatchError
from aclgraph_dispatch.pass_fit import PassFit

FOUND = Calibration(
    format=2,
    model="gqa",
    num_layers=4,
    num_parameters=2_000_000,
    kv_bytes_per_token=2048.0,
    num_experts=0,
    experts_per_token=0,
    backend="CpuPlatform (cpu)",
    device="cpu",
    versions={},
    engine={},
    host_is_device=True,
    num_shapes=9,
    left_out={"more than max_num_seqs = 4 requests": 2},
    prepare=(0.0,) * 4,
    sample=(0.0,) * 4,
    passes={
        "NONE": PassFit(
            knots=(),
            token_coefficients=(1e-3, 0.0, 0.0),
            load_coefficients=(0.0,) * 6,
            corrections={},
            host_coefficients=(),
            least=1,
            most=(1, 1, 1, 0, 0, 1),
            has_mixed=False,
        )
    },
    errors={"pass": {"points": 12, "mean": 0.0312, "p95": 0.071, "max": 0.1}},
    points=(),
)


@pytest.fixture
def asked(monkeypatch):
    """
    What the command asks to be measured.
    """
    calls = []

    def measured(model, **options):
        calls.append((model, options))
        return FOUND

    monkeypatch.setattr(calibration, "calibrate", measured)
    return calls


def run(*arguments):
    """
    Run the command in this process.
    """
    return CliRunner().invoke(calibrate, arguments)


def test_output(asked):
    """
    People get a table, programs the last line.
    """
    result = run("--model", "mla", "--rounds", "3", "--seed", "7")

    assert result.exit_code == 0
    assert [("mla", {"num_rounds": 3, "seed": 7})] == asked
    assert "gqa on cpu, CpuPlatform (cpu): 0 points, host and device are one" in result.output
    assert "2 of 9 shapes did not fit: more than max_num_seqs = 4 requests" in result.output
    assert "pass                            12    3.1%    7.1%   10.0%" in result.output
    assert json.loads(result.output.splitlines()[-1]) == {
        "model": "gqa",
        "device": "cpu",
        "errors": FOUND.errors,
        "num_shapes": 9,
        "left_out": FOUND.left_out,
    }


def test_where_it_runs():
    """
    The help says what runs the steps, and in which numbers.
    """
    assert "on this CPU, as the emulated NPU in float32" in " ".join(run("--help").output.split())


def test_file(asked, tmp_path):
    """
    The file holds the calibration.
    """
    path = tmp_path / "gqa.json"
    result = run("--out", str(path))

    assert result.exit_code == 0
    assert FOUND == Calibration.load(path)
    assert [("gqa", {"num_rounds": 3, "seed": 0})] == asked


def test_no_room_for_the_file(asked, tmp_path):
    """
    A place that cannot be written to is refused before anything is measured.
    """
    result = run("--out", str(tmp_path / "absent" / "gqa.json"))

    assert isinstance(result.exception, DispatchError)
    assert "gqa.json cannot be written" in str(result.exception)
    assert [] == asked


def test_failure_leaves_no_file(monkeypatch, tmp_path):
    """
    If the measurement fails, what was there stays.
    """
    path = tmp_path / "gqa.json"
    path.write_text("before")

    def failing(*_args, **_options):
        raise ConfigError("no such model")

    monkeypatch.setattr(calibration, "calibrate", failing)
    result = run("--out", str(path))

    assert isinstance(result.exception, ConfigError)
    assert ["gqa.json"] == [found.name for found in tmp_path.iterdir()]
    assert "before" == path.read_text()


@pytest.mark.parametrize("package", ["vllm", "scipy"])
def test_missing_package(monkeypatch, asked, package):
    """
    A package that is needed and not there is named.
    """
    from aclgraph_dispatch.bench import calibrate_command

    monkeypatch.setattr(
        calibrate_command, "find_spec", lambda name: None if name == package else util.find_spec(name)
    )
    result = run()

    assert f"calibrate needs {package}, which is not installed; in a checkout, `make demo` installs it" == str(
        result.exception
    )
    assert [] == asked


@pytest.mark.parametrize("arguments", [("--rounds", "1"), ("--seed", "-1"), ("--out", "."), ("--colour", "red")])
def test_usage(asked, arguments):
    """
    Wrong options end with exit code 2.
    """
    assert 2 == run(*arguments).exit_code
    assert [] == asked
