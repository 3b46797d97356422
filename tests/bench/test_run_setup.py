from pathlib import Path

import pytest

from aclgraph_dispatch import CapturePlan
from aclgraph_dispatch.bench.ladders import Limits, vllm
from aclgraph_dispatch.bench.layer_profile import LayerProfile, read_profile
from aclgraph_dispatch.bench.real_run import RealRun, read_run
from aclgraph_dispatch.bench.run_setup import (
    CARD_BYTES,
    GIB,
    Parallelism,
    Setup,
    check_followed,
    find_model,
    set_up,
)
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks
from tests.bench.profiles import write_profile, write_run

MODEL = ModelShape.named("llama-3.1-8b")
ROW = {
    "input_toks": 40,
    "output_toks": 3,
    "arrival_time": 1000.0,
    "queued_ts": 50.0,
    "first_token_ts": 51.0,
    "last_token_ts": 53.0,
}


def read(tmp_path: Path, *, variant: str = "", row: dict | None = None, **options) -> tuple[RealRun, LayerProfile]:
    more = {"variant": variant} if variant else {}
    profile = read_profile(write_profile(tmp_path / "profile", skew=False, more_meta=more))
    return read_run(write_run(tmp_path / "run", [ROW | (row or {})], **options)), profile


def setup_of(tmp_path: Path, *, model: ModelShape = MODEL, num_blocks: int | None = None, **options) -> Setup:
    run, profile = read(tmp_path, **options)
    check_followed(run, profile)
    return set_up(run, profile, model, num_blocks=num_blocks)


@pytest.mark.parametrize(("version", "share"), [("0.19.0", 0.9), ("0.20.0", 0.92), ("0.28.1", 0.92), (None, 0.92)])
def test_blocks_from_memory(tmp_path, version, share):
    """
    Blocks nobody says are what fits into the share of the card's memory that vLLM takes by default, by version.
    """
    setup = setup_of(tmp_path, meta={"vllm_version": version})
    memory = CARD_BYTES["NVIDIA GeForce RTX 4090"]
    expected = kv_blocks(MODEL, memory, gpu_memory_utilization=share, activation_bytes=1.2 * GIB)

    assert expected == setup.settings.num_blocks
    assert (
        f"{expected} blocks of the KV cache, from the card's memory; --num-blocks sets them" in setup.assumptions
    )


def test_memory_and_share_of_the_run(tmp_path):
    """
    The run's own memory and share of it come before what is known of the card.
    """
    setup = setup_of(
        tmp_path,
        settings={"gpu_memory_utilization": 0.5},
        meta={"hardware": {"device_total_memory_bytes": 80 * GIB}},
    )

    expected = kv_blocks(MODEL, 80 * GIB, gpu_memory_utilization=0.5, activation_bytes=1.2 * GIB)
    assert expected == setup.settings.num_blocks


@pytest.mark.parametrize(
    ("settings", "cache", "expected"),
    [
        ({}, {"kv_cache": {"num_gpu_blocks": 700}}, 700),
        ({"data_parallel_size": 2}, {"kv_cache": {"num_gpu_blocks": 75638}}, 37819),
        (
            {"data_parallel_size": 2},
            {
                "kv_cache": {"num_gpu_blocks": 75638},
                "resolved_config": {"cache_config": {"kv_cache_size_tokens": 16 * 500 + 3, "block_size": 16}},
            },
            500,
        ),
        ({"data_parallel_size": 2, "num_gpu_blocks_override": 90}, {"kv_cache": {"num_gpu_blocks": 180}}, 90),
    ],
)
def test_blocks_of_one_rank(tmp_path, settings, cache, expected):
    """
    vLLM sums the blocks of data-parallel engines, but neither their tokens nor an override.
    """
    assert expected == setup_of(tmp_path, settings=settings, meta=cache).settings.num_blocks


def test_defaults(tmp_path):
    """
    What a run does not say is vLLM's default: asynchronous scheduling, prefix cache, blocks of 16, its sizes.
    """
    setup = setup_of(tmp_path, settings={"max_model_len": None})
    settings = setup.settings

    assert (1 << 17, 16, True, True, 0) == (
        settings.max_model_len,
        settings.block_size,
        settings.enable_prefix_caching,
        settings.async_scheduling,
        settings.long_prefill_token_threshold,
    )
    assert vllm(Limits(8, 64)) == setup.capture_sizes
    assert 1 == setup.num_ranks


def test_default_holds_the_longest_request(tmp_path):
    """
    Without a limit of its own a sequence may be as long as the longest request, and its end decides nothing.
    """
    setup = setup_of(tmp_path, row={"input_toks": 200_000}, num_blocks=20_000)

    assert 200_004 == setup.settings.max_model_len


