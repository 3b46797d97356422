"""The formats of request traces: what is read from each, and what is said of bad rows."""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.trace_formats import Row, read_rows
from aclgraph_dispatch.bench.traces import load
from aclgraph_dispatch.errors import TraceError

SHARED = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "traces")
OURS = "arrival_ms,prompt_tokens,output_tokens"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def read(*lines: str) -> list[Row | None]:
    """
    The rows of a file with these lines.
    """
    return list(read_rows("t", (f"{line}\n" for line in lines)))


def row(
    arrival: float, prompt: int, output: int, cached: int = 0, hash_ids: Sequence[int] = (), block: int = 0
) -> Row:
    """
    A row with the usual defaults.
    """
    return Row(arrival, prompt, output, cached, tuple(hash_ids), block)


def mooncake(timestamp: object, prompt: object, output: object, **more: object) -> str:
    """
    A line of JSON.
    """
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output, **more})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"{OURS},cached_tokens", "0,8,4,6"], [row(0.0, 8, 4, 6)]),
        (["output_tokens,arrival_ms,prompt_tokens", "4,0,8"], [row(0.0, 8, 4)]),
        ([f"{OURS},client", "0,8,4,somebody"], [row(0.0, 8, 4)]),
        ([OURS, "0.5,8,4"], [row(0.0005, 8, 4)]),
        ([OURS, "", "500,8,4"], [row(0.5, 8, 4)]),
        ([f"{OURS}\r", "0,8,4\r"], [row(0.0, 8, 4)]),
        ([f"{OURS},note", '0,8,4,"two', 'lines, quoted"', "1,9,5,"], [row(0.0, 8, 4), row(0.001, 9, 5)]),
    ],
)
def test_ours(lines: list[str], expected: list[Row]) -> None:
    """
    Columns go by name; `cached_tokens` may be there, and columns of others are passed over.
    """
    assert expected == read(*lines)


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690", 4.314579),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.017335+00:00", 0.007405),
        ("2024-05-12 00:00:05+00:00", "2024-05-12 00:00:06.5+00:00", 1.5),
        ("2023-12-31 23:59:59", "2024-01-01 00:00:00", 1.0),
        ("2023-03-26 00:59:59", "2023-03-26 03:00:00", 7201.0),
        ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:01", 1.0),
    ],
)
def test_azure(first: str, second: str, seconds: float) -> None:
    """
    Arrivals count from the first row, exactly to the microsecond, with a time zone or in universal time.
    """
    assert [row(0.0, 374, 44), row(seconds, 396, 109)] == read(AZURE, f"{first},374,44", f"{second},396,109")


@given(st.lists(st.datetimes(datetime(2023, 1, 1)), min_size=1, max_size=9), st.integers(-9, 9))
def test_azure_round_trip(moments: list[datetime], hours: int) -> None:
    """
    Times written as Azure does are read as they were, in any time zone.
    """
    moments.sort()
    zone = timezone(timedelta(hours=hours))
    written = [m.replace(tzinfo=UTC).astimezone(zone).isoformat(" ") for m in moments]
    expected = [row((m - moments[0]) / timedelta(seconds=1), 8, 4) for m in moments]

    assert expected == read(AZURE, *(f"{text},8,4" for text in written))


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (
            BURSTGPT,
            ["5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,87,0,87,API log", "45,GPT-4,417,276,693,API log"],
        ),
        (
            BURSTGPT_3,
            [
                "5.0,1722ac82,43,ChatGPT,472,18,490,Conversation log",
                "45.0,,,GPT-4,0,0,0,API log",
                "45.0,d5983bf9,2,GPT-4,417,276,693,API log",
            ],
        ),
    ],
)
def test_burstgpt(header: str, rows: list[str]) -> None:
    """
    Old and new columns are read by name, requests of every model; one that failed is left out.
    """
    assert [row(0.0, 472, 18), None, row(40.0, 417, 276)] == read(header, *rows)


