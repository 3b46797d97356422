"""
Request traces: when requests arrive and how long they are.

Our own format is a CSV file, gzipped or not, with the columns `arrival_ms,prompt_tokens,output_tokens` and
optionally `cached_tokens` (prompt tokens found in a prefix cache).
"""

import csv
import gzip
import io
import zlib
from pathlib import Path

import attrs

from aclgraph_dispatch.errors import TraceError

_COLUMNS = {"arrival_ms": 0, "prompt_tokens": 1, "output_tokens": 1, "cached_tokens": 0}
"""Name: the least legal value."""
_OPTIONAL = frozenset({"cached_tokens"})


@attrs.frozen
class TraceRequest:
    """
    A request of a trace: arrival in seconds from the trace's start, lengths in tokens.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


def read_trace(path: Path, *, limit: int | None = None) -> tuple[TraceRequest, ...]:
    """
    Read a trace, or its first *limit* requests.

    Raises:
        TraceError: The file cannot be read, or a row is bad; the message names file, line, column and rule.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise TraceError(f"{path} cannot be read as a trace: {exc}") from None
    reader = csv.DictReader(io.StringIO(text))
    try:
        requests = _requests(path, reader, limit)
    except csv.Error as exc:
        raise TraceError(f"{path}, line {reader.line_num}: {exc}") from None
    if not requests:
        raise TraceError(f"{path} must hold at least one request")
    return tuple(requests)


def _requests(path: Path, reader: "csv.DictReader[str]", limit: int | None) -> list[TraceRequest]:
    columns = list(reader.fieldnames or ())
    missing = _COLUMNS.keys() - _OPTIONAL - set(columns)
    if missing:
        raise TraceError(f"{path}, line 1: columns {', '.join(sorted(missing))} are missing")
    if len(set(columns)) < len(columns):
        raise TraceError(f"{path}, line 1: columns must not be repeated: {', '.join(columns)}")
    requests: list[TraceRequest] = []
    for row in reader:
        if limit is not None and len(requests) == limit:
            break
        where = f"{path}, line {reader.line_num}"
        values = {name: _value(where, name, row[name]) for name in _COLUMNS if row.get(name) is not None}
        if values.keys() < _COLUMNS.keys() - _OPTIONAL or None in row:
            raise TraceError(f"{where}: must have {len(columns)} values")
        arrival_seconds = values.pop("arrival_ms") / 1000
        if requests and arrival_seconds < requests[-1].arrival_seconds:
            raise TraceError(f"{where}, column arrival_ms: must not be earlier than the row before")
        requests.append(TraceRequest(arrival_seconds, **{name: int(value) for name, value in values.items()}))
    return requests


def _value(where: str, column: str, text: str) -> float:
    try:
        value = float(text) if column == "arrival_ms" else int(text)
    except ValueError:
        kind = "a number" if column == "arrival_ms" else "an integer"
        raise TraceError(f"{where}, column {column}: must be {kind}: {text!r}") from None
    if not _COLUMNS[column] <= value < float("inf"):
        raise TraceError(f"{where}, column {column}: must be finite and >= {_COLUMNS[column]}: {text!r}")
    return value
