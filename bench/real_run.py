"""
A real vLLM run as LLMServingSim's benchmark leaves it: a directory with the engine's settings and every request.

`meta.json` holds the settings, `requests.jsonl` lengths and times of every request, and `blocks.jsonl.gz`, which
may be missing, the numbers of each prompt's blocks: equal numbers are equal prefixes.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.errors import ConfigError, TraceError


@attrs.frozen
class RealRequest:
    """
    A request of a real run; times in seconds from the first arrival.
    """

    arrival_seconds: float
    queued_seconds: float
    first_token_seconds: float
    last_token_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@attrs.frozen
class RealRun:
    """
    A real run.

    Args:
        meta: The content of `meta.json`.
        requests: In order of arrival.
    """

    meta: Mapping[str, Any]
    requests: tuple[RealRequest, ...]

    def setting(self, *names: str, default: Any = None) -> Any:
        """
        What the run says about an engine argument: as resolved by the engine, or else as given to it.
        """
        resolved = self.meta.get("resolved_config") or {}
        for name in names:
            given = [self.meta.get("kv_cache") or {}, *(c for c in resolved.values() if isinstance(c, dict))]
            for place in [*given, self.meta.get("engine_kwargs") or {}]:
                if place.get(name) is not None:
                    return place[name]
        return default


def read_run(directory: Path) -> RealRun:
    """
    Read a real run.

    Raises:
        ConfigError: `meta.json` is missing or broken.
        TraceError: A row of the requests or blocks is.
    """
    path = directory / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as a run's description: {exc}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} must hold an object, as the benchmark writes it")
    rows = _read_rows(directory / "requests.jsonl")
    blocks_path = directory / "blocks.jsonl.gz"
    blocks = _read_rows(blocks_path) if blocks_path.is_file() else []
    if blocks and len(blocks) != len(rows):
        raise TraceError(f"{blocks_path} must have a row for each of the {len(rows)} requests: {len(blocks)}")

    numbers = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    for line, row in enumerate(rows, start=1):
        for name in numbers:
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                where = f"{directory / 'requests.jsonl'}, line {line}, {name}"
                raise TraceError(f"{where}: must be a finite number: {value!r}")
        for name in ("input_toks", "output_toks"):
            if row[name] < 1:
                where = f"{directory / 'requests.jsonl'}, line {line}, {name}"
                raise TraceError(f"{where}: must be >= 1: {row[name]!r}")
        if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"]:
            where = f"{directory / 'requests.jsonl'}, line {line}"
            raise TraceError(f"{where}: its times must ascend: queued_ts, first_token_ts, last_token_ts")
    # One clock is the wall's, the other the engine's; the request that was taken in fastest tells them apart.
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    start = min(row["arrival_time"] for row in rows) + offset
    requests = []
    for number, row in enumerate(rows):
        numbers_of = tuple(blocks[number].get("prefix_blocks", ())) if blocks else ()
        if blocks and blocks[number].get("prompt_tokens") != row["input_toks"]:
            where = f"{blocks_path}, line {number + 1}, prompt_tokens"
            raise TraceError(f"{where}: must be that of the request: {blocks[number].get('prompt_tokens')!r}")
        requests.append(
            RealRequest(
                row["arrival_time"] + offset - start,
                row["queued_ts"] - start,
                row["first_token_ts"] - start,
                row["last_token_ts"] - start,
                int(row["input_toks"]),
                int(row["output_toks"]),
                numbers_of,
            )
        )
    return RealRun(meta, tuple(sorted(requests, key=lambda r: r.arrival_seconds)))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise TraceError(f"{path} cannot be read: {exc}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{path}, line {number}: must be a JSON object: {exc}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {number}: must be a JSON object: {line[:60]!r}")
        rows.append(row)
    if not rows:
        raise TraceError(f"{path} must hold at least one row")
    return rows
