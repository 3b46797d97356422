"""Request traces in our format."""

import gzip
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.traces import TraceRequest, read_trace
from aclgraph_dispatch.errors import TraceError

HEADER = "arrival_ms,prompt_tokens,output_tokens"
ROWS = (TraceRequest(0.0, 374, 44), TraceRequest(0.0, 1, 1), TraceRequest(1.25, 879, 55))
TEXT = f"{HEADER}\n0,374,44\n0,1,1\n1250,879,55\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """
    Where a test puts its trace.
    """
    return tmp_path / "trace.csv"


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4])
def test_rows_in_order(path: Path, limit: int | None) -> None:
    """
    Each row is a request, arrival in seconds; a limit takes the first ones, and may exceed their number.
    """
    path.write_text(TEXT)

    assert ROWS[:limit] == read_trace(path, limit=limit)


def test_gzip(path: Path) -> None:
    """
    A compressed file is known by its first bytes, whatever its name.
    """
    path.write_bytes(gzip.compress(TEXT.encode()))

    assert read_trace(path) == ROWS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEADER},cached_tokens\n0,8,4,6\n", TraceRequest(0.0, 8, 4, 6)),
        ("output_tokens,arrival_ms,prompt_tokens\n4,0,8\n", TraceRequest(0.0, 8, 4)),
        (f"{HEADER},client\n0,8,4,somebody\n", TraceRequest(0.0, 8, 4)),
        (f"{HEADER}\n0.5,8,4\n", TraceRequest(0.0005, 8, 4)),
        (f"{HEADER}\r\n0,8,4\r\n", TraceRequest(0.0, 8, 4)),
        (f"{HEADER}\n\n0,8,4", TraceRequest(0.0, 8, 4)),
    ],
)
def test_columns(path: Path, text: str, expected: TraceRequest) -> None:
    """
    Columns go by name; `cached_tokens` may be there, and columns of others are passed over.
    """
    path.write_bytes(text.encode())

    assert (expected,) == read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: columns arrival_ms, output_tokens, prompt_tokens are missing"),
        ("arrival_ms,prompt_token,output_tokens\n0,8,4\n", "line 1: columns prompt_tokens are missing"),
        (f"{HEADER}\n", "must hold at least one request"),
        (f"{HEADER}\n0,8,4\n1,8\n", "line 3: must have 3 values"),
        (f"{HEADER}\n0,8,4,5\n", "line 2: must have 3 values"),
        (f"{HEADER}\n0,8,4\n1,many,4\n", "line 3, column prompt_tokens: must be an integer: 'many'"),
        (f"{HEADER}\n0,8,4.0\n", "line 2, column output_tokens: must be an integer: '4.0'"),
        (f"{HEADER}\n0,,4\n", "line 2, column prompt_tokens: must be an integer: ''"),
        (f"{HEADER}\nsoon,8,4\n", "line 2, column arrival_ms: must be a number: 'soon'"),
        (f"{HEADER}\n0,0,4\n", "line 2, column prompt_tokens: must be finite and >= 1: '0'"),
        (f"{HEADER}\n0,8,-4\n", "line 2, column output_tokens: must be finite and >= 1: '-4'"),
        (f"{HEADER}\n-1,8,4\n", "line 2, column arrival_ms: must be finite and >= 0: '-1'"),
        (f"{HEADER}\ninf,8,4\n", "line 2, column arrival_ms: must be finite and >= 0: 'inf'"),
        (f"{HEADER}\nnan,8,4\n", "line 2, column arrival_ms: must be finite and >= 0: 'nan'"),
        (f"{HEADER}\n5,8,4\n4,8,4\n", "line 3, column arrival_ms: must not be earlier than the row before"),
        (f"{HEADER},cached_tokens\n0,8,4,-1\n", "line 2, column cached_tokens: must be finite and >= 0: '-1'"),
    ],
)
def test_bad_row(path: Path, text: str, message: str) -> None:
    """
    The error names the file, the line, the column and the rule.
    """
    path.write_text(text)

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert str(caught.value) in (f"{path}, {message}", f"{path} {message}")


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b" + b"\0" * 20, gzip.compress(TEXT.encode())[:-9], b"\xff\xfe\0", None],
    ids=["broken", "cut", "binary", "absent"],
)
def test_unreadable(path: Path, content: bytes | None) -> None:
    """
    What is no text, compressed or not, or not there, is said of the file.
    """
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert str(caught.value).startswith(f"{path} cannot be read as a trace: ")
