import gzip
import json

import pytest

from aclgraph_dispatch.bench.real_run import read_run
from aclgraph_dispatch.errors import ConfigError, TraceError
from tests.bench.profiles import write_run

ROW = {
    "input_toks": 40,
    "output_toks": 3,
    "arrival_time": 1000.0,
    "queued_ts": 50.25,
    "first_token_ts": 51.0,
    "last_token_ts": 53.0,
}


def test_two_clocks_become_one(tmp_path):
    """
    Times start with the first arrival; the request that was taken in fastest ties the two clocks.
    """
    later = ROW | {"arrival_time": 1002.0, "queued_ts": 52.0, "first_token_ts": 52.5, "last_token_ts": 54.0}
    run = read_run(write_run(tmp_path, [ROW, later], blocks=True))

    assert [(0.0, 0.25, 1.0, 3.0), (2.0, 2.0, 2.5, 4.0)] == [
        (r.arrival_seconds, r.queued_seconds, r.first_token_seconds, r.last_token_seconds) for r in run.requests
    ]
    assert (0, 1) == run.requests[0].blocks


def test_resolved_settings_come_first(tmp_path):
    """
    What the engine resolved counts more than what it was given; what nobody says is the default.
    """
    directory = write_run(tmp_path, [ROW], settings={"max_model_len": None, "block_size": 16})
    meta = json.loads((directory / "meta.json").read_text())
    meta |= {"resolved_config": {"cache_config": {"block_size": 32}}, "kv_cache": {"num_gpu_blocks": 7}}
    (directory / "meta.json").write_text(json.dumps(meta))
    run = read_run(directory)

    assert [32, 7, 8, None, 5] == [
        run.setting("block_size"),
        run.setting("num_gpu_blocks_override", "num_gpu_blocks"),
        run.setting("max_num_seqs"),
        run.setting("max_model_len"),
        run.setting("nothing", default=5),
    ]


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("meta.json", "{", ConfigError, "meta.json cannot be read as a run's description"),
        ("meta.json", "[]", ConfigError, "meta.json must hold an object"),
        ("requests.jsonl", "", TraceError, "must hold at least one row"),
        ("requests.jsonl", "{}\n{", TraceError, "line 2: must be a JSON object"),
        ("requests.jsonl", "3\n", TraceError, "line 1: must be a JSON object"),
        ("requests.jsonl", "{}\n", TraceError, "line 1, input_toks: must be a finite number: None"),
        ("requests.jsonl", json.dumps(ROW | {"queued_ts": float("nan")}), TraceError, "line 1, queued_ts"),
        ("requests.jsonl", json.dumps(ROW | {"output_toks": True}), TraceError, "line 1, output_toks"),
        ("requests.jsonl", json.dumps(ROW | {"output_toks": -1}), TraceError, "line 1, output_toks: must be >= 0"),
        ("requests.jsonl", json.dumps(ROW | {"output_toks": 10.5}), TraceError, "output_toks: must be an integer"),
        ("requests.jsonl", json.dumps(ROW | {"input_toks": 0}), TraceError, "line 1, input_toks: must be >= 1"),
        (
            "requests.jsonl",
            json.dumps(ROW | {"input_toks": None}),
            TraceError,
            "line 1, input_toks: must be a fin",
        ),
        (
            "requests.jsonl",
            json.dumps(ROW | {"arrival_time": 1e308}),
            TraceError,
            "arrival_time: must be below 1e",
        ),
        (
            "requests.jsonl",
            json.dumps(ROW | {"output_toks": 0}),
            TraceError,
            "one request that did not fail: 1 did",
        ),
        ("meta.json", '{"engine_kwargs": [1]}', ConfigError, "meta.json, engine_kwargs: must be an object: '"),
        (
            "meta.json",
            '{"resolved_config": "no"}',
            ConfigError,
            "meta.json, resolved_config: must be an object: 'no'",
        ),
        ("meta.json", '{"kv_cache": 3}', ConfigError, "meta.json, kv_cache: must be an object: '3'"),
        ("meta.json", '{"hardware": true}', ConfigError, "meta.json, hardware: must be an object: 'True'"),
        (
            "requests.jsonl",
            json.dumps(ROW | {"first_token_ts": 49.0}),
            TraceError,
            "line 1: its times must ascend",
        ),
        ("blocks.jsonl.gz", "not gzip", TraceError, "blocks.jsonl.gz cannot be read"),
    ],
)
def test_broken_run(tmp_path, file, content, error, message):
    """
    Each broken file is one error that names file, line, column and rule.
    """
    (write_run(tmp_path, [ROW]) / file).write_text(content)

    with pytest.raises(error, match=message):
        read_run(tmp_path)


def test_blocks_of_other_requests(tmp_path):
    """
    Blocks that do not go with the requests are an error.
    """
    write_run(tmp_path, [ROW], blocks=True)
    (tmp_path / "requests.jsonl").write_text(json.dumps(ROW | {"input_toks": 41}))
    with pytest.raises(TraceError, match="line 1, prompt_tokens: must be that of the request: 40"):
        read_run(tmp_path)

    (tmp_path / "requests.jsonl").write_text(2 * (json.dumps(ROW) + "\n"))
    with pytest.raises(TraceError, match="must have a row for each of the 2 requests: 1"):
        read_run(tmp_path)


def test_failed_requests_are_left_out(tmp_path):
    """
    Requests without times or tokens are left out and counted, and blocks stay with the row they belong to.
    """
    rows = [ROW | {"input_toks": 32 + i, "arrival_time": 1000.0 + i, "queued_ts": 50.0 + i} for i in range(5)]
    for row in rows:
        row |= {"first_token_ts": row["queued_ts"] + 1, "last_token_ts": row["queued_ts"] + 2}
    rows[0] |= {"queued_ts": None, "first_token_ts": None, "last_token_ts": None}
    rows[2] |= {"output_toks": 0}
    rows[3] |= {"output_toks": None}
    write_run(tmp_path, rows)
    with gzip.open(tmp_path / "blocks.jsonl.gz", "wt") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps({"prompt_tokens": row["input_toks"], "prefix_blocks": [number, 9]}) + "\n")
    run = read_run(tmp_path)

    assert 3 == run.num_failed
    assert [(33, (1, 9)), (36, (4, 9))] == [(r.prompt_tokens, r.blocks) for r in run.requests]
    # The first of those that did not fail starts the clock.
    assert [0.0, 3.0] == [r.arrival_seconds for r in run.requests]


@pytest.mark.parametrize("numbers", [None, 3, "12", [1, None], [1.5], [True], [1 << 80]])
def test_blocks_that_are_no_numbers(tmp_path, numbers):
    """
    Blocks other than a list of integers are one error.
    """
    write_run(tmp_path, [ROW])
    with gzip.open(tmp_path / "blocks.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt_tokens": 40, "prefix_blocks": numbers}))

    with pytest.raises(TraceError, match=r"line 1, prefix_blocks: must be a list of integers: "):
        read_run(tmp_path)


def test_named_line_is_the_files(tmp_path):
    """
    An error names the line of the file, blank ones counted.
    """
    write_run(tmp_path, [ROW])
    (tmp_path / "requests.jsonl").write_text(f"\n{json.dumps(ROW)}\n\n{json.dumps(ROW | {'input_toks': 0})}\n")

    with pytest.raises(TraceError, match="line 4, input_toks"):
        read_run(tmp_path)
