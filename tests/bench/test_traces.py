"""Request traces: reading files within bounds, hashing, scaling, slicing."""

import gzip
import math
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench import traces
from aclgraph_dispatch.bench.traces import Trace, TraceRequest, load, read_trace, scaled, sliced
from aclgraph_dispatch.errors import ConfigError, TraceError

HEADER = "arrival_ms,prompt_tokens,output_tokens"
ROWS = (TraceRequest(0.0, 374, 44), TraceRequest(0.0, 1, 1), TraceRequest(1.25, 879, 55))
TEXT = f"{HEADER}\n0,374,44\n0,1,1\n1250,879,55\n"

requests = st.lists(
    st.builds(
        TraceRequest, st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6)
    ),
    min_size=1,
    max_size=20,
).map(lambda drawn: tuple(sorted(drawn, key=lambda r: r.arrival_seconds)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """
    Where a test puts its trace.
    """
    return tmp_path / "trace.csv"


def error(path: Path) -> str:
    """
    What is said of a bad file.
    """
    with pytest.raises(TraceError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4])
def test_rows_in_order(path: Path, limit: int | None) -> None:
    """
    Each row is a request, arrival in seconds; a limit takes the first ones, and may exceed their number.
    """
    path.write_text(TEXT)

    assert ROWS[:limit] == read_trace(path, limit=limit)


@pytest.mark.parametrize("limit", [None, 2])
def test_load(path: Path, limit: int | None) -> None:
    """
    A trace has the file's name besides its requests.
    """
    path.write_text(TEXT)

    assert Trace("trace.csv", ROWS[:limit]) == load(path, limit=limit)


def test_limit_reads_no_further(path: Path) -> None:
    """
    What comes after the limit is not looked at.
    """
    path.write_text(f"{TEXT}0,nonsense\n")

    assert ROWS == read_trace(path, limit=3)
    assert "line 5: must have 3 values" in error(path)


def test_gzip(path: Path) -> None:
    """
    A compressed file is known by its first bytes, whatever its name, and may have several members.
    """
    path.write_bytes(gzip.compress(TEXT[:50].encode()) + gzip.compress(TEXT[50:].encode()))

    assert ROWS == read_trace(path)


def test_byte_order_mark(path: Path) -> None:
    """
    The mark that spreadsheets put before the text is no part of the first column's name.
    """
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())

    assert ROWS == read_trace(path)


@pytest.mark.parametrize("content", [b"", gzip.compress(b""), f"{HEADER}\n".encode(), f"{HEADER}\n\n\n".encode()])
def test_empty(path: Path, content: bytes) -> None:
    """
    A trace without requests is none.
    """
    path.write_bytes(content)

    assert f"{path} must hold at least one request" == error(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x1f\x8b" + b"\0" * 20, "Unknown compression method"),
        (gzip.compress(TEXT.encode())[:-9], "Compressed file ended before the end-of-stream marker was reached"),
        (gzip.compress(TEXT.encode())[:5], "Compressed file ended before the end-of-stream marker was reached"),
        (gzip.compress(TEXT.encode())[:-4] + b"\0\0\0\x80", "Incorrect length of data produced"),
        (gzip.compress(TEXT.encode())[:-8] + b"\0" * 8, "CRC check failed"),
        (gzip.compress(TEXT.encode()) + b"more", "Not a gzipped file"),
        (b"\xff\xfe\0", "line 1 must be UTF-8: invalid start byte"),
        (TEXT.encode("utf-16"), "line 1 must be UTF-8: invalid start byte"),
        (TEXT.encode() + b"5000,8,\xe9\n", "line 5 must be UTF-8: invalid continuation byte"),
        (None, "[Errno 2] No such file or directory"),
    ],
)
def test_unreadable(path: Path, content: bytes | None, reason: str) -> None:
    """
    What is no text, compressed or not, or not there, is said of the file.
    """
    if content is not None:
        path.write_bytes(content)

    assert error(path).startswith(f"{path} cannot be read as a trace: {reason}")


