"""How large a model is on one rank: what a step reads, computes, stores and sends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from .constants import ZERO, entry, require_numbers
from .errors import ConfigError
from .parameters import ParameterCount, read_config

KINDS = ("dense", "moe", "moe_int8", "mla_moe", "mla_moe_int8")
"""
Kinds of layers: they differ in the number of kernels. MLA without experts counts as dense, for want of a
measurement.
"""


@attrs.frozen(kw_only=True)
class ModelShape:
    """
    A model on one rank of its tensor and expert parallelism.

    Args:
        name: Its name.
        kind: One of `KINDS`.
        num_layers: Decoder layers.
        num_parameters: Parameters of the whole model, embeddings included.
        num_active_parameters: Those that one token meets, embeddings included.
        dense_bytes: Weights read in every pass: all but embeddings, output head and routed experts.
        expert_bytes: Weights of the routed experts that the rank holds.
        head_bytes: The output head.
        embedding_bytes: The input embeddings, of which little is read; 0 where the head serves as such.
        num_experts: Routed experts of a layer, on all ranks; 0 without.
        experts_per_token: How many of them a token meets.
        expert_tokens: Tokens that the experts see for one token of the rank: of how many ranks they are.
        token_flops: Floating-point operations for one token, without attention and head.
        head_flops: Those of the head, for one token that is sampled.
        kv_bytes_per_token: KV cache of one token, in all layers.
        decode_pair_flops: Operations of attention for a query and one cached token, in all layers.
        prefill_pair_flops: The same in a prefill, which differs with MLA.
        num_collectives: Collective operations of one pass.
        collective_bytes_per_token: What the rank sends in all of them for one token.
        weight_bytes: Bytes of one weight of a linear layer.

    Raises:
        ConfigError: A number breaks its rule; all of them are named.
    """

    name: str
    kind: str
    num_layers: int
    num_parameters: int
    num_active_parameters: int
    dense_bytes: float
    expert_bytes: float = attrs.field(default=0.0, metadata=ZERO)
    head_bytes: float = attrs.field(default=0.0, metadata=ZERO)
    embedding_bytes: float = attrs.field(default=0.0, metadata=ZERO)
    num_experts: int = attrs.field(default=0, metadata=ZERO)
    experts_per_token: int = attrs.field(default=0, metadata=ZERO)
    expert_tokens: float = 1.0
    token_flops: float
    head_flops: float = attrs.field(default=0.0, metadata=ZERO)
    kv_bytes_per_token: float
    decode_pair_flops: float = attrs.field(default=0.0, metadata=ZERO)
    prefill_pair_flops: float = attrs.field(default=0.0, metadata=ZERO)
    num_collectives: int = attrs.field(default=0, metadata=ZERO)
    collective_bytes_per_token: float = attrs.field(default=0.0, metadata=ZERO)
    weight_bytes: float = 2.0

    def __attrs_post_init__(self) -> None:
        require_numbers(self)
        if self.kind not in KINDS:
            raise ConfigError(
                f"'kind' must be one of {', '.join(KINDS)}: {self.kind!r} @ ModelShape {self.name!r}"
            )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"'experts_per_token' must be <= 'num_experts' = {self.num_experts}: {self.experts_per_token}"
                f" @ ModelShape {self.name!r}"
            )

    @property
    def memory_bytes(self) -> float:
        """
        All weights that the rank holds.
        """
        return self.dense_bytes + self.expert_bytes + self.head_bytes + self.embedding_bytes

    def activated_share(self, num_tokens: int) -> float:
        """
        The share of its experts that a batch of the rank meets (`activated_share`).
        """
        return activated_share(self.num_experts, self.experts_per_token, num_tokens * self.expert_tokens)

    @classmethod
    def named(cls, name: str) -> "ModelShape":
        """
        A model of the catalogue, in the parallelism and weights written there.

        Raises:
            ConfigError: There is none of that name.
        """
        table = entry("models", name)
        layout = {key: table[key]["value"] for key in ("tensor_parallel", "expert_parallel", "weight_bytes")}
        return cls.from_config(table["config"], name=name, **layout)

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any],
        *,
        name: str | None = None,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        weight_bytes: float | None = None,
        kv_bytes: float = 2.0,
    ) -> "ModelShape":
        """
        Count a model from its Hugging Face configuration.

        Attention, dense layers and head are cut by *tensor_parallel*; experts by *expert_parallel*, or by
        *tensor_parallel* where there is none. An *expert_parallel* above *tensor_parallel* means data-parallel
        attention: experts then see the tokens of all ranks, and tokens travel there and back. Linear layers have
        *weight_bytes*; embeddings, head, norms and routers have two bytes. Multi-token prediction is not counted.

        Args:
            config: The configuration, its file, or the directory with its `config.json`.
            name: Name of the model; by default the directory's, or the configuration's `model_type`.
            tensor_parallel: Ranks that share a layer.
            expert_parallel: Ranks that share the experts.
            weight_bytes: Bytes of a weight: 2 for BF16, 1 for W8A8 or FP8; None for what the configuration says.
            kv_bytes: Bytes of a cached number.

        Raises:
            ConfigError: The file cannot be read, a key is missing or wrong, or the architecture is another one.
        """
        if isinstance(config, Mapping):
            read = config
        else:
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            name = name or path.resolve().parent.name
            read = read_config(path)
        name = name or str(read.get("model_type"))
        for option, ways in (("tensor_parallel", tensor_parallel), ("expert_parallel", expert_parallel)):
            if type(ways) is not int or ways < 1:
                raise ConfigError(f"'{option}' must be an integer >= 1: {ways!r} @ {name}")
        count = ParameterCount(read, name)

        if weight_bytes is None:
            weight_bytes = _weight_bytes(read, name)
        is_mla, is_moe = count.kv_rank > 0, count.num_experts > 0
        if expert_parallel > 1 and (not is_moe or expert_parallel % tensor_parallel):
            raise ConfigError(
                f"'expert_parallel' must be a multiple of 'tensor_parallel' = {tensor_parallel}, and 1 without "
                f"experts: {expert_parallel} @ {name}"
            )
        # Each rank of a tensor-parallel group has at least one KV head; MLA's latent is on all of them.
        kv_heads = max(1, count.kv_heads // tensor_parallel)
        heads = count.heads / tensor_parallel
        kv_numbers = count.kv_rank + count.rope_dim if is_mla else 2 * kv_heads * count.head_dim
        if is_mla:
            decode_pair = 2 * heads * (2 * count.kv_rank + count.rope_dim)
        else:
            decode_pair = 2 * heads * (count.query_dim + count.value_dim)

        cut = tensor_parallel
        expert_cut = expert_parallel if expert_parallel > 1 else tensor_parallel
        is_spread = expert_parallel > tensor_parallel
        expert_tokens = expert_parallel / tensor_parallel if is_spread else 1.0
        linear = count.shared / cut + count.replicated
        active = count.experts * count.experts_per_token / max(1, count.num_experts)
        # All-reduces after attention and MLP; where tokens travel to experts, they go there and back instead.
        reduces = 0 if cut == 1 else 2 * count.layers - (count.moe_layers if is_spread else 0)
        travels = 2 * count.moe_layers if is_spread else 0
        row_bytes = 2 * count.hidden
        sent = row_bytes * (
            reduces * 2 * (cut - 1) / cut
            + travels * count.experts_per_token * (expert_parallel - 1) / expert_parallel
        )
        kind = ("mla_moe" if is_mla else "moe") + ("_int8" if weight_bytes == 1 else "") if is_moe else "dense"
        return cls(
            name=name,
            kind=kind,
            num_layers=count.layers,
            num_parameters=count.total,
            num_active_parameters=round(count.total - count.experts + active),
            dense_bytes=linear * weight_bytes + count.small * 2,
            expert_bytes=count.experts / expert_cut * weight_bytes,
            head_bytes=2 * count.embedding / cut,
            embedding_bytes=0.0 if count.is_tied else 2 * count.embedding / cut,
            num_experts=count.num_experts,
            experts_per_token=count.experts_per_token,
            expert_tokens=expert_tokens,
            token_flops=2 * (linear + count.small + active * expert_tokens / expert_cut),
            head_flops=2 * count.embedding / cut,
            kv_bytes_per_token=count.layers * kv_numbers * kv_bytes,
            decode_pair_flops=count.layers * decode_pair,
            prefill_pair_flops=count.layers * 2 * heads * (count.query_dim + count.value_dim),
            num_collectives=reduces + travels,
            collective_bytes_per_token=sent,
            weight_bytes=weight_bytes,
        )


def _weight_bytes(config: Mapping[str, Any], name: str) -> float:
    quantization = config.get("quantization_config")
    if quantization is None:
        return 2.0
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "fp8":
        msg = f"'quantization_config' is understood for fp8 only: {method!r} @ {name}; give the bytes of a weight"
        raise ConfigError(msg)
    return 1.0


def activated_share(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """
    The share of experts that a batch meets if each token chooses evenly: 1 - (1 - k/E)^s.

    It is an upper bound, as real routing is skewed (costs.md 4.1).
    """
    return float(1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens) if num_experts else 0.0


def kv_blocks(
    model: ModelShape,
    device_memory_bytes: float,
    *,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    activation_bytes: float = 2**30,
    graph_bytes: float = 0.0,
) -> int:
    """
    Blocks of the KV cache that fit beside the model, as vLLM reckons.

    Args:
        model: The model on one rank.
        device_memory_bytes: Memory of its device.
        gpu_memory_utilization: The share that vLLM may use.
        block_size: Tokens of a block.
        activation_bytes: What a step needs at most; vLLM measures it, the default is a guess.
        graph_bytes: What captured graphs take.

    Raises:
        ConfigError: Nothing is left for a block.
    """
    usable = device_memory_bytes * gpu_memory_utilization - model.memory_bytes - activation_bytes - graph_bytes
    num_blocks = int(usable // (model.kv_bytes_per_token * block_size))
    if num_blocks < 1:
        raise ConfigError(
            f"'device_memory_bytes' must hold the weights of {model.name}, {model.memory_bytes / 1e9:.1f} GB, and "
            f"a KV cache: {device_memory_bytes / 1e9:.1f} GB at {gpu_memory_utilization}; share it among more "
            "ranks (tensor_parallel)"
        )
    return num_blocks
