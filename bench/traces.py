"""
Request traces: when requests arrive and how long they are.

The formats are those of `trace_formats`, gzipped or not. Files are read as a stream, within bounds on a line, on
all lines and on the bytes they unpack to, so that no file can fill the memory.
"""

import gzip
import hashlib
import io
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from aclgraph_dispatch.errors import ConfigError, TraceError

from .trace_formats import read_rows

MOST_BYTES = 1 << 28
MOST_LINES = 4_000_000
MOST_LINE_BYTES = 1 << 20
"""Of a file, unpacked. The largest public trace that is within them is BurstGPT's second part."""


@attrs.frozen
class TraceRequest:
    """
    A request of a trace: arrival in seconds from the trace's start, lengths in tokens.

    Args:
        arrival_seconds: From the start of the trace.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens it generates.
        cached_tokens: Prompt tokens found in a prefix cache, where only their number is recorded.
        hash_ids: Numbers of the prompt's blocks, the last of which may be cut by the prompt's end. Prompts share a
            prefix as far as their numbers are the same.
        block_tokens: Tokens of such a block.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 0


@attrs.frozen
class Trace:
    """
    Requests and where they are from.

    Args:
        name: The file's name or the preset's.
        requests: In order of arrival.
        num_left_out: Requests of the file that had failed.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    num_left_out: int = 0

    @property
    def sha256(self) -> str:
        """
        Hash of the requests, the same for a file and its compressed copy.
        """
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(json.dumps(attrs.astuple(request)).encode() + b"\n")
        return digest.hexdigest()


def load(path: Path, *, limit: int | None = None) -> Trace:
    """
    Read a trace, or its first *limit* requests.

    Raises:
        TraceError: The file cannot be read, or a row is bad; the message names file, line, column and rule.
    """
    requests: list[TraceRequest] = []
    num_left_out = 0
    try:
        with path.open("rb") as file, _unpacked(file) as stream:
            rows = read_rows(str(path), _lines(path, stream))
            while len(requests) != limit:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                if row is None:
                    num_left_out += 1
                else:
                    requests.append(TraceRequest(*row))
    except (OSError, EOFError, zlib.error) as exc:
        raise TraceError(f"{path} cannot be read as a trace: {exc}") from None
    if not requests:
        raise TraceError(f"{path} must hold at least one request")
    return Trace(path.name, tuple(requests), num_left_out)


def read_trace(path: Path, *, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """
    The requests of `load`.
    """
    return load(path, limit=limit).requests


def _unpacked(file: io.BufferedReader) -> io.BufferedIOBase:
    return gzip.open(file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _lines(path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
    num_bytes = 0
    for number in itertools.count(1):
        line = stream.readline(MOST_LINE_BYTES + 1)
        if not line:
            return
        num_bytes += len(line)
        if len(line) > MOST_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: must not be longer than {MOST_LINE_BYTES} bytes")
        if num_bytes > MOST_BYTES or number > MOST_LINES:
            bounds = f"{MOST_BYTES} bytes, unpacked, and {MOST_LINES} lines"
            raise TraceError(f"{path} must be within {bounds}; cut it, or take its first requests with a limit")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as exc:
            raise TraceError(
                f"{path} cannot be read as a trace: line {number} must be UTF-8: {exc.reason}"
            ) from None


def scaled(requests: Sequence[TraceRequest], *, rate: float) -> tuple[TraceRequest, ...]:
    """
    The same requests arriving *rate* times as fast: their arrivals divided by it.

    Raises:
        ConfigError: The rate is not a positive number.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be finite and > 0: {rate}")
    return tuple(attrs.evolve(r, arrival_seconds=r.arrival_seconds / rate) for r in requests)


def sliced(
    requests: Sequence[TraceRequest], *, start_seconds: float = 0, end_seconds: float = math.inf
) -> tuple[TraceRequest, ...]:
    """
    The requests that arrive from *start_seconds* on and before *end_seconds*; the new trace starts at the former.

    Raises:
        ConfigError: The bounds are not in order, or no request arrives between them.
    """
    if not 0 <= start_seconds < end_seconds:
        raise ConfigError(f"start must be >= 0 and before the end: {start_seconds} s to {end_seconds} s")
    inside = [r for r in requests if start_seconds <= r.arrival_seconds < end_seconds]
    if not inside:
        last = max((r.arrival_seconds for r in requests), default=0)
        msg = f"no request arrives between {start_seconds} s and {end_seconds} s; the last one arrives at {last} s"
        raise ConfigError(msg)
    return tuple(attrs.evolve(r, arrival_seconds=r.arrival_seconds - start_seconds) for r in inside)
