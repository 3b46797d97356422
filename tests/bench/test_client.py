"""The client's process, with a package in place of vLLM that writes down what it is asked."""

import json
import os
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.client import client
from aclgraph_dispatch.bench.engine import EngineFailedError

SERVE = """
import json, os, sys, time
def add_cli_args(parser):
    parser.add_argument("--to")
    parser.add_argument("--fail")
def main(args):
    print("vLLM prints a lot", flush=True)
    if args.fail == "raise":
        raise RuntimeError("no such dataset")
    if args.fail == "hang":
        time.sleep(600)
    names = ("NO_PROXY", "no_proxy", "PYTHONHASHSEED")
    with open(args.to, "w") as file:
        json.dump({"pid": os.getpid()} | {name: os.environ.get(name) for name in names}, file)
"""
FILES = {
    "vllm/__init__.py": "",
    "vllm/platforms.py": "class current_platform:\n    device_type = 'toaster'\n",
    "vllm/benchmarks/__init__.py": "",
    "vllm/benchmarks/serve.py": SERVE,
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """
    Variables of a process that finds our vLLM.
    """
    for name, text in FILES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "PYTHONHASHSEED": "7", "NO_PROXY": "x"}


def nothing() -> None:
    """
    Nothing is wrong.
    """


def test_runs(environment: dict[str, str], tmp_path: Path) -> None:
    """
    One process tells the device and does all runs, each with its arguments; what vLLM prints is in the log.
    """
    with client(tmp_path, environment) as driver:
        device_type = driver.device_type()
        for number in range(2):
            driver.run(["--to", str(tmp_path / f"{number}.json")], nothing)
        process = driver.process
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))

    assert "toaster" == device_type
    assert first == second
    assert {"pid": process.pid, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONHASHSEED": "7"} == first
    assert "vLLM prints a lot\n" * 2 == (tmp_path / "client.log").read_text()
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        (["--fail", "raise"], 1, "RuntimeError: no such dataset\n"),
        (["--unknown", "x"], 2, "unrecognized arguments: --unknown x\n"),
    ],
)
def test_client_fails(
    arguments: list[str], code: int, last: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """
    A client that ends is an error with its last words; so is every further run.
    """
    with client(tmp_path, environment) as driver:
        driver.device_type()
        for _ in range(2):
            with pytest.raises(EngineFailedError) as caught:
                driver.run(arguments, nothing)

            assert str(caught.value).startswith(f"vLLM's benchmark client ended (exit code {code}):\n")
            assert str(caught.value).endswith(last)


def test_nothing_to_wait_for(environment: dict[str, str], tmp_path: Path) -> None:
    """
    What a check raises while the client is at work ends the wait, and the client.
    """

    def check() -> None:
        raise EngineFailedError("the server is gone")

    with client(tmp_path, environment) as driver:
        driver.device_type()
        with pytest.raises(EngineFailedError, match="the server is gone"):
            driver.run(["--fail", "hang"], check)

    assert -9 == driver.process.returncode


def test_no_vllm(environment: dict[str, str], tmp_path: Path) -> None:
    """
    A client that cannot be imported says so.
    """
    (tmp_path / "packages/vllm/platforms.py").write_text("raise ImportError('libcuda is missing')\n")
    with client(tmp_path, environment) as driver, pytest.raises(EngineFailedError, match="libcuda is missing"):
        driver.device_type()
