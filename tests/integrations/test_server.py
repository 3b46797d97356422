"""A real HTTP server: engine core and worker in processes of their own, our platform from its entry point."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import psutil
import pytest

from aclgraph_dispatch.bench.checkpoints import SPECIAL_TOKENS, VOCABULARY, cached_checkpoint
from aclgraph_dispatch.bench.engine import KV_CACHE_BYTES, WORKER_CLS
from aclgraph_dispatch.config import KEY

pytestmark = pytest.mark.engine

OPTIONS = {
    "--host": "127.0.0.1",
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "16",
    "--max-num-batched-tokens": "64",
    "--kv-cache-memory-bytes": str(KV_CACHE_BYTES),
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "INFO"}
SERVERS = {
    "stock": (["--enforce-eager"], "0"),
    # FULL sizes that are none of PIECEWISE's: the processes plan apart, and must not mix them up.
    "dispatched": (
        ["--worker-cls", WORKER_CLS, "--additional-config", json.dumps({KEY: {"full_sizes": [3, 6, 12]}})],
        "1",
    ),
}
"""Name: what it is told besides, and whether the NPU is emulated."""

NUM_CLIENTS, REQUESTS_PER_CLIENT = 10, 5
START_SECONDS, STOP_SECONDS = 300, 30


@attrs.frozen
class Server:
    """
    A server that is up.
    """

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


def launch(name: str, directory: Path) -> Server:
    """
    Start the server *name* on a free port; it is not up yet.
    """
    options, emulate = SERVERS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *options]
    command += ["--model", str(cached_checkpoint("gqa")), "--served-model-name", "tiny"]
    for option, value in OPTIONS.items():
        command += [option, value]
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | {"ACLGRAPH_DISPATCH_EMULATE": emulate},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log)


def wait_until_up(server: Server) -> None:
    """
    Return when the server says that it is well.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.process.poll() is None, server.log.read_text()[-6000:]
        assert time.monotonic() < deadline, server.log.read_text()[-6000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """
    Both servers, up; killed at the end with all their children, unless a test has stopped them.
    """
    directory = tmp_path_factory.mktemp("servers")
    started = {name: launch(name, directory) for name in SERVERS}
    try:
        for server in started.values():
            wait_until_up(server)
        yield started
    finally:
        for server in started.values():
            if server.process.poll() is None:
                for child in psutil.Process(server.process.pid).children(recursive=True):
                    child.kill()
                server.process.kill()
                server.process.wait()


def ask(url: str, client: int) -> list[tuple[str, int]]:
    """
    The texts that *client* gets, one after the other, and how many tokens they are said to be.
    """
    rng = random.Random(client)
    answers = []
    with httpx.Client(base_url=url, timeout=120) as connection:
        for _ in range(REQUESTS_PER_CLIENT):
            prompt = rng.choices(VOCABULARY[len(SPECIAL_TOKENS) :], k=rng.choice([1, 2, 5, 17, 40, 90, 150]))
            body = {
                "model": "tiny",
                "prompt": " ".join(prompt),
                "max_tokens": rng.randint(4, 40),
                "temperature": 0,
                "ignore_eos": True,
            }
            response = connection.post("/v1/completions", json=body).raise_for_status().json()
            answers.append((response["choices"][0]["text"], response["usage"]["completion_tokens"]))
    return answers


def test_completions_are_those_of_stock(servers: dict[str, Server]) -> None:
    """
    Ten clients at once get from either server the same texts, whatever batches their requests meet in.
    """
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        stock, dispatched = (
            list(clients.map(ask, [servers[name].url] * NUM_CLIENTS, range(NUM_CLIENTS))) for name in SERVERS
        )

    assert stock == dispatched
    assert all(len(text.split()) == count for answers in stock for text, count in answers)
    assert NUM_CLIENTS * REQUESTS_PER_CLIENT == len({text for answers in stock for text, _ in answers})


def test_only_one_dispatches(servers: dict[str, Server]) -> None:
    """
    Our start-up line is in the log of the server with our worker, and nothing of ours in the other's.
    """
    stock, dispatched = (servers[name].log.read_text() for name in SERVERS)
    line = (
        r"INFO .*policy full_and_piecewise; FULL \[3, 6, 12\]: 3 graphs; "
        r"PIECEWISE \[1, 2, 4, 8, 16, 24, 32\]: 35 graphs; captured in [\d.]+ s\n"
    )

    assert 1 == len(re.findall(line, dispatched))
    assert "no FULL graph holds a decode batch of more than 12 requests, up to 16 can be" in dispatched
    assert "no PIECEWISE graph holds a step of more than 32 tokens, up to 64 can be scheduled" in dispatched
    assert "aclgraph_dispatch" not in stock


def test_stops_cleanly(servers: dict[str, Server]) -> None:
    """
    Interrupted, both servers end on their own: exit code 0, no process left, and no error of ours in the log.
    """
    children = {
        name: psutil.Process(server.process.pid).children(recursive=True) for name, server in servers.items()
    }
    for server in servers.values():
        server.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    codes = {name: server.process.wait(max(0, deadline - time.monotonic())) for name, server in servers.items()}
    left = [child for name in SERVERS for child in children[name]]
    while left and time.monotonic() < deadline:
        # An orphan is a zombie until the system's first process asks for it.
        left = [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.1)

    assert {"stock": 0, "dispatched": 0} == codes
    assert all(len(found) >= 2 for found in children.values())  # engine core and worker
    assert [] == left
    assert [] == re.findall(r'File ".*aclgraph_dispatch/\w+.*', servers["dispatched"].log.read_text())
