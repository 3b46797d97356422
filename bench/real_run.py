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

LATEST_SECONDS = 1e11
"""Clocks count seconds and stay below this, some three thousand years: so that differences keep microseconds."""

_STAMPS = ("queued_ts", "first_token_ts", "last_token_ts")


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
        requests: In order of arrival, but for those that failed.
        num_failed: Requests without times or tokens.
    """

    meta: Mapping[str, Any]
    requests: tuple[RealRequest, ...]
    num_failed: int = 0

    def setting(self, *names: str, default: Any = None) -> Any:
        """
        What the run says about an engine argument: as resolved by the engine, or else as given to it.
        """
        resolved = self.meta.get("resolved_config") or {}
        places = [
            self.meta.get("kv_cache") or {},
            resolved,
            *(c for c in resolved.values() if isinstance(c, dict)),
        ]
        for name in names:
            for place in [*places, self.meta.get("engine_kwargs") or {}]:
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
    meta = _read_meta(directory / "meta.json")
    path = directory / "requests.jsonl"
    rows = _read_rows(path)
    blocks_path = directory / "blocks.jsonl.gz"
    blocks = _read_rows(blocks_path) if blocks_path.is_file() else []
    if blocks and len(blocks) != len(rows):
        raise TraceError(f"{blocks_path} must have a row for each of the {len(rows)} requests: {len(blocks)}")
    # By row number, so before any is left out.
    numbers = (
        [
            _prefix_blocks(f"{blocks_path}, line {line}", of_blocks, row)
            for (line, of_blocks), (_, row) in zip(blocks, rows, strict=True)
        ]
        if blocks
        else [()] * len(rows)
    )
    done = [
        (row, of_row)
        for (line, row), of_row in zip(rows, numbers, strict=True)
        if _has_ended(f"{path}, line {line}", row)
    ]
    if not done:
        raise TraceError(f"{path} must hold at least one request that did not fail: {len(rows)} did")
    # One clock is the wall's, the other the engine's; the request that was taken in fastest tells them apart.
    offset = min(row["queued_ts"] - row["arrival_time"] for row, _ in done)
    start = min(row["arrival_time"] for row, _ in done) + offset
    requests = [
        RealRequest(
            row["arrival_time"] + offset - start,
            row["queued_ts"] - start,
            row["first_token_ts"] - start,
            row["last_token_ts"] - start,
            int(row["input_toks"]),
            int(row["output_toks"]),
            of_row,
        )
        for row, of_row in done
    ]
    ordered = tuple(sorted(requests, key=lambda r: r.arrival_seconds))
    return RealRun(meta, ordered, len(rows) - len(done))


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as a run's description: {exc}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} must hold an object, as the benchmark writes it")
    for name in ("engine_kwargs", "resolved_config", "kv_cache", "hardware"):
        if not isinstance(meta.get(name), dict | None):
            raise ConfigError(f"{path}, {name}: must be an object: {str(meta[name])[:60]!r}")
    return meta


def _has_ended(where: str, row: Mapping[str, Any]) -> bool:
    """
    Whether a request got all it asked for; a failed one has no tokens, or null for its times.
    """
    _check_number(where, row, "input_toks", least=1, is_whole=True)
    _check_number(where, row, "arrival_time")
    names = ("output_toks", *_STAMPS)
    if any(name in row and row[name] is None for name in names):
        return False
    _check_number(where, row, "output_toks", least=0, is_whole=True)
    if row["output_toks"] == 0:
        return False
    for name in _STAMPS:
        _check_number(where, row, name)
    if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"]:
        raise TraceError(f"{where}: its times must ascend: {', '.join(_STAMPS)}")
    return True


def _check_number(
    where: str, row: Mapping[str, Any], name: str, *, least: int | None = None, is_whole: bool = False
) -> None:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise TraceError(f"{where}, {name}: must be a finite number: {value!r}")
    if is_whole and value != int(value):
        raise TraceError(f"{where}, {name}: must be an integer: {value!r}")
    if least is not None and value < least:
        raise TraceError(f"{where}, {name}: must be >= {least}: {value!r}")
    if abs(value) >= LATEST_SECONDS:
        raise TraceError(f"{where}, {name}: must be below {LATEST_SECONDS:g}: {value!r}; times are in seconds")


def _prefix_blocks(where: str, of_blocks: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[int, ...]:
    if of_blocks.get("prompt_tokens") != row.get("input_toks"):
        raise TraceError(
            f"{where}, prompt_tokens: must be that of the request: {of_blocks.get('prompt_tokens')!r}"
        )
    numbers = of_blocks.get("prefix_blocks")
    if not isinstance(numbers, list) or not all(type(n) is int and abs(n) < 1 << 63 for n in numbers):
        raise TraceError(f"{where}, prefix_blocks: must be a list of integers: {str(numbers)[:60]!r}")
    return tuple(numbers)


def _read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """
    The objects of a file with one a line, and their lines.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise TraceError(f"{path} cannot be read: {exc}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{path}, line {number}: must be a JSON object: {exc}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {number}: must be a JSON object: {line[:60]!r}")
        rows.append((number, row))
    if not rows:
        raise TraceError(f"{path} must hold at least one row")
    return rows
