"""Engines in processes of their own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from aclgraph_dispatch.bench import engine
from aclgraph_dispatch.bench.engine import (
    WORKER_CLS,
    EngineFailedError,
    EngineRequest,
    EngineRun,
    exit_on_signals,
    run_engine,
    signals_wait,
)
from aclgraph_dispatch.errors import DispatchError

RUN = EngineRun({"a": [1, 2]}, {"a": " x y"}, 2, 0.5, 3.0, {"policy": "eager"}, {"vllm:prompt_tokens": 4.0})

# In place of vLLM: it writes down what it was called with.
ECHO = """
from aclgraph_dispatch.bench import engine as module
def drive(engine, requests):
    import os
    names = ("ACLGRAPH_DISPATCH_EMULATE", "HF_HUB_OFFLINE", "PYTHONSAFEPATH", "OMP_NUM_THREADS")
    environment = {n: os.environ.get(n) for n in names}
    report = {"engine": engine, "requests": [str(r) for r in requests], "env": environment}
    return module.EngineRun({"a": [1, 2]}, {"a": " x y"}, 2, 0.5, 3.0, report, {})
module.drive = drive
"""


@pytest.mark.parametrize("emulate", [True, False])
def test_what_the_process_gets(emulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The engine's options and the requests arrive unchanged; emulation is an environment and a worker.
    """
    monkeypatch.setenv("ACLGRAPH_DISPATCH_EMULATE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    requests = [EngineRequest("a", [5, 6], 2), EngineRequest("b", "Why?", 3, arrival_step=4, abort_step=6)]
    report = run_engine({"model": "x", "max_num_seqs": 4}, requests, emulate=emulate, prelude=ECHO).report
    expected: dict[str, Any] = {"kv_cache_memory_bytes": engine.KV_CACHE_BYTES, "model": "x", "max_num_seqs": 4}
    if emulate:
        expected["worker_cls"] = WORKER_CLS

    assert expected == report["engine"]
    assert [str(r) for r in requests] == report["requests"]
    assert {
        "ACLGRAPH_DISPATCH_EMULATE": str(int(emulate)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    } == report["env"]


def test_threads_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A number of threads that the user set stays.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert run_engine({}, [], emulate=False, prelude=ECHO).report["env"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("prelude", "code", "last"),
    [
        ("raise RuntimeError('no memory left')", 1, "RuntimeError: no memory left\n"),
        ("import sys; print('what it printed'); sys.exit(3)", 3, "what it printed\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_failure_tells_the_end(prelude: str, code: int, last: str) -> None:
    """
    A process that fails, or is killed, is our error with its exit code and the end of what it printed.
    """
    with pytest.raises(EngineFailedError) as caught:
        run_engine({}, [], emulate=False, prelude=f"print('x' * 20_000, flush=True)\n{prelude}")
    message = str(caught.value)

    assert isinstance(caught.value, DispatchError)
    assert message.startswith(f"the engine failed (exit code {code}):\n")
    assert message.endswith(last)
    assert len(message) < 7_000


@pytest.mark.engine
def test_engine_that_cannot_be_built(tmp_path: Path) -> None:
    """
    vLLM's own words about a model that is not there reach the caller.
    """
    model = str(tmp_path / "nothing-here")

    with pytest.raises(EngineFailedError, match=r"(?s)the engine failed \(exit code 1\).*nothing-here"):
        run_engine({"model": model}, [], emulate=False)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What is passed between the processes is removed, also after a failure.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_engine({}, [], emulate=False, prelude=ECHO)
    with pytest.raises(EngineFailedError):
        run_engine({}, [], emulate=False, prelude="raise SystemExit(1)")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals(number: int, tmp_path: Path) -> None:
    """
    Told to end, even twice, a process kills its engine, removes its files and lets its callers do the same.
    """
    (tmp_path / "temporary").mkdir()
    prelude = f"""
import os, pathlib, time
pathlib.Path({str(tmp_path / "engine")!r}).write_text(f"{{os.getpid()}}.")
time.sleep(600)
"""
    code = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
from aclgraph_dispatch.bench.engine import run_engine
from aclgraph_dispatch.bench.files import whole_file
with whole_file({str(tmp_path / "out.json")!r}) as file:
    run_engine({{}}, [], emulate=False, prelude={prelude!r})
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    named = tmp_path / "engine"
    deadline = time.monotonic() + 60
    while not (named.exists() and named.read_text().endswith(".")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine_process = psutil.Process(int(named.read_text()[:-1]))
    assert engine_process.is_running()
    process.send_signal(number)
    if number != signal.SIGINT:
        process.send_signal(number)

    assert (-number if number == signal.SIGINT else 128 + number) == process.wait(20)
    assert [named, tmp_path / "temporary"] == sorted(tmp_path.iterdir())
    assert [] == list((tmp_path / "temporary").iterdir())
    _, alive = psutil.wait_procs([engine_process], timeout=10)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive)


def test_handlers_are_put_back() -> None:
    """
    In the context both signals are an exit, the second time nothing; afterwards they mean what they meant before.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    codes = []
    with exit_on_signals():
        try:
            with exit_on_signals():  # which changes nothing
                signal.raise_signal(signal.SIGHUP)
        except SystemExit as exc:
            codes.append(exc.code)
        ignored = [signal.getsignal(number) for number in numbers]
        for number in numbers:
            signal.raise_signal(number)

    assert [129] == codes
    assert [signal.SIG_DFL] * 2 == before == [signal.getsignal(number) for number in numbers]
    assert [signal.SIG_IGN] * 2 == ignored


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda _number, _frame: None])
def test_handlers_of_others(handler: Any) -> None:
    """
    A signal that is ignored, as under nohup, or that somebody handles, is left alone.
    """
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with exit_on_signals(), signals_wait():
            signal.raise_signal(signal.SIGHUP)
        after = signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert handler == after


def test_signals_wait() -> None:
    """
    A signal that arrives while a process is started ends this one once the process is known.
    """
    known = []

    def start() -> None:
        with exit_on_signals(), signals_wait():
            signal.raise_signal(signal.SIGTERM)
            known.append("a process")

    with pytest.raises(SystemExit):
        start()

    assert ["a process"] == known


def test_other_threads() -> None:
    """
    Outside the main thread, which alone can handle signals, engines run as well.
    """
    with ThreadPoolExecutor(1) as executor:
        assert RUN.tokens == executor.submit(run_engine, {}, [], emulate=False, prelude=ECHO).result().tokens


def test_import_is_light() -> None:
    """
    Only the process of an engine imports vLLM or torch.
    """
    code = "import sys, aclgraph_dispatch.bench.demo; print({'vllm', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