def test_failed_requests_are_counted(tmp_path: Path) -> None:
    """
    The number of requests left out is known; a limit counts those that are taken.
    """
    path = tmp_path / "burst.csv"
    path.write_text(f"{BURSTGPT}\n5,a,8,0,8,x\n6,a,8,4,12,x\n7,a,8,0,8,x\n8,a,8,4,12,x\n9,a,8,0,8,x\n")

    assert [2, 3] == [len(load(path).requests), load(path).num_left_out]
    assert [1, 1] == [len(load(path, limit=1).requests), load(path, limit=1).num_left_out]
    assert 1.0 == load(path).requests[0].arrival_seconds


def test_mooncake() -> None:
    """
    Milliseconds, and blocks of 512 tokens.
    """
    assert [row(0.0, 6758, 500, 0, range(14), 512), row(3.0, 600, 1, 0, [0, 14], 512)] == read(
        mooncake(0, 6758, 500, hash_ids=list(range(14))), "", mooncake(3000, 600, 1, hash_ids=[0, 14], type="text")
    )


def test_qwen() -> None:
    """
    Seconds, and blocks of 16 tokens, even if the first prompts are too short to tell.
    """
    lines = [
        mooncake(0.5, 9, 3, hash_ids=[7]),
        mooncake(0.5, 16, 3, hash_ids=[8]),
        mooncake(61.114, 521, 132, hash_ids=list(range(33)), turn=2),
    ]

    assert [
        row(0.5, 9, 3, 0, [7], 16),
        row(0.5, 16, 3, 0, [8], 16),
        row(61.114, 521, 132, 0, range(33), 16),
    ] == read(*lines)


@pytest.mark.parametrize("hash_ids", [{}, {"hash_ids": []}])
def test_no_blocks(hash_ids: dict[str, list[int]]) -> None:
    """
    Without numbers of blocks the unit is the millisecond, and there is nothing to wait for.
    """
    lines = iter([mooncake(1500, 6758, 500, **hash_ids), "nonsense"])

    assert row(1.5, 6758, 500) == next(read_rows("t", lines))


def test_only_short_prompts() -> None:
    """
    Where no prompt tells, it is Mooncake's.
    """
    assert [row(1.5, 9, 500, 0, [3], 512)] == read(mooncake(1500, 9, 500, hash_ids=[3]))


