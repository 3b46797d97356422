"""A small made-up profile and a run to go with it, as files."""

import csv
import gzip
import io
import json
from pathlib import Path

import yaml

LAYERS = ("embedding", "final_layernorm", "layernorm", "qkv_proj", "o_proj")
CHUNKS, DECODES, LENGTHS = (0, 16, 64), (0, 1, 4, 16), (16, 256, 1024)


def dense_us(layer: str, tokens: int) -> float:
    return 1.0 + LAYERS.index(layer) + tokens / 10


def attention_us(chunk: float, history: float, decodes: float, context: float) -> float:
    """
    Linear in each number, so that interpolation is exact.
    """
    return 5 + chunk / 8 + history / 50 + decodes * context / 200


def write_profile(
    directory: Path,
    *,
    compressed: bool = False,
    skew: bool = True,
    moe: bool = False,
    more_meta: dict | None = None,
) -> Path:
    """
    Write a profile of a model with few points, on a card of the RTX 4090's name; *more_meta* adds to meta.yaml.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write(
        directory / "dense.csv",
        [("layer", "tokens", "time_us")]
        + [(layer, n, dense_us(layer, n)) for layer in LAYERS for n in (1, 16, 128, 512)],
    )
    _write(
        directory / "per_sequence.csv",
        [("layer", "sequences", "time_us")] + [("lm_head", n, 10 + n) for n in (1, 8, 64)],
    )
    rows = [
        (chunk, history, decodes, context, attention_us(chunk, history, decodes, context))
        for chunk in CHUNKS
        for decodes in DECODES
        for history in ((0, 64, 512) if chunk else (0,))
        for context in (LENGTHS if decodes else (0,))
        if chunk or decodes
    ]
    name = "attention.csv.gz" if compressed else "attention.csv"
    header = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    _write(directory / name, [header, *rows])
    if moe:
        points = [(1, n, k, 20 + n / 4 + k) for n in (1, 64, 512) for k in (2, 8)]
        _write(directory / "moe.csv", [("ep", "tokens", "activated_experts", "time_us"), *points])
    meta: dict = {"model": "someone/Llama-3.1-8B", "gpu": "NVIDIA GeForce RTX 4090"}
    if skew:
        header = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
        _write(directory / "skew_fit.csv", [header, (0, "n<=4", "sr<=50%", "big", "kp=0", 0.25, 3)])
        meta["skew_fit"] = {
            "bucket_axes": {
                "n_bins": [0, 4, 1000],
                "n_labels": ["n<=4", "n>4"],
                "skew_rate_bins": [-0.01, 0.5, 1.01],
                "skew_rate_labels": ["sr<=50%", "sr>50%"],
                "kv_big_bins": [0, 1000000],
                "kv_big_labels": ["big"],
                "kp_bins": [-1, 0, 1000000],
                "kp_labels": ["kp=0", "kp>0"],
            },
            "per_tp": {1: {"alpha_default": 0.1}},
        }
    (directory / "meta.yaml").write_text(yaml.safe_dump(meta | (more_meta or {})))
    return directory


def write_run(
    directory: Path,
    rows: list[dict],
    *,
    settings: dict | None = None,
    meta: dict | None = None,
    blocks: bool = False,
) -> Path:
    """
    Write a run of *rows*, each with the times and lengths of a request; *settings* and *meta* add to its file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | (settings or {})
    told = {"model": "someone/Llama-3.1-8B", "vllm_version": "0.19.0", "engine_kwargs": engine}
    (directory / "meta.json").write_text(json.dumps(told | (meta or {})))
    (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if blocks:
        with gzip.open(directory / "blocks.jsonl.gz", "wt") as file:
            for row in rows:
                numbers = list(range(row["input_toks"] // 16))
                file.write(json.dumps({"prompt_tokens": row["input_toks"], "prefix_blocks": numbers}) + "\n")
    return directory


def _write(path: Path, rows: list[tuple]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    raw = text.getvalue().encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
