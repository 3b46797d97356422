"""
vLLM's servers, several at a time: started together, up together, and all killed in the end.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.errors import ConfigError

from .engine import EngineFailedError, kill, signals_wait

HOST = "127.0.0.1"
START_SECONDS = 900
TAIL_CHARACTERS = 6000
"""What an error tells of a log."""

_MODULE = "vllm.entrypoints.openai.api_server"
_LAST_PORT = 65535


@attrs.frozen
class ServerOptions:
    """
    A server to start.

    Args:
        name: Of the server, for people and for its log.
        arguments: Of vLLM's OpenAI API server, but host and port.
        environment: All its variables.
        module: What is run instead of vLLM's server.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    module: str = _MODULE


@attrs.frozen
class Server:
    """
    A server that was started.
    """

    name: str
    port: int
    log: Path
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        """
        Where it listens.
        """
        return f"http://{HOST}:{self.port}"

    def check(self) -> None:
        """
        Make sure that it runs.

        Raises:
            EngineFailedError: It has ended.
        """
        code = self.process.poll()
        if code is not None:
            raise EngineFailedError(f"the server {self.name!r} ended (exit code {code}):\n{tail(self.log)}")

    def is_up(self) -> bool:
        """
        Whether it says that it is well.
        """
        try:
            status, _ = self._ask("GET", "/health", timeout_seconds=5)
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """
        Get something, or post *body*; give the JSON value of the answer.

        Raises:
            EngineFailedError: It does not answer, or with an error.
        """
        try:
            status, answer = self._ask("GET" if body is None else "POST", path, body, timeout_seconds=60)
        except (OSError, http.client.HTTPException) as exc:
            self.check()
            raise EngineFailedError(f"the server {self.name!r} does not answer {path}: {exc}") from exc
        if status != http.HTTPStatus.OK:
            text = answer.decode(errors="replace")[:TAIL_CHARACTERS]
            raise EngineFailedError(f"the server {self.name!r} answers {path} with {status}: {text}")
        return json.loads(answer)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float
    ) -> tuple[int, bytes]:
        # Not urllib, which would go by the environment's proxy.
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_seconds)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body or {}), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@contextlib.contextmanager
def serving(
    options: Sequence[ServerOptions], directory: Path, *, port: int | None = None
) -> Iterator[list[Server]]:
    """
    Servers that are up, until the end of the context; killed then with all that they started.

    A signal that ends this process must be an exception here: see `exit_on_signals`.

    Args:
        options: Of each.
        directory: Where their logs are written.
        port: Of the first; the others have the following ones. By default any that are free.

    Raises:
        ConfigError: A port is in use.
        EngineFailedError: A server ended, or is not up in time; the message ends with its last lines.
    """
    ports = _ports(port, len(options))
    servers: list[Server] = []
    try:
        for each, own_port in zip(options, ports, strict=True):
            with signals_wait():
                servers.append(_start(each, directory, own_port))
        _wait_until_up(servers)
        yield servers
    finally:
        for server in servers:
            kill(server.process)


def tail(log: Path) -> str:
    """
    The end of a log.
    """
    return log.read_text(errors="replace")[-TAIL_CHARACTERS:]


def _start(options: ServerOptions, directory: Path, port: int) -> Server:
    log = directory / f"{options.name}.log"
    command = [sys.executable, "-m", options.module, "--host", HOST, "--port", str(port), *options.arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=options.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(options.name, port, log, process)


def _wait_until_up(servers: Sequence[Server]) -> None:
    deadline = time.monotonic() + START_SECONDS
    starting = list(servers)
    while starting:
        for server in servers:
            server.check()
        starting = [server for server in starting if not server.is_up()]
        if starting and time.monotonic() > deadline:
            late = starting[0]
            msg = f"the server {late.name!r} is not up after {START_SECONDS} s:\n{tail(late.log)}"
            raise EngineFailedError(msg)
        time.sleep(0.2)


def _ports(first: int | None, count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        # All at once, so that they differ.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        if first is not None and first + count - 1 > _LAST_PORT:
            raise ConfigError(f"'port' must leave room for {count} servers up to {_LAST_PORT}: {first}")
        for number, each in enumerate(sockets):
            # As servers do: else connections that were closed a moment ago would keep a port.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = 0 if first is None else first + number
            try:
                each.bind((HOST, port))
            except OSError as exc:
                msg = (
                    f"'port' must be free for {count} servers: {port}: {exc.strerror}; leave it out for free ones"
                )
                raise ConfigError(msg) from None
        return [each.getsockname()[1] for each in sockets]