@given(
    st.sampled_from([(512, 1000), (16, 1)]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 99)), min_size=1, max_size=9),
)
def test_json_round_trip(kind: tuple[int, int], drawn: list[tuple[int, int, int]]) -> None:
    """
    Either kind of JSON lines is told by its blocks alone, if a prompt is longer than the shorter block.
    """
    block_tokens, units = kind
    drawn = [*sorted(drawn), (10**6, 17, 1)]
    hash_ids = [list(range(-(-prompt // block_tokens))) for _, prompt, _ in drawn]
    lines = [mooncake(a, p, o, hash_ids=ids) for (a, p, o), ids in zip(drawn, hash_ids, strict=True)]

    assert [
        row(a / units, p, o, 0, ids, block_tokens) for (a, p, o), ids in zip(drawn, hash_ids, strict=True)
    ] == read(*lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["arrival_ms,prompt_token,output_tokens", "0,8,4"],
            "line 1: columns prompt_tokens are missing; a trace is",
        ),
        (["TIMESTAMP,ContextTokens", "0,8"], "line 1: columns GeneratedTokens are missing"),
        (["Timestamp,Model,Request tokens"], "line 1: columns Response tokens are missing"),
        (["", OURS], "line 1: columns arrival_ms, output_tokens, prompt_tokens are missing"),
        (["0,8,4"], "line 1: columns arrival_ms, output_tokens, prompt_tokens are missing"),
        (
            [f"{OURS},arrival_ms", "0,8,4,0"],
            "line 1: columns must not be repeated: 'arrival_ms,p...ns,arrival_ms'",
        ),
        ([OURS, "0,8,4", "1,8"], "line 3: must have 3 values, as the header has"),
        ([OURS, "0,8,4,5"], "line 2: must have 3 values, as the header has"),
        ([OURS, "0,8,4", "1,many,4"], "line 3, column prompt_tokens: must be an integer: 'many'"),
        ([OURS, "0,8,4.0"], "line 2, column output_tokens: must be an integer: '4.0'"),
        ([OURS, "0,8,4_0"], "line 2, column output_tokens: must be an integer: '4_0'"),
        ([OURS, "0,8,٤"], "line 2, column output_tokens: must be an integer: '٤'"),
        (
            [OURS, "0,8," + "9" * 5000],
            "line 2, column output_tokens: must be an integer: '999999999999...9999999999999'",
        ),
        ([OURS, "0,,4"], "line 2, column prompt_tokens: must be an integer: ''"),
        ([OURS, "soon,8,4"], "line 2, column arrival_ms: must be a number: 'soon'"),
        ([OURS, "1_0,8,4"], "line 2, column arrival_ms: must be a number: '1_0'"),
        ([OURS, "0,0,4"], "line 2, column prompt_tokens: must be >= 1: '0'"),
        ([OURS, "0,8,0"], "line 2, column output_tokens: must be >= 1: '0'"),
        ([OURS, "0,8,-4"], "line 2, column output_tokens: must be >= 1: '-4'"),
        ([OURS, "0,8,1000000001"], "line 2, column output_tokens: must be <= 1000000000: '1000000001'"),
        ([OURS, "0,4294967297,4"], "line 2, column prompt_tokens: must be <= 1000000000: '4294967297'"),
        ([OURS, "-1,8,4"], "line 2, column arrival_ms: must be finite and >= 0: '-1'"),
        ([OURS, "inf,8,4"], "line 2, column arrival_ms: must be finite and >= 0: 'inf'"),
        ([OURS, "1e999,8,4"], "line 2, column arrival_ms: must be finite and >= 0: '1e999'"),
        ([OURS, "nan,8,4"], "line 2, column arrival_ms: must be finite and >= 0: 'nan'"),
        ([OURS, "0,8,4", "nan,8,4"], "line 3, column arrival_ms: must be finite and >= 0: 'nan'"),
        (
            [OURS, "5,8,4", "4,8,4"],
            "line 3, column arrival_ms: must not be earlier than the row before: '4'; sort the rows by it",
        ),
        ([f"{OURS},cached_tokens", "0,8,4,-1"], "line 2, column cached_tokens: must be >= 0: '-1'"),
        ([f"{OURS},cached_tokens", "0,8,4"], "line 2: must have 4 values, as the header has"),
        (
            [AZURE, "2023-11-16 25:15:46,8,4"],
            "line 2, column TIMESTAMP: must be a date and time: '2023-11-16 25:15:46'",
        ),
        ([AZURE, "1700158546,8,4"], "line 2, column TIMESTAMP: must be a date and time: '1700158546'"),
        ([AZURE, "nan,8,4"], "line 2, column TIMESTAMP: must be a date and time: 'nan'"),
        ([AZURE, "0001-01-01 00:00:00+01:00,8,4"], "line 2, column TIMESTAMP: must be finite and >= 0"),
        ([AZURE, "2023-11-16 18:15:46,8,0"], "line 2, column GeneratedTokens: must be >= 1: '0'"),
        (
            [AZURE, "2023-11-16 18:15:46.1,8,4", "2023-11-16 18:15:46,8,4"],
            "line 3, column TIMESTAMP: must not be earlier than the row before",
        ),
        ([BURSTGPT, "5,a,0,4,4,x"], "line 2, column Request tokens: must be >= 1: '0'"),
        ([BURSTGPT, "5,a,-1,0,4,x"], "line 2, column Request tokens: must be >= 0: '-1'"),
        ([BURSTGPT, "5,a,8,-4,4,x"], "line 2, column Response tokens: must be >= 1: '-4'"),
        ([BURSTGPT, "5,a,8,0,8,x", "4,a,8,4,12,x"], "line 3, column Timestamp: must not be earlier"),
        (["{"], "line 1: must be a JSON object: '{'"),
        (["{" + '"a":[' * 9000], "line 1: must be a JSON object: '{"),
        ([mooncake(0, 8, 4), "[1, 2]"], "line 2: must be a JSON object: '[1, 2]'"),
        ([mooncake(0, 8, 4), "null"], "line 2: must be a JSON object: 'null'"),
        (['{"timestamp": 0, "input_length": 1' + "0" * 5000 + "}"], "line 1: must be a JSON object"),
        (['{"timestamp": 0}'], "line 1: input_length, output_length must be there; the names are those of vLLM's"),
        ([mooncake("0", 8, 4)], "line 1, column timestamp: must be a number: '0'"),
        ([mooncake(True, 8, 4)], "line 1, column timestamp: must be a number: True"),
        ([mooncake(float("nan"), 8, 4)], "line 1, column timestamp: must be finite and >= 0: nan"),
        ([mooncake(float("inf"), 8, 4)], "line 1, column timestamp: must be finite and >= 0: inf"),
        ([mooncake(-1, 8, 4)], "line 1, column timestamp: must be finite and >= 0: -1"),
        (
            [mooncake(5, 8, 4), "", mooncake(4, 8, 4)],
            "line 3, column timestamp: must not be earlier than the row before",
        ),
        ([mooncake(0, 8.0, 4)], "line 1, column input_length: must be an integer: 8.0"),
        ([mooncake(0, 8, None)], "line 1, column output_length: must be an integer: None"),
        ([mooncake(0, 0, 4)], "line 1, column input_length: must be >= 1: 0"),
        ([mooncake(0, 8, 10**10)], "line 1, column output_length: must be <= 1000000000: 10000000000"),
        ([mooncake(0, 8, 4, hash_ids=7)], "line 1, column hash_ids: must be a list of integers >= 0: 7"),
        ([mooncake(0, 8, 4, hash_ids=[1.5])], "line 1, column hash_ids: must be a list of integers >= 0: [1.5]"),
        ([mooncake(0, 8, 4, hash_ids=[-1])], "line 1, column hash_ids: must be a list of integers >= 0: [-1]"),
    ],
)
def test_bad_row(lines: list[str], message: str) -> None:
    """
    The error names the file, the line, the column, the rule and the value, which it cuts if it is long.
    """
    with pytest.raises(TraceError) as caught:
        read(*lines)
    said = str(caught.value)

    assert said.startswith(f"t, {message}")
    assert len(said) < 300


def test_unclosed_quote() -> None:
    """
    A quote that swallows the rows after it is noticed.
    """
    with pytest.raises(TraceError, match="must be comma-separated values: field larger than field limit"):
        read(OURS, '0,8,"4', *["0,8,4"] * 100_000)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
@pytest.mark.parametrize(
    ("name", "num_requests", "last"),
    [
        ("azure_conv_2023_5min.csv.gz", 1644, 299.943),
        ("azure_code_2023_5min.csv.gz", 870, 292.556),
        ("mooncake_conversation_5min.csv.gz", 918, 297.0),
        ("servegen_deepseek_r1_5min.csv.gz", 604, 299.789),
        ("sharegpt_300_llama-3.1-8b.csv.gz", 300, 29.184),
        ("azure_raw_head.csv", 39, None),
        ("mooncake_raw_head.jsonl", 20, 3.0),
    ],
)
def test_recorded(name: str, num_requests: int, last: float | None) -> None:
    """
    The recorded traces are read whole.
    """
    trace = load(SHARED / name)

    assert num_requests == len(trace.requests)
    assert last is None or last == trace.requests[-1].arrival_seconds


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not there")
def test_mooncake_raw_and_normalised() -> None:
    """
    The raw lines and their normalised form are the same requests.
    """
    raw = load(SHARED / "mooncake_raw_head.jsonl").requests
    normalised = load(SHARED / "mooncake_conversation_5min.csv.gz", limit=len(raw)).requests

    assert [(r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in normalised] == [
        (r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in raw
    ]
    assert {512} == {r.block_tokens for r in raw}
