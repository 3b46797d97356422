"""The command line: what it prints, and how it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result

from aclgraph_dispatch.bench import demo
from aclgraph_dispatch.bench.demo import DemoResult
from aclgraph_dispatch.bench.engine import EngineFailedError, EngineRequest, EngineRun
from aclgraph_dispatch.cli import main

TOKENS = {"request-0": [5, 6]}
REPORT = {
    "full_sizes": [1],
    "piecewise_sizes": [],
    "graphs": {"FULL": 1},
    "streams_held": 1,
    "capture_seconds": 0.5,
    "routes": [{"mode": "FULL", "reason": "EXACT", "steps": 2, "tokens": 2, "paddings": 0}],
}
RUN = EngineRun(TOKENS, {"request-0": " a bird"}, 2, 1.0, 5.0, REPORT, {})
IDENTICAL = DemoResult("gqa", "eager", "a trace", (EngineRequest("request-0", [4], 2),), RUN, RUN)
DIFFERENT = attrs.evolve(IDENTICAL, dispatched=attrs.evolve(RUN, tokens={"request-0": [5, 7]}))


def run(*arguments: str) -> Result:
    """
    Run the command in this process.
    """
    return CliRunner().invoke(main, arguments, prog_name="aclgraph-dispatch")


def returning(result: DemoResult) -> Callable[..., DemoResult]:
    """
    In place of `run_demo`, without engines.
    """

    def run_demo(model: str, policy: str, num_requests: int, say: Callable[[str], None]) -> DemoResult:
        say(f"{num_requests} requests to {model}, policy {policy}")
        return result

    return run_demo


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["dem"], "No such command 'dem'"),
        (["demo", "--polcy", "eager"], "No such option '--polcy'"),
        (["demo", "--policy", "fastest"], "'--policy': 'fastest' is not one of 'eager', 'piecewise', "),
        (["demo", "--policy", "FULL_DECODE_ONLY"], "'full_decode_only', 'full_and_piecewise'."),
        (["demo", "--requests", "0"], "'--requests': 0 is not in the range x>=1."),
        (["demo", "--requests", "-4"], "'--requests': -4 is not in the range x>=1."),
        (["demo", "--requests", "many"], "'--requests': 'many' is not a valid integer"),
        (["demo", "--requests"], "Option '--requests' requires an argument"),
        (["demo", "mla"], "unexpected extra argument"),
        (["demo", "--model", "gpa"], "model must be one of gqa, mla, or a directory with a config.json: 'gpa'"),
        (["demo", "--model", "/nowhere"], "or a directory with a config.json: '/nowhere'"),
    ],
)
def test_bad_input(arguments: list[str], error: str) -> None:
    """
    The error is one line that shows what was written, the exit code is 2, and no engine was started.
    """
    result = run(*arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]

    assert result.exit_code == 2
    assert [result.stderr.splitlines()[-1]] == errors
    assert error in errors[0]
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_bad_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A trace that cannot be read is an error like any other.
    """
    trace = tmp_path / demo.TRACE
    trace.parent.mkdir()
    trace.write_text("arrival_ms,prompt_tokens,output_tokens\n0,8,many\n")
    monkeypatch.setenv("ACLGRAPH_DISPATCH_SHARED", str(tmp_path))
    result = run("demo")

    assert result.exit_code == 2
    assert f"Error: {trace}, line 2, column output_tokens: must be an integer: 'many'\n" == result.output


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where no checkpoint can be written, the error names the place and the variable that names another.
    """
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACLGRAPH_DISPATCH_CACHE", str(tmp_path / "file"))
    result = run("demo", "--model", "gqa")

    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith(f"Error: {tmp_path / 'file'}/checkpoints/gqa-0-")
    assert result.output.endswith("name another directory, for the cache ACLGRAPH_DISPATCH_CACHE\n")


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without vLLM the demo says what it needs and how to have it.
    """
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = run("demo")

    assert result.exit_code == 2
    assert (
        result.output
        == "Error: the demo needs vLLM, which is not installed; in a checkout, `make demo` installs it\n"
    )


def test_failed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An engine that fails is no differing token: the exit code is 2, and the end of its output is shown.
    """

    def run_demo(*_: object) -> DemoResult:
        msg = "the engine failed (exit code 1):\nOSError: no space left"
        raise EngineFailedError(msg)

    monkeypatch.setattr(demo, "run_demo", run_demo)
    result = run("demo", "--json")

    assert result.exit_code == 2
    assert result.stderr == "Error: the engine failed (exit code 1):\nOSError: no space left\n"
    assert result.stdout == ""


@pytest.mark.parametrize("result", [IDENTICAL, DIFFERENT])
def test_last_line_is_json(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    People read what is going on and a table, programs the last line; the exit code says whether tokens differ.
    """
    monkeypatch.setattr(demo, "run_demo", returning(result))
    done = run("demo", "--model", "gqa", "--requests", "7")

    assert int(result is DIFFERENT) == done.exit_code
    assert done.stdout == f"7 requests to gqa, policy full_and_piecewise\n{demo.describe(result)}\n" + (
        json.dumps(result.figures()) + "\n"
    )


@pytest.mark.parametrize("result", [IDENTICAL, DIFFERENT])
def test_json_only(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With --json that line is all of standard output; what is going on goes to standard error.
    """
    monkeypatch.setattr(demo, "run_demo", returning(result))
    done = run("demo", "--json", "--policy", "piecewise")

    assert int(result is DIFFERENT) == done.exit_code
    assert result.figures() == json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert done.stderr == "48 requests to mla, policy piecewise\n"


def test_version() -> None:
    """
    The version is the distribution's.
    """
    assert f"aclgraph-dispatch, version {version('aclgraph-dispatch')}\n" == run("--version").stdout


@pytest.mark.engine
def test_demo() -> None:
    """
    The installed command runs real vLLM twice: all three routes are taken, and every token is the same.
    """
    command = Path(sys.executable).with_name("aclgraph-dispatch")
    done = subprocess.run(
        [command, "demo", "--model", "gqa", "--json", "--requests", "24"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)

    assert figures["tokens_identical"]
    assert figures["num_requests"] == 24
    assert figures["num_tokens_generated"] > 24
    assert {"FULL", "PIECEWISE", "NONE"} == {mode for mode, n in figures["steps_by_route"].items() if n > 0}
    assert figures["graphs"] == {"FULL": 5, "PIECEWISE": 35}
    assert figures["streams_held"] == 40
