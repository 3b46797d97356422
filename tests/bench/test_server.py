"""Servers in processes of their own, in place of vLLM's one that tells what it is asked."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aclgraph_dispatch.bench import server as module
from aclgraph_dispatch.bench.engine import EngineFailedError
from aclgraph_dispatch.bench.server import HOST, ServerOptions, serving
from aclgraph_dispatch.errors import ConfigError

FAKE = """
import http.server, json, subprocess, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--fail" in arguments:
    print("x" * 20_000 + arguments["--fail"], flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
up = time.monotonic() + float(arguments.get("--delay", "0"))
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.path == "/die":
            import os; os._exit(5)
        status = 503 if time.monotonic() < up else 404 if self.path == "/nothing" else 200
        said = {"method": self.command, "path": self.path, "body": body, "arguments": sys.argv[1:]}
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = answer
    def log_message(self, *args):
        pass
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., ServerOptions]:
    """
    Makes the options of a server that is none of vLLM's.
    """
    (tmp_path / "fake_server.py").write_text(FAKE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return lambda name, *arguments: ServerOptions(name, arguments, environment, module="fake_server")


def children_in(directory: Path) -> list[int]:
    """
    Processes that the servers with logs in *directory* started.
    """
    return [int(log.read_text().split()[1]) for log in directory.glob("*.log")]


def is_alive(pid: int) -> bool:
    """
    Whether a process does anything; an orphan is a zombie until the system's first process asks for it.
    """
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def are_gone(pids: list[int]) -> bool:
    """
    Whether processes end: what is killed takes a moment.
    """
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_up_and_down(fake: Callable[..., ServerOptions], tmp_path: Path) -> None:
    """
    Servers are up inside, each on a port of its own, and answer; afterwards all processes are gone.
    """
    with serving([fake("a", "--delay", "1"), fake("b", "--size", "2")], tmp_path) as (a, b):
        children = children_in(tmp_path)
        got, posted = a.ask("/version"), b.ask("/reset", {"x": 1})

        assert all(map(is_alive, children))
    assert ("GET", "/version", ["--host", HOST, "--port", str(a.port), "--delay", "1"]) == (
        got["method"],
        got["path"],
        got["arguments"],
    )
    assert ("POST", "/reset", '{"x": 1}') == (posted["method"], posted["path"], posted["body"])
    assert ["--size", "2"] == posted["arguments"][-2:]
    assert a.port != b.port
    assert f"http://{HOST}:{a.port}" == a.url
    assert 2 == len(children)
    assert are_gone(children)
    assert {-signal.SIGKILL} == {a.process.returncode, b.process.returncode}


def test_no_proxy(fake: Callable[..., ServerOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A proxy of the environment is not asked for our own servers.
    """
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving([fake("a")], tmp_path) as (a,):
        assert "/x" == a.ask("/x")["path"]


def test_dies_at_start(fake: Callable[..., ServerOptions], tmp_path: Path) -> None:
    """
    A server that ends before it is up is an error with its last words; the others are killed.
    """
    options = [fake("a", "--tag", str(tmp_path)), fake("b", "--fail", "no such model")]
    with pytest.raises(EngineFailedError) as caught, serving(options, tmp_path):
        pytest.fail("it is up")

    assert str(caught.value).startswith("the server 'b' ended (exit code 3):\nxxx")
    assert str(caught.value).endswith("xxxno such model\n")
    assert len(str(caught.value)) < 7000
    assert are_gone(
        [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
    )


def test_not_up_in_time(
    fake: Callable[..., ServerOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A server that never gets well is an error.
    """
    monkeypatch.setattr(module, "START_SECONDS", 1.5)
    with (
        pytest.raises(EngineFailedError, match=r"^the server 'a' is not up after 1.5 s:\nchild"),
        serving([fake("a", "--delay", "600")], tmp_path),
    ):
        pytest.fail("it is up")

    assert are_gone(children_in(tmp_path))


def test_dies_later(fake: Callable[..., ServerOptions], tmp_path: Path) -> None:
    """
    A server that ended is told from one that only answers with an error.
    """
    with serving([fake("a")], tmp_path) as (a,):
        a.check()
        with pytest.raises(EngineFailedError, match=r"^the server 'a' answers /nothing with 404: {\"method"):
            a.ask("/nothing")
        with pytest.raises(EngineFailedError, match=r"the server 'a' (ended|does not answer /die)"):
            a.ask("/die")
        a.process.wait()
        with pytest.raises(EngineFailedError, match=r"^the server 'a' ended \(exit code 5\):\nchild"):
            a.check()


def test_ports(fake: Callable[..., ServerOptions], tmp_path: Path) -> None:
    """
    A port that is taken, or that does not exist, is one error before anything starts; else ports follow the first.
    """
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"'port' must be free for 2 servers: {port}: Address already in use"),
            serving([fake("a"), fake("b")], tmp_path, port=port - 1),
        ):
            pytest.fail("it is up")
    with (
        pytest.raises(ConfigError, match="'port' must leave room for 2 servers up to 65535: 65535"),
        serving([fake("a"), fake("b")], tmp_path, port=65535),
    ):
        pytest.fail("it is up")

    assert [] == list(tmp_path.glob("*.log"))
    with serving([fake("a"), fake("b")], tmp_path, port=port - 1) as servers:
        assert [port - 1, port] == [server.port for server in servers]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals(number: int, code: int, fake: Callable[..., ServerOptions], tmp_path: Path) -> None:
    """
    Interrupted, told to end, or without its terminal, a process leaves no server behind.
    """
    fake("a")  # writes the module
    code_ = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell may have switched off
        "from aclgraph_dispatch.bench.engine import exit_on_signals\n"
        "from aclgraph_dispatch.bench.server import ServerOptions, serving\n"
        "options = ServerOptions('a', (), os.environ, module='fake_server')\n"
        "with exit_on_signals(), serving([options], pathlib.Path(sys.argv[1])):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code_, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout:
        assert b"up\n" == process.stdout.readline()
    (child,) = children_in(tmp_path)
    before = is_alive(child)
    process.send_signal(number)

    assert code == process.wait(20)
    assert before
    assert are_gone([child])
