"""Comparison documents with plausible numbers, for the tests of what is made from them."""

import copy
import random
from typing import Any

CONTENDERS = (
    # name, policy, ladder, host cost of a decode step in ms
    ("eager", "eager", "none", 38.0),
    ("piecewise, vLLM's sizes", "piecewise", "vllm", 13.0),
    ("full_decode_only, vLLM's sizes", "full_decode_only", "vllm", 4.0),
    ("full_and_piecewise, vLLM's sizes", "full_and_piecewise", "vllm", 3.2),
    ("full_and_piecewise, legacy subsample under 1800 streams", "full_and_piecewise", "legacy", 3.8),
    ("full_and_piecewise, exponential", "full_and_piecewise", "exponential", 3.5),
    ("full_and_piecewise, powers of two", "full_and_piecewise", "powers_of_two", 4.4),
    ("full_and_piecewise, planned for the trace", "full_and_piecewise", "planned", 2.9),
    ("split_cost, planned for the trace", "split_cost", "planned", 2.88),
    ("oracle", "oracle", "oracle", 0.0),
)
SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]


def document(seed: int = 0) -> dict[str, Any]:
    """
    A comparison of ten contenders.
    """
    random_ = random.Random(seed)
    return {
        "command": "aclgraph-dispatch bench compare --trace azure_conv_2023_5min --model deepseek-v2-lite "
        "--device ascend-910b --policies all --fast --html out.html",
        "trace": {
            "name": "azure_conv_2023_5min",
            "sha256": random_.randbytes(32).hex(),
            "num_requests": 1460,
            "seconds": 299.6,
            "mean_prompt_tokens": 1154.7,
            "mean_output_tokens": 211.1,
        },
        "model": {"name": "DeepSeek-V2-Lite", "num_layers": 27},
        "device": {"name": "Ascend 910B", "memory_bytes_per_second": 1.35e12},
        "settings": {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": 16384,
            "num_blocks": 20000,
            "enable_prefix_caching": True,
            "async_scheduling": True,
            "num_spec_tokens": 0,
            "scheduler": "fast",
            "ranks": 1,
        },
        "slo": {"ttft_ms": 1000.0, "tpot_ms": 50.0},
        "seed": seed,
        "versions": {"aclgraph-dispatch": "0.1.0", "numpy": "2.3.5", "vllm": None},
        "contenders": [_contender(random_, *contender) for contender in CONTENDERS],
    }


def empty_document() -> dict[str, Any]:
    """
    The same, in which nothing was measured: all lists are empty, all numbers null.
    """
    empty = copy.deepcopy(document())
    for contender in empty["contenders"]:
        contender["full_sizes"] = contender["piecewise_sizes"] = []
        contender["metrics"] = _nothing(contender["metrics"])
        contender["series"] = _nothing(contender["series"])
    return empty


def _nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nothing(item) for key, item in value.items()}
    return [] if isinstance(value, list) else None


def _contender(random_: random.Random, name: str, policy: str, ladder: str, host_ms: float) -> dict[str, Any]:
    tpot_ms = 17.0 + host_ms + random_.uniform(0, 0.02)
    ttft_ms = 150 + 4 * host_ms if host_ms < 30 else 24_000.0
    sizes = (
        [] if policy in ("eager", "oracle") else [n for n in SIZES if ladder == "vllm" or random_.random() < 0.5]
    )
    num_steps = round(290_000 / tpot_ms)
    full = 0.0 if policy in ("eager", "oracle", "piecewise") else random_.uniform(0.55, 0.7)
    none = 1.0 if policy in ("eager", "oracle") else random_.uniform(0.01, 0.04)
    shares = {"FULL": full, "PIECEWISE": max(1 - full - none, 0.0), "NONE": none}
    if policy == "full_decode_only":
        shares |= {"NONE": 1 - full, "PIECEWISE": 0.0}
    reasons = {"exact": num_steps // 8, "padded": num_steps - num_steps // 8} if sizes else {"disabled": num_steps}
    return {
        "name": name,
        "policy": policy,
        "ladder": ladder,
        "full_sizes": sizes if full else [],
        "piecewise_sizes": sizes if shares["PIECEWISE"] else [],
        "metrics": {
            "ttft_ms": _latency(ttft_ms, 0.04, 6),
            "tpot_ms": _latency(tpot_ms, 0.004, 2),
            "itl_ms": _latency(tpot_ms * 1.05, 0.001, 7),
            "e2el_ms": _latency(ttft_ms + 210 * tpot_ms, 0.03, 4),
            "duration_seconds": 300 + tpot_ms,
            "output_tokens_per_second": 308_200 / (300 + tpot_ms),
            "requests_per_second": 1460 / (300 + tpot_ms),
            "goodput_requests_per_second": 4.5 if host_ms < 30 else 0.4,
            "goodput_share": 0.978 if host_ms < 30 else 0.09,
            "num_steps": num_steps,
            "num_preemptions": 0,
            "device_idle_share": host_ms / (17 + host_ms),
            "padding_share": 0.002 * random_.randrange(1, 20) if sizes else 0.0,
            "route_shares": shares,
            "time_shares": shares,
            "reasons": reasons,
            "capture_seconds": 1.2 * len(sizes),
            "streams": 30 * len(sizes),
            "graphs": 29 * len(sizes),
        },
        "series": {
            "routes_over_time": _routes(random_, shares),
            "step_ms": _steps(random_, shares, tpot_ms, num_steps),
            "padding_by_size": {
                "sizes": sizes,
                "steps": [num_steps // (n + 4) for n in sizes],
                "paddings": [round(num_steps / (n + 4) * random_.uniform(0, 4)) for n in sizes],
            },
        },
    }


def _latency(mean: float, error: float, tail: float) -> dict[str, float]:
    return {
        "mean": mean,
        "mean_low": mean * (1 - error),
        "mean_high": mean * (1 + error),
        "p50": mean * 0.93,
        "p90": mean * (1 + 0.15 * tail),
        "p95": mean * (1 + 0.4 * tail),
        "p99": mean * tail,
    }


def _routes(random_: random.Random, shares: dict[str, float]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {"edges_seconds": [5.0 * i for i in range(61)]} | {
        mode: [] for mode in shares
    }
    for i in range(60):
        num_steps = 0 if 30 <= i < 33 else random_.randrange(150, 250)
        piecewise = shares["PIECEWISE"] * random_.uniform(0.7, 1)
        full = shares["FULL"] * random_.uniform(0.7, 1)
        counts = {"FULL": round(num_steps * full), "PIECEWISE": round(num_steps * piecewise)}
        counts["NONE"] = num_steps - sum(counts.values()) if shares["NONE"] else 0
        for mode, count in counts.items():
            series[mode].append(count)
    return series


def _steps(
    random_: random.Random, shares: dict[str, float], tpot_ms: float, num_steps: int
) -> dict[str, list[float]]:
    edges = [10 ** (i / 16) for i in range(49)]
    series: dict[str, list[float]] = {"edges_ms": edges} | {mode: [0] * 48 for mode in shares}
    for mode, share in shares.items():
        center = tpot_ms * {"FULL": 0.9, "PIECEWISE": 1.6, "NONE": 2.5}[mode]
        for _ in range(round(share * num_steps)):
            step_ms = random_.gauss(center, 0.1 * center)
            series[mode][next(i for i in range(48) if step_ms < edges[i + 1])] += 1
    return series
