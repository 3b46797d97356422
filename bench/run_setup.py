"""
How a real vLLM run is simulated: its settings, what of them it did not say, and what cannot be simulated.

What a run does not say is vLLM's default, or an assumption that the command tells. A setting that would change the
run's times and that the simulation does not follow is refused: a comparison without it would say nothing.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.capture_plan import CapturePlan
from aclgraph_dispatch.constants import catalogue, entry
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks

from .ladders import Limits, vllm
from .layer_profile import LayerProfile
from .real_run import RealRun
from .scheduling import SchedulerSettings

CARD_BYTES = {
    # Reported by the driver in a public run's description (LLMServingSim, bench/examples).
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 101_976_440_832,
    # Nominal 24 GiB, less what the driver keeps; recalled from torch's device properties.
    "NVIDIA GeForce RTX 4090": 25_393_364_992,
    "NVIDIA H100 80GB HBM3": 85_029_158_912,
    "NVIDIA H200": 150_109_880_320,
    "NVIDIA A100-SXM4-80GB": 85_097_971_712,
}
"""Memory of cards, for runs that do not say how many blocks their KV cache had; but for the first, recalled."""

GIB = 1 << 30

LONGEST = 1 << 17
"""Where neither run nor requests say how long a sequence may be: longer than any, so that it decides nothing."""

_OFF: tuple[Any, ...] = (False, 0, "", "None", {})
_FOLLOWED: Mapping[tuple[str, ...], tuple[tuple[Any, ...], str]] = {
    # Engine arguments, by all names they have; the values that are simulated; why no others are.
    ("pipeline_parallel_size",): ((1,), "a step passes through one group of cards"),
    ("prefill_context_parallel_size",): ((1,), "a rank computes whole prompts"),
    ("decode_context_parallel_size",): ((1,), "a rank reads whole contexts"),
    ("enable_chunked_prefill", "chunked_prefill_enabled"): ((True,), "prompts are cut to the token budget"),
    ("speculative_config",): (_OFF, "a decode has one token"),
    ("num_speculative_tokens",): (_OFF, "a decode has one token"),
    ("enable_lora",): (_OFF, "layers were measured without adapters"),
    ("lora_config",): (_OFF, "layers were measured without adapters"),
    ("kv_transfer_config",): (_OFF, "the KV cache stays on its card"),
    ("enable_dbo",): (_OFF, "a batch is computed in one piece"),
    ("scheduling_policy", "policy"): (("fcfs",), "requests are served in the order of arrival"),
    ("watermark",): ((0,), "every free block is given away"),
    ("dtype",): (("auto", "bfloat16", "float16", "half"), "weights are counted as two bytes"),
}
_FORMATS: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    # Formats of numbers: others are followed where the profile is of them.
    ("quantization",): _OFF,
    ("cache_dtype", "kv_cache_dtype"): ("auto", "bfloat16", "float16"),
}
_SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


@attrs.frozen
class Setup:
    """
    How a run is simulated.

    Args:
        settings: Of each rank's scheduler.
        num_ranks: Data-parallel ranks.
        capture_sizes: Sizes of graphs, ascending; empty where there are none.
        assumptions: What the run itself did not say.
    """

    settings: SchedulerSettings
    num_ranks: int
    capture_sizes: tuple[int, ...]
    assumptions: tuple[str, ...]

    @property
    def capture_plan(self) -> CapturePlan:
        """
        The graphs: FULL ones for decodes, of which there are never more than requests.
        """
        full = tuple(size for size in self.capture_sizes if size <= self.settings.max_num_seqs)
        return CapturePlan(full, self.capture_sizes)


@attrs.frozen
class Parallelism:
    """
    Ranks that share a layer, ranks that share requests, and ranks that share the experts.
    """

    tensor: int
    data: int
    expert: int

    @classmethod
    def of(cls, run: RealRun) -> "Parallelism":
        """
        Of a run.

        Raises:
            ConfigError: A degree is not an integer >= 1.
        """
        tensor = _integer(run, "tensor_parallel_size", default=1)
        data = _integer(run, "data_parallel_size", default=1)
        return cls(tensor, data, tensor * data if _flag(run, "enable_expert_parallel", default=False) else 1)

    @property
    def num_cards(self) -> int:
        """
        Cards of the run.
        """
        return self.tensor * self.data


def set_up(run: RealRun, profile: LayerProfile, model: ModelShape, *, num_blocks: int | None = None) -> Setup:
    """
    Take the settings from a run.

    Args:
        run: The run.
        profile: Of its card and model.
        model: The model on one rank.
        num_blocks: Blocks of a rank's KV cache, if they are known better than from the run.

    Raises:
        ConfigError: A setting is missing, wrong or not simulated, or the card's memory is not known.
    """
    assumptions = list(profile.assumptions)
    if run.num_failed:
        total = run.num_failed + len(run.requests)
        assumptions.append(f"{run.num_failed} of {total} requests failed: they are left out, and took no time")
    kinds = [_plain(run.setting(*names)) for names in (("dtype",), *_FORMATS)]
    if profile.variant and kinds[0] in _SHORT_NAMES and profile.variant not in map(_short, kinds):
        assumptions.append(f"layers take as long in {kinds[0]} as in {profile.variant}, which was measured")
    num_ranks = Parallelism.of(run).data
    if num_ranks > 1 and not model.num_experts:
        assumptions.append("data-parallel ranks go in lockstep, though without experts they need not")

    max_num_seqs = _integer(run, "max_num_seqs")
    max_num_batched_tokens = _integer(run, "max_num_batched_tokens", least=max_num_seqs)
    scheduled = run.setting("max_num_scheduled_tokens", default=max_num_batched_tokens)
    if scheduled != max_num_batched_tokens:
        _refuse("max_num_scheduled_tokens", scheduled, f"a step is filled up to {max_num_batched_tokens} tokens")
    block_size = _integer(run, "block_size", default=16)
    longest = max(r.prompt_tokens + r.output_tokens for r in run.requests)
    max_model_len = _integer(run, "max_model_len", default=max(longest + 1, LONGEST))
    if longest > max_model_len:
        msg = f"requests.jsonl: prompt and output together must be <= max_model_len = {max_model_len}: {longest}"
        raise ConfigError(f"{msg}; the run's meta.json says how long a sequence may be")
    blocks = num_blocks or _blocks(run, block_size, num_ranks)
    if blocks is None:
        blocks = _estimated_blocks(run, profile, model, block_size)
        assumptions.append(f"{blocks} blocks of the KV cache, from the card's memory; --num-blocks sets them")
    if longest - 1 > (blocks - 1) * block_size:
        held = f"{blocks} blocks of {block_size} tokens, one of them vLLM's own, do not"
        raise ConfigError(
            f"'num_blocks' must hold the longest request, {longest} tokens: {held}; give --num-blocks"
        )
    sizes = run.setting("cudagraph_capture_sizes")
    if sizes is None:
        sizes = vllm(Limits(max_num_seqs, max_num_batched_tokens))
        assumptions.append("vLLM's default capture sizes")
    elif not isinstance(sizes, list) or not all(type(size) is int and size >= 1 for size in sizes):
        raise ConfigError(f"meta.json, cudagraph_capture_sizes: must be a list of integers >= 1: {sizes!r}")
    settings = SchedulerSettings(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        blocks,
        block_size=block_size,
        enable_prefix_caching=_flag(run, "enable_prefix_caching", default=True),
        async_scheduling=_flag(run, "async_scheduling", default=True),
        long_prefill_token_threshold=_integer(run, "long_prefill_token_threshold", default=0, least=0),
    )
    if not any(r.blocks for r in run.requests) and settings.enable_prefix_caching:
        assumptions.append("no prompt shares a prefix with another: there is no blocks.jsonl.gz")
    is_eager = _flag(run, "enforce_eager", default=False)
    return Setup(settings, num_ranks, () if is_eager else tuple(sorted(set(sizes))), tuple(assumptions))


def check_followed(run: RealRun, profile: LayerProfile) -> None:
    """
    Check that the simulation follows a run's settings, and that the profile is of its model.

    Raises:
        ConfigError: It does not, or is not.
    """
    for names, (values, why) in _FOLLOWED.items():
        value = run.setting(*names)
        if value is not None and _plain(value) not in values:
            _refuse(names[0], value, why)
    for names, formats in _FORMATS.items():
        value = run.setting(*names)
        if value is not None and _plain(value) not in (*formats, profile.variant):
            _refuse(names[-1], value, f"layers were measured in {profile.variant or '16 bits'}")
    told = [name for name in (run.meta.get("model"), run.setting("model")) if isinstance(name, str) and name]
    # A name says more than a path, which may be anything.
    for name in [name for name in told if not name.startswith(("/", ".", "~"))] or told:
        if profile.model and _last_part(name) != _last_part(profile.model):
            msg = f"run and profile must be of the same model: {name!r} and {profile.model!r}"
            raise ConfigError(f"{msg}; give the profile of the run's model")


def find_model(
    name: str, *, config: Path | None = None, tensor_parallel: int = 1, expert_parallel: int = 1
) -> ModelShape:
    """
    The model of a run, on one rank.

    Args:
        name: As the profile has it: the catalogue's name is its last part, or the beginning of that.
        config: The model's `config.json`, for one that is not in the catalogue.
        tensor_parallel: Ranks that share a layer.
        expert_parallel: Ranks that share the experts.

    Raises:
        ConfigError: The model is not known.
    """
    source: Any = config
    if source is None:
        last = _last_part(name)
        known = [key for key in catalogue("models") if last == key or last.startswith(f"{key}-")]
        if not known:
            msg = f"the model {name!r} must be one of {', '.join(catalogue('models'))}; give --model-config"
            raise ConfigError(msg)
        source = entry("models", max(known, key=len))["config"]
    return ModelShape.from_config(
        source, name=name, tensor_parallel=tensor_parallel, expert_parallel=expert_parallel
    )


def _last_part(name: str) -> str:
    # Of "Qwen/Qwen3-32B", of a folder of that name, and of the hub's cache.
    cached = re.search(r"models--(?:[^/]+--)?([^/]+)/snapshots/", name)
    return (cached[1] if cached else name.rstrip("/").rsplit("/", 1)[-1]).lower()


def _plain(value: Any) -> Any:
    # As engines print them: "torch.bfloat16", "SchedulerPolicy.FCFS".
    return value.rsplit(".", 1)[-1].lower() if isinstance(value, str) and value != "None" else value


def _short(kind: Any) -> Any:
    return _SHORT_NAMES.get(kind, kind)


def _refuse(name: str, value: Any, why: str) -> None:
    raise ConfigError(f"meta.json, {name}: {value!r} is not simulated: {why}; take a run without")


def _integer(run: RealRun, name: str, default: int | None = None, least: int = 1) -> int:
    value = run.setting(name, default=default)
    if type(value) is not int or value < least:
        raise ConfigError(f"meta.json, {name}: must be an integer >= {least}: {value!r}")
    if value >= 1 << 31:
        raise ConfigError(f"meta.json, {name}: must be an integer of 32 bits: {value!r}")
    return value


def _flag(run: RealRun, name: str, *, default: bool) -> bool:
    value = run.setting(name, default=default)
    if type(value) is not bool:
        raise ConfigError(f"meta.json, {name}: must be true or false: {value!r}")
    return value


def _blocks(run: RealRun, block_size: int, num_ranks: int) -> int | None:
    """
    Blocks of one rank's KV cache, where the run says them.
    """
    if run.setting("num_gpu_blocks_override") is not None:
        return _integer(run, "num_gpu_blocks_override", least=2)
    if run.setting("kv_cache_size_tokens") is not None:
        return _integer(run, "kv_cache_size_tokens", least=2 * block_size) // block_size
    if run.setting("num_gpu_blocks") is not None:
        # vLLM's front end sums these, and only these, over data-parallel engines.
        return _integer(run, "num_gpu_blocks", least=2 * num_ranks) // num_ranks
    return None


def _estimated_blocks(run: RealRun, profile: LayerProfile, model: ModelShape, block_size: int) -> int:
    for names, formats in _FORMATS.items():
        value = run.setting(*names)
        if value is not None and _plain(value) not in formats:
            msg = f"meta.json, {names[-1]}: the memory of {value!r} is not counted, and the blocks of the KV cache"
            raise ConfigError(f"{msg} are not known; give --num-blocks")
    memory = (run.meta.get("hardware") or {}).get("device_total_memory_bytes") or CARD_BYTES.get(profile.card)
    if memory is None:
        msg = f"the memory of {profile.card!r} is not known, nor the blocks of the KV cache; give --num-blocks"
        raise ConfigError(msg)
    # vLLM's default share was 0.90 until it became 0.92 (seen in runs of 0.19 and 0.28).
    minor = re.match(r"0\.(\d+)", str(run.meta.get("vllm_version", "")))
    is_old = minor is not None and int(minor[1]) < 20
    share = run.setting("gpu_memory_utilization", default=0.9 if is_old else 0.92)
    for name, value, most in (
        ("device_total_memory_bytes", memory, 1 << 50),
        ("gpu_memory_utilization", share, 1),
    ):
        if type(value) not in (int, float) or not 0 < value <= most:
            raise ConfigError(f"meta.json, {name}: must be a number above 0, at most {most}: {value!r}")
    return kv_blocks(
        model, float(memory), gpu_memory_utilization=share, block_size=block_size, activation_bytes=1.2 * GIB
    )
