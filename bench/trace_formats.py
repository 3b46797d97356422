"""
The columns of request traces: our own CSV, those of Azure and BurstGPT, and the JSON lines of Mooncake and Qwen.

A format is recognised by its first line. Formats are data; a new CSV takes an entry of `CSV_FORMATS`.

- Ours: `arrival_ms,prompt_tokens,output_tokens` and optionally `cached_tokens`, milliseconds from the start.
- Azure LLM inference 2023 and 2024: wall-clock times, with or without a time zone.
- BurstGPT, with or without `Session ID` and `Elapsed time`: seconds. Requests of every model are taken. A response
  of 0 tokens marks a request that failed; it is left out and counted.
- JSON lines under the names of vLLM's `timed_trace`: `timestamp`, `input_length`, `output_length` and optionally
  `hash_ids`, numbers of the prompt's blocks. Mooncake has blocks of 512 tokens and milliseconds, Qwen (Bailian)
  blocks of 16 and seconds; which it is follows from the number of blocks of a prompt.
"""

import csv
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import attrs

from aclgraph_dispatch.errors import TraceError

MOST_TOKENS = 10**9
"""So that prompt and output together are an int32."""

_YEAR_ONE = datetime(1, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """
    A request as it is written down: the fields of a `TraceRequest`.
    """

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int


def _integer(text: str) -> int:
    # Python would take "1_000" and digits of any script.
    if "_" in text or not text.isascii():
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def _microseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _YEAR_ONE) // timedelta(microseconds=1)


