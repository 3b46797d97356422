"""
The tables of a profile: CSV files, plain or compressed, each with one column of measured numbers.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aclgraph_dispatch.errors import ConfigError

LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
"""Columns of words; so is `layer`."""


def find_table(directory: Path, name: str) -> Path | None:
    """
    Where a table lies, if it is there.
    """
    for path in (directory / f"{name}.csv", directory / f"{name}.csv.gz"):
        if path.is_file():
            return path
    return None


def read_table(
    directory: Path,
    name: str,
    keys: Sequence[str],
    *,
    value: str = "time_us",
    defaults: Mapping[str, str] = MappingProxyType({}),
    only_layer: bool = False,
) -> dict[tuple[Any, ...], float]:
    """
    Read a table: numbers of the column *value* by those of *keys*, each once.

    Args:
        directory: Where the table lies.
        name: Its file's name, without the ending.
        keys: Columns; all but labels hold whole numbers.
        value: A column of numbers; times are above 0.
        defaults: Of columns that may be missing.
        only_layer: Whether the rows must be of one kind of layer, where they say of which.

    Raises:
        ConfigError: The table is missing, broken or empty, or a row is there twice.
    """
    path = find_table(directory, name)
    if path is None:
        raise ConfigError(f"{directory} must hold {name}.csv, or {name}.csv.gz")
    values: dict[tuple[Any, ...], float] = {}
    lines: dict[tuple[Any, ...], int] = {}
    layers = set()
    for line, row in _read_rows(path, {*keys, value} - defaults.keys()):
        where = f"{path}, line {line}"
        # Newer profilers also measure decodes of several tokens, which a run without drafts does not have.
        if number(f"{where}, column decode_q_len", row.get("decode_q_len") or "1") > 1:
            continue
        layers.add(row.get("layer"))
        if only_layer and len(layers) > 1:
            kinds = " and ".join(sorted(map(repr, layers)))
            raise ConfigError(f"{where}, column layer: the table must be of one kind of layer: {kinds}")
        key = tuple(
            row[column]
            if column in ("layer", *LABELS)
            else _whole(f"{where}, column {column}", row.get(column) or defaults.get(column, ""))
            for column in keys
        )
        if key in lines:
            same = ", ".join(f"{column} {part}" for column, part in zip(keys, key, strict=True))
            raise ConfigError(f"{where}: duplicate row: {same} is on line {lines[key]} too; keep one")
        lines[key] = line
        values[key] = number(f"{where}, column {value}", row[value])
        if value == "time_us" and values[key] <= 0:
            raise ConfigError(f"{where}, column {value}: must be > 0: {row[value]!r}")
    if not values:
        raise ConfigError(f"{path} must hold at least one row")
    return values


def _read_rows(path: Path, columns: Set[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        missing = columns - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"{path}, line 1: columns {', '.join(sorted(missing))} are missing")
        for row in reader:
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                raise ConfigError(f"{path}, line {reader.line_num}: must have {count} values, one a column")
            yield reader.line_num, row
    except csv.Error as exc:
        raise ConfigError(f"{path}, line {reader.line_num} cannot be read: {exc}") from None


def number(where: str, text: str) -> float:
    """
    A finite number.

    Raises:
        ConfigError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: must be a number: {text!r}") from None
    if not abs(value) < float("inf"):
        raise ConfigError(f"{where}: must be finite: {text!r}")
    return value


def _whole(where: str, text: str) -> int:
    value = number(where, text)
    if value < 0 or not value.is_integer():
        raise ConfigError(f"{where}: must be a whole number >= 0: {text!r}")
    return int(value)