def test_settings_of_the_run(tmp_path):
    """
    What the run says is followed.
    """
    told = {
        "max_model_len": 4096,
        "block_size": 32,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "long_prefill_token_threshold": 24,
        "max_num_scheduled_tokens": 64,
    }
    setup = setup_of(tmp_path, settings=told, num_blocks=77)
    settings = setup.settings

    assert (8, 64, 4096, 77, 32, False, False, 24) == (
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.max_model_len,
        settings.num_blocks,
        settings.block_size,
        settings.enable_prefix_caching,
        settings.async_scheduling,
        settings.long_prefill_token_threshold,
    )


@pytest.mark.parametrize(
    ("told", "full", "piecewise"),
    [
        ({"cudagraph_capture_sizes": [24, 16, 8, 8]}, (8, 16), (8, 16, 24)),
        ({"cudagraph_capture_sizes": [20, 21]}, (20,), (20, 21)),
        ({"cudagraph_capture_sizes": []}, (), ()),
        ({"cudagraph_capture_sizes": [8], "enforce_eager": True}, (), ()),
    ],
)
def test_capture_plan(tmp_path, told, full, piecewise):
    """
    Sizes are sorted, none is there with eager mode, and FULL graphs are for no more decodes than there can be.
    """
    setup = setup_of(tmp_path, settings={"max_num_seqs": 20} | told)

    assert CapturePlan(full, piecewise) == setup.capture_plan


@pytest.mark.parametrize(
    ("settings", "meta", "message"),
    [
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size: 2 is not simulated"),
        ({"decode_context_parallel_size": 2}, {}, "decode_context_parallel_size: 2 is not simulated"),
        ({"enable_chunked_prefill": False}, {}, "enable_chunked_prefill: False is not simulated"),
        ({"speculative_config": {"method": "ngram"}}, {}, "speculative_config: .* is not simulated"),
        ({"num_speculative_tokens": 2}, {}, "num_speculative_tokens: 2 is not simulated"),
        (
            {},
            {"resolved_config": {"speculative_config": {"model": "x"}}},
            "speculative_config: .* is not simulated",
        ),
        ({"quantization": "fp8"}, {}, "quantization: 'fp8' is not simulated: layers were measured in bf16"),
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype: 'fp8' is not simulated"),
        (
            {},
            {"resolved_config": {"cache_config": {"cache_dtype": "fp8_e4m3"}}},
            "kv_cache_dtype: 'fp8_e4m3' is not",
        ),
        ({"dtype": "float32"}, {}, "dtype: 'float32' is not simulated"),
        ({"scheduling_policy": "priority"}, {}, "scheduling_policy: 'priority' is not simulated"),
        (
            {},
            {"resolved_config": {"scheduler_config": {"policy": "priority"}}},
            "scheduling_policy: 'priority' is",
        ),
        ({"enable_dbo": True}, {}, "enable_dbo: True is not simulated"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, {}, "kv_transfer_config: .* is not simulated"),
        ({"watermark": 0.01}, {}, "watermark: 0.01 is not simulated"),
        ({"max_num_scheduled_tokens": 32}, {}, "max_num_scheduled_tokens: 32 is not simulated"),
        ({"enable_lora": True}, {}, "enable_lora: True is not simulated"),
        ({}, {"resolved_config": {"lora_config": {"max_loras": 1}}}, "lora_config: .* is not simulated"),
        ({"block_size": 0}, {}, "block_size: must be an integer >= 1: 0"),
        ({}, {"kv_cache": {"num_gpu_blocks": "many"}}, "num_gpu_blocks: must be an integer >= 2: 'many'"),
        ({"num_gpu_blocks_override": 1.5}, {}, "num_gpu_blocks_override: must be an integer >= 2: 1.5"),
        ({"num_gpu_blocks_override": 10**30}, {}, "num_gpu_blocks_override: must be an integer of 32 bits"),
        ({"max_model_len": "auto"}, {}, "max_model_len: must be an integer >= 1: 'auto'"),
        ({"max_model_len": 42}, {}, "prompt and output together must be <= max_model_len = 42: 43"),
        ({"max_num_batched_tokens": 7}, {}, "max_num_batched_tokens: must be an integer >= 8: 7"),
        ({"data_parallel_size": 0}, {}, "data_parallel_size: must be an integer >= 1: 0"),
        ({"async_scheduling": "yes"}, {}, "async_scheduling: must be true or false: 'yes'"),
        ({"cudagraph_capture_sizes": [8, "16"]}, {}, "cudagraph_capture_sizes: must be a list of integers >= 1"),
        ({"cudagraph_capture_sizes": 8}, {}, "cudagraph_capture_sizes: must be a list of integers >= 1: 8"),
        (
            {"gpu_memory_utilization": "most"},
            {},
            "gpu_memory_utilization: must be a number above 0, at most 1: 'm",
        ),
        (
            {},
            {"hardware": {"device_total_memory_bytes": [1]}},
            "device_total_memory_bytes: must be a number above 0",
        ),
        (
            {},
            {"kv_cache": {"num_gpu_blocks": 3}},
            "'num_blocks' must hold the longest request, 43 tokens: 3 blocks",
        ),
        ({}, {"model": "someone/Llama-3.1-70B"}, "of the same model: 'someone/Llama-3.1-70B' and"),
        ({"model": "/models/Qwen3-8B"}, {"model": None}, "of the same model: '/models/Qwen3-8B' and"),
    ],
)
def test_refused(tmp_path, settings, meta, message):
    """
    What is wrong or not simulated is one error that says what and why.
    """
    with pytest.raises(ConfigError, match=message):
        setup_of(tmp_path, variant="bf16", settings=settings, meta=meta)