@attrs.frozen
class CsvFormat:
    """
    How a CSV file says when requests arrive and how long they are.

    Args:
        name: For people.
        arrival: Column of the arrival.
        prompt: Column of the prompt's tokens.
        output: Column of the generated tokens.
        cached: Column of the prompt's tokens found in a prefix cache; the file need not have it.
        parse_arrival: From text to a number; raises ValueError.
        arrival_kind: What the text must be.
        units_per_second: Unit of the parsed arrival.
        starts_at_first_row: Whether arrivals count from that of the first row.
        is_failed_without_output: Whether a request without generated tokens is one that failed.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    cached: str | None = None
    parse_arrival: Callable[[str], float] = _number
    arrival_kind: str = "a number"
    units_per_second: int = 1
    starts_at_first_row: bool = True
    is_failed_without_output: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """
        Columns that the file must have.
        """
        return (self.arrival, self.prompt, self.output)


CSV_FORMATS = (
    CsvFormat(
        "ours",
        "arrival_ms",
        "prompt_tokens",
        "output_tokens",
        cached="cached_tokens",
        units_per_second=1000,
        starts_at_first_row=False,
    ),
    CsvFormat(
        "Azure LLM inference",
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        parse_arrival=_microseconds,
        arrival_kind="a date and time",
        units_per_second=10**6,
    ),
    CsvFormat(
        "BurstGPT",
        "Timestamp",
        "Request tokens",
        "Response tokens",
        is_failed_without_output=True,
    ),
)

_JSON_BLOCKS = {512: 1000, 16: 1}
"""Tokens of a block: units of the timestamp per second."""


def read_rows(name: str, lines: Iterator[str]) -> Iterator[Row | None]:
    """
    The requests of a trace in any of the formats; None for one that is left out.

    Args:
        name: The file's, for messages.
        lines: Its lines.

    Raises:
        TraceError: A row is bad; the message names file, line, column and rule.
    """
    first = next(lines, None)
    if first is None:
        return iter(())
    rows = _json_rows if first.lstrip().startswith("{") else _csv_rows
    return rows(name, itertools.chain([first], lines))


def _csv_rows(name: str, lines: Iterator[str]) -> Iterator[Row | None]:
    reader = csv.DictReader(lines)
    try:
        columns = list(reader.fieldnames or ())
        layout = _recognise(name, columns)
        start = None if layout.starts_at_first_row else 0.0
        before = 0.0
        for cells in reader:
            where = f"{name}, line {reader.line_num}"
            if None in cells or None in cells.values():
                raise TraceError(f"{where}: must have {len(columns)} values, as the header has")
            arrival = _arrival(where, layout, cells[layout.arrival])
            start = arrival if start is None else start
            if arrival < before:
                raise _out_of_order(where, layout.arrival, cells[layout.arrival])
            before = arrival
            has_failed = layout.is_failed_without_output and cells[layout.output].strip() == "0"
            prompt = _tokens(where, layout.prompt, cells[layout.prompt], 0 if has_failed else 1)
            if has_failed:
                yield None
                continue
            output = _tokens(where, layout.output, cells[layout.output], 1)
            cached = 0
            if layout.cached is not None and layout.cached in cells:
                cached = _tokens(where, layout.cached, cells[layout.cached], 0)
            yield Row((arrival - start) / layout.units_per_second, prompt, output, cached, (), 0)
    except csv.Error as exc:
        raise TraceError(f"{name}, line {reader.reader.line_num}: must be comma-separated values: {exc}") from None


def _recognise(name: str, columns: list[str]) -> CsvFormat:
    layout = max(CSV_FORMATS, key=lambda layout: len(set(columns).intersection(layout.required)))
    missing = sorted(set(layout.required).difference(columns))
    if missing:
        known = "; ".join(",".join(known.required) for known in CSV_FORMATS)
        msg = f"columns {', '.join(missing)} are missing; a trace is JSON lines or has the columns {known}"
        raise TraceError(f"{name}, line 1: {msg}")
    if len(set(columns)) < len(columns):
        raise TraceError(f"{name}, line 1: columns must not be repeated: {reprlib.repr(','.join(columns))}")
    return layout


def _arrival(where: str, layout: CsvFormat, text: str) -> float:
    try:
        arrival = layout.parse_arrival(text)
    except (ValueError, OverflowError):
        msg = f"must be {layout.arrival_kind}: {reprlib.repr(text)}"
        raise TraceError(f"{where}, column {layout.arrival}: {msg}") from None
    _arrival_in_range(where, layout.arrival, arrival, text)
    return arrival


def _tokens(where: str, column: str, text: str, least: int) -> int:
    try:
        value = _integer(text)
    except ValueError:
        raise TraceError(f"{where}, column {column}: must be an integer: {reprlib.repr(text)}") from None
    _tokens_in_range(where, column, value, least, text)
    return value


def _arrival_in_range(where: str, column: str, arrival: float, shown: object) -> None:
    if not 0 <= arrival < float("inf"):
        raise TraceError(f"{where}, column {column}: must be finite and >= 0: {reprlib.repr(shown)}")


def _tokens_in_range(where: str, column: str, value: int, least: int, shown: object) -> None:
    if not least <= value <= MOST_TOKENS:
        rule = f"must be >= {least}" if value < least else f"must be <= {MOST_TOKENS}"
        raise TraceError(f"{where}, column {column}: {rule}: {reprlib.repr(shown)}")


def _out_of_order(where: str, column: str, shown: object) -> TraceError:
    msg = f"must not be earlier than the row before: {reprlib.repr(shown)}; sort the rows by it"
    return TraceError(f"{where}, column {column}: {msg}")


def _json_rows(name: str, lines: Iterator[str]) -> Iterator[Row]:
    held: list[Row] = []
    block_tokens = None
    before = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _json_row(f"{name}, line {number}", line)
        if row.arrival_seconds < before:
            raise _out_of_order(f"{name}, line {number}", "timestamp", row.arrival_seconds)
        before = row.arrival_seconds
        held.append(row)
        # A prompt of one block of either length does not tell.
        if block_tokens is None and (not row.hash_ids or row.prompt_tokens > min(_JSON_BLOCKS)):
            is_long = len(row.hash_ids) <= math.ceil(row.prompt_tokens / max(_JSON_BLOCKS))
            block_tokens = max(_JSON_BLOCKS) if is_long else min(_JSON_BLOCKS)
        if block_tokens is not None:
            yield from (_in_units(row, block_tokens) for row in held)
            held.clear()
    yield from (_in_units(row, max(_JSON_BLOCKS)) for row in held)


def _in_units(row: Row, block_tokens: int) -> Row:
    seconds = row.arrival_seconds / _JSON_BLOCKS[block_tokens]
    return row._replace(arrival_seconds=seconds, block_tokens=block_tokens if row.hash_ids else 0)


def _json_row(where: str, line: str) -> Row:
    try:
        cells: Any = json.loads(line)
    except (ValueError, RecursionError):
        cells = None
    if not isinstance(cells, dict):
        raise TraceError(f"{where}: must be a JSON object: {reprlib.repr(line.strip())}")
    missing = [column for column in ("timestamp", "input_length", "output_length") if column not in cells]
    if missing:
        raise TraceError(f"{where}: {', '.join(missing)} must be there; the names are those of vLLM's timed_trace")
    arrival = cells["timestamp"]
    if type(arrival) not in (int, float):
        raise TraceError(f"{where}, column timestamp: must be a number: {reprlib.repr(arrival)}")
    for column in ("input_length", "output_length"):
        if type(cells[column]) is not int:
            raise TraceError(f"{where}, column {column}: must be an integer: {reprlib.repr(cells[column])}")
        _tokens_in_range(where, column, cells[column], 1, cells[column])
    hash_ids = cells.get("hash_ids", [])
    if not isinstance(hash_ids, list) or any(type(block) is not int or block < 0 for block in hash_ids):
        msg = f"must be a list of integers >= 0: {reprlib.repr(hash_ids)}"
        raise TraceError(f"{where}, column hash_ids: {msg}")
    _arrival_in_range(where, "timestamp", arrival, arrival)
    return Row(arrival, cells["input_length"], cells["output_length"], 0, tuple(hash_ids), 0)
