"""What a Hugging Face configuration says of a model's size: parameters, counted matrix by matrix."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

ARCHITECTURES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
)
"""Those whose layers are counted here; others have parts that would be missed."""


class ParameterCount:
    """
    The parameters of a configuration, in all layers, by how ranks share them.

    `shared` is cut among tensor-parallel ranks, `replicated` is on each; `small` are norms, biases and routers.

    Args:
        config: The configuration.
        name: What to call it in errors.

    Raises:
        ConfigError: A key is missing or wrong, or the architecture is another one; all of it is said at once.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name, self._errors = config, name, list[str]()
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            self._errors.append(f"'model_type' must be one of {', '.join(ARCHITECTURES)}: {model_type!r}")
        hidden = self.hidden = self._get("hidden_size")
        self.layers = layers = self._get("num_hidden_layers")
        self.heads = heads = self._get("num_attention_heads")
        vocabulary = self._get("vocab_size")
        self.kv_heads = kv_heads = self._get("num_key_value_heads", default=heads)
        self.kv_rank = self._get("kv_lora_rank", default=0, least=0)
        self.rope_dim = self._get("qk_rope_head_dim", default=0, least=0)
        if self.kv_rank:
            self.head_dim = self._get("qk_nope_head_dim")
            self.query_dim = self.head_dim + self.rope_dim
            self.value_dim = self._get("v_head_dim")
            query_rank = self._get("q_lora_rank", default=0, least=0)
            latent = hidden * (self.kv_rank + self.rope_dim) + hidden * query_rank
            attention = (
                (query_rank or hidden) * heads * self.query_dim
                + self.kv_rank * heads * (self.head_dim + self.value_dim)
                + heads * self.value_dim * hidden
            )
            norms = 2 * hidden + self.kv_rank + query_rank
        else:
            self.head_dim = self.query_dim = self.value_dim = self._get("head_dim", default=hidden // heads)
            latent = 0
            attention = hidden * self.head_dim * (2 * heads + 2 * kv_heads)
            norms = 2 * hidden
            if model_type in ("qwen3", "qwen3_moe"):
                norms += 2 * self.head_dim
            if model_type in ("qwen2", "qwen2_moe"):
                norms += self.head_dim * (heads + 2 * kv_heads)

        expert_keys = ("n_routed_experts", "num_local_experts", "num_experts")
        self.num_experts = max(self._get(key, default=0, least=0) for key in expert_keys)
        self.experts_per_token = self._get("num_experts_per_tok") if self.num_experts else 0
        dense_width = self._get("intermediate_size", default=None if not self.num_experts else 0, least=0)
        self.moe_layers = self._num_moe_layers()
        width = self._get("moe_intermediate_size", default=dense_width, least=0)
        shared_width = width * self._get("n_shared_experts", default=0, least=0)
        shared_width += self._get("shared_expert_intermediate_size", default=0, least=0)

        self.replicated = layers * latent
        mlp = 3 * hidden * ((layers - self.moe_layers) * dense_width + self.moe_layers * shared_width)
        self.shared = layers * attention + mlp
        self.experts = 3 * hidden * width * self.num_experts * self.moe_layers
        self.small = layers * norms + hidden + self.moe_layers * hidden * self.num_experts
        self.embedding = vocabulary * hidden
        self.is_tied = bool(config.get("tie_word_embeddings", False))
        embeddings = self.embedding * (1 if self.is_tied else 2)
        self.total = self.shared + self.replicated + self.experts + self.small + embeddings
        if self._errors:
            raise ConfigError(f"{'; '.join(self._errors)} @ the configuration of {name}")

    def _num_moe_layers(self) -> int:
        if not self.num_experts:
            return 0
        first = self._get("first_k_dense_replace", default=0, least=0)
        every = self._get("moe_layer_freq", default=1)
        step = self._get("decoder_sparse_step", default=1)
        dense = self._config.get("mlp_only_layers") or ()
        if not isinstance(dense, Sequence):
            self._errors.append(f"'mlp_only_layers' must be a list: {dense!r}")
            return 0
        return sum(
            i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense for i in range(self.layers)
        )

    def _get(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if type(value) is not int or value < least:
            rule = f"'{key}' must be an integer >= {least}"
            self._errors.append(f"{rule}: {value!r}" if key in self._config else f"{rule}, but is missing")
            return max(least, 1)
        return value


def read_config(path: Path) -> Mapping[str, Any]:
    """
    A `config.json`.

    Raises:
        ConfigError: The file cannot be read, or is something else.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} must be a model's config.json: {exc}") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} must hold a JSON object: {type(config).__name__}")
    return config