def test_defaults_that_a_newer_run_writes_down(tmp_path):
    """
    A run that says of everything that it is the default is simulated, with nothing assumed but the prefixes.
    """
    resolved = {
        "model_config": {"dtype": "torch.bfloat16", "quantization": None, "max_model_len": 131072},
        "cache_config": {"cache_dtype": "auto", "kv_cache_size_tokens": 8000, "num_gpu_blocks_override": None},
        "parallel_config": {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1},
        "scheduler_config": {
            "policy": "fcfs",
            "watermark": 0.0,
            "max_num_scheduled_tokens": None,
            "enable_chunked_prefill": True,
        },
        "compilation_config": {"cudagraph_capture_sizes": [8, 4, 2, 1]},
        "speculative_config": None,
        "lora_config": None,
    }
    settings = {"model": "/data/models/llama", "speculative_config": None, "enable_lora": False}
    setup = setup_of(tmp_path, variant="bf16", settings=settings, meta={"resolved_config": resolved})

    assert 500 == setup.settings.num_blocks
    assert (1, 2, 4, 8) == setup.capture_sizes
    assert ("no prompt shares a prefix with another: there is no blocks.jsonl.gz",) == setup.assumptions


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/LLAMA-3.1-8b",
        "/models/Llama-3.1-8B/",
        "/cache/models--someone--Llama-3.1-8B/snapshots/0123abcd",
        "./Llama-3.1-8B",
    ],
)
def test_same_model_by_another_name(tmp_path, name):
    """
    Names are the same where their last parts are; of a folder in the hub's cache the model's name counts.
    """
    run, profile = read(tmp_path, meta={"model": name}, settings={"model": name})

    check_followed(run, profile)


def test_assumptions(tmp_path):
    """
    Failed requests, another format than the profile's, and dense ranks in lockstep are told.
    """
    run, profile = read(tmp_path, variant="bf16", settings={"dtype": "float16", "data_parallel_size": 2})
    told = set_up(RealRun(run.meta, run.requests, 2), profile, MODEL, num_blocks=100).assumptions

    assert "2 of 3 requests failed: they are left out, and took no time" in told
    assert "layers take as long in float16 as in bf16, which was measured" in told
    assert any("lockstep" in assumption for assumption in told)


def test_format_of_the_profile(tmp_path):
    """
    A format that the profile was measured in is followed, if the run says its blocks.
    """
    told = {"variant": "fp8", "settings": {"quantization": "fp8", "dtype": "bfloat16"}}

    assert not any("which was measured" in a for a in setup_of(tmp_path, num_blocks=9, **told).assumptions)
    with pytest.raises(ConfigError, match=r"the memory of 'fp8' is not counted.*--num-blocks"):
        setup_of(tmp_path, **told)


def test_parallelism(tmp_path):
    """
    Experts are shared by all ranks with expert parallelism, and by none without.
    """
    settings = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    spread, _ = read(tmp_path, settings=settings | {"enable_expert_parallel": True})
    together, _ = read(tmp_path, settings=settings)

    assert Parallelism(2, 3, 6) == Parallelism.of(spread)
    assert Parallelism(2, 3, 1) == Parallelism.of(together)
    assert 6 == Parallelism.of(spread).num_cards


def test_longest_name_of_the_catalogue():
    """
    A model is that of the catalogue whose name begins its last part; of several the longest.
    """
    assert 48 == find_model("Qwen/Qwen3-30B-A3B-Instruct").num_layers
    assert 64 == find_model("Qwen/Qwen3-32B", tensor_parallel=2).num_layers