def test_broken_deflate(path: Path) -> None:
    """
    So it is where the compressed bytes are wrong in the middle.
    """
    packed = bytearray(gzip.compress(TEXT.encode() + os.urandom(5000).hex().encode()))
    packed[10] = 0xFF
    path.write_bytes(packed)

    assert error(path).startswith(f"{path} cannot be read as a trace: Error -3 while decompressing data")


def test_directory(tmp_path: Path) -> None:
    """
    So is a directory.
    """
    assert error(tmp_path).startswith(f"{tmp_path} cannot be read as a trace: [Errno 21]")


def bomb(unit: bytes, num_bytes: int) -> bytes:
    """
    A gzip of at least so many bytes, made of members that unpack to 16 MiB each.
    """
    member = gzip.compress(unit * ((1 << 24) // len(unit)))
    return member * (num_bytes // (1 << 24) + 1)


@pytest.mark.parametrize(
    ("start", "unit", "message"),
    [
        ("", b"\0", "line 1: must not be longer than 1048576 bytes"),
        (TEXT, b"0", "line 5: must not be longer than 1048576 bytes"),
        (f"{HEADER}\n", b'"', "line 2: must not be longer than 1048576 bytes"),
        (TEXT, b"\n", "must be within 268435456 bytes, unpacked, and 4000000 lines"),
        (f"{HEADER},more\n", b"0,1,1," + b"x" * 9000 + b"\n", "must be within 268435456 bytes"),
        ("", b'{"timestamp":0,"input_length":1,"output_length":1,"x":"' + b"x" * 9000 + b'"}\n', "must be within"),
    ],
    ids=["zeros", "digits", "quotes", "blank lines", "long rows", "long objects"],
)
def test_ten_gigabytes(path: Path, start: str, unit: bytes, message: str) -> None:
    """
    A file that unpacks to 10 GB is refused in a bounded time and memory, whatever it holds.
    """
    path.write_bytes(gzip.compress(start.encode()) + bomb(unit, 10 * 10**9))
    begin = time.monotonic()
    tracemalloc.start()
    said = error(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert message in said
    assert peak < 64 << 20
    assert time.monotonic() - begin < 60


def test_line_bound(path: Path) -> None:
    """
    A line may be as long as the bound, and not a byte longer.
    """
    rest = traces.MOST_LINE_BYTES - len("0,8,4,\n")
    long = "x" * 100_000
    path.write_text(f"{HEADER},a\n0,8,4,{long}\n")

    assert (TraceRequest(0.0, 8, 4),) == read_trace(path)

    path.write_text(f"{HEADER},a\n0,8,4,{'x' * rest}\n")

    assert "line 2: must be comma-separated values: field larger than field limit (131072)" in error(path)

    path.write_text(f"{HEADER},a\n0,8,4,{'x' * (rest + 1)}\n")

    assert "line 2: must not be longer than 1048576 bytes" in error(path)


def test_unpacked_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A trace may have as many bytes and lines as the bounds say, and a limit helps where it has more.
    """
    path.write_text(TEXT)
    monkeypatch.setattr(traces, "MOST_BYTES", len(TEXT))
    monkeypatch.setattr(traces, "MOST_LINES", 4)

    assert ROWS == read_trace(path)

    monkeypatch.setattr(traces, "MOST_BYTES", len(TEXT) - 1)

    assert "take its first requests with a limit" in error(path)
    assert ROWS[:2] == read_trace(path, limit=2)

    monkeypatch.setattr(traces, "MOST_BYTES", len(TEXT))
    monkeypatch.setattr(traces, "MOST_LINES", 3)

    assert "4 lines" not in error(path)
    assert "3 lines" in error(path)


@given(
    st.binary(max_size=300), st.sampled_from(["", TEXT, '{"timestamp":0,"input_length":1,"output_length":1}\n'])
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: str) -> None:
    """
    Whatever a file holds, it is a trace or one clear error.
    """
    path = tmp_path_factory.getbasetemp() / "any"
    for written in (start.encode() + content, gzip.compress(start.encode() + content), b"\x1f\x8b" + content):
        path.write_bytes(written)
        try:
            requests = read_trace(path)
        except TraceError as exc:
            assert str(exc).startswith(str(path))  # noqa: PT017
        else:
            assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in requests)


@given(requests)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, requests: tuple[TraceRequest, ...]) -> None:
    """
    Requests written in our format are read as they were, compressed or not, and have the same hash.
    """
    path = tmp_path_factory.getbasetemp() / "round_trip.csv"
    lines = [
        f"{r.arrival_seconds * 1000!r},{r.prompt_tokens},{r.output_tokens},{r.cached_tokens}" for r in requests
    ]
    content = "\n".join([f"{HEADER},cached_tokens", *lines]).encode()
    path.write_bytes(content)
    plain = load(path)
    path.write_bytes(gzip.compress(content))

    assert plain == load(path)
    assert plain.sha256 == load(path).sha256
    for expected, actual in zip(requests, plain.requests, strict=True):
        assert math.isclose(expected.arrival_seconds, actual.arrival_seconds, rel_tol=1e-12)
        assert (expected.prompt_tokens, expected.output_tokens, expected.cached_tokens) == (
            actual.prompt_tokens,
            actual.output_tokens,
            actual.cached_tokens,
        )


def test_hash_differs() -> None:
    """
    The hash tells apart traces that differ in any field, and says nothing of their names.
    """
    base = TraceRequest(0.5, 8, 4)
    others = [
        TraceRequest(0.25, 8, 4),
        TraceRequest(0.5, 9, 4),
        TraceRequest(0.5, 8, 5),
        TraceRequest(0.5, 8, 4, 1),
        TraceRequest(0.5, 8, 4, 0, (1,), 512),
        TraceRequest(0.5, 8, 4, 0, (1,), 16),
    ]
    hashes = {Trace("a", (request,)).sha256 for request in (base, *others)}

    assert len(others) + 1 == len(hashes)
    assert Trace("a", (base,)).sha256 == Trace("b", (base,)).sha256 != Trace("a", (base, base)).sha256


@given(requests, st.floats(0.01, 100))
def test_scaled(requests: tuple[TraceRequest, ...], rate: float) -> None:
    """
    A rate divides arrivals and leaves all else; its inverse undoes it.
    """
    faster = scaled(requests, rate=rate)

    assert [r.arrival_seconds / rate for r in requests] == [r.arrival_seconds for r in faster]
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [
        (r.prompt_tokens, r.output_tokens) for r in faster
    ]
    assert pytest.approx([r.arrival_seconds for r in requests]) == [
        r.arrival_seconds for r in scaled(faster, rate=1 / rate)
    ]


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_bad_rate(rate: float) -> None:
    """
    A rate is a positive number.
    """
    with pytest.raises(ConfigError, match="rate must be finite and > 0"):
        scaled(ROWS, rate=rate)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, ROWS),
        ({"end_seconds": 1.25}, ROWS[:2]),
        ({"start_seconds": 1}, (TraceRequest(0.25, 879, 55),)),
        ({"start_seconds": 1.25, "end_seconds": 1.5}, (TraceRequest(0.0, 879, 55),)),
    ],
)
def test_sliced(bounds: dict[str, float], expected: tuple[TraceRequest, ...]) -> None:
    """
    A slice has its start and not its end, and counts from its start.
    """
    assert expected == sliced(ROWS, **bounds)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (0.5, 1, "no request arrives between 0.5 s and 1 s; the last one arrives at 1.25 s"),
        (2, 3, "no request arrives between 2 s and 3 s; the last one arrives at 1.25 s"),
        (1, 1, "start must be >= 0 and before the end: 1 s to 1 s"),
        (-1, 1, "start must be >= 0 and before the end: -1 s to 1 s"),
        (0, math.nan, "start must be >= 0 and before the end: 0 s to nan s"),
    ],
)
def test_bad_slice(start: float, end: float, message: str) -> None:
    """
    Bounds must be in order and hold a request.
    """
    with pytest.raises(ConfigError) as caught:
        sliced(ROWS, start_seconds=start, end_seconds=end)

    assert message == str(caught.value)
