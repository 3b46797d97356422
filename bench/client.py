"""
vLLM's own benchmark client, `vllm bench serve`, in a process of its own that does one run after the other.

Importing it takes some ten seconds, which a process for each run would spend again each time; and `vllm`, the
command, does not start where vLLM's distribution has another name. `python -m` this module is that process.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from .engine import EngineFailedError, kill, signals_wait
from .server import HOST, tail

_POLL_SECONDS = 0.5


@attrs.frozen
class Client:
    """
    The client's process.
    """

    process: "subprocess.Popen[bytes]"
    log: Path

    def device_type(self) -> str:
        """
        The kind of device that vLLM finds on this machine; asked once, before any run.

        Raises:
            EngineFailedError: The client ended.
        """
        return self._reply(lambda: None)

    def run(self, arguments: Sequence[str], check: Callable[[], None]) -> None:
        """
        Do one run.

        Args:
            arguments: Of `vllm bench serve`.
            check: Called now and then; raises if there is nothing to wait for any more.

        Raises:
            EngineFailedError: The client ended.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: no reply says so
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            self.process.stdin.flush()
        self._reply(check)

    def _reply(self, check: Callable[[], None]) -> str:
        # Replies come one for each question, so that none waits in the buffer.
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], _POLL_SECONDS)[0]:
            check()
        line = self.process.stdout.readline()
        if not line:
            check()
            code = self.process.wait()
            raise EngineFailedError(f"vLLM's benchmark client ended (exit code {code}):\n{tail(self.log)}")
        return line.decode().strip()


@contextlib.contextmanager
def client(directory: Path, environment: Mapping[str, str]) -> Iterator[Client]:
    """
    A client, until the end of the context; killed then.

    A signal that ends this process must be an exception here: see `exit_on_signals`.

    Args:
        directory: Where its log is written.
        environment: Its variables. With the same `PYTHONHASHSEED` vLLM makes the same prompts of a trace.
    """
    # The client goes by the environment's proxy.
    environment = {**environment, "NO_PROXY": HOST, "no_proxy": HOST}
    log = directory / "client.log"
    process = None
    try:
        with log.open("wb") as output, signals_wait():
            process = subprocess.Popen(
                [sys.executable, "-m", "aclgraph_dispatch.bench.client"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        yield Client(process, log)
    finally:
        if process is not None:
            kill(process)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    """
    Say the device's type, then do what each line of the standard input asks for, and reply with an empty line.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints goes to the log

    from vllm.platforms import current_platform

    print(current_platform.device_type, file=replies)

    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for line in sys.stdin:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        bench_serve(parser.parse_args(json.loads(line)))
        print(file=replies)


if __name__ == "__main__":
    main()
