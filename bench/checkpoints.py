"""
Small random checkpoints that vLLM serves: nothing is downloaded, and a graph bug changes their tokens.

The weights are wide enough that what is said depends on the whole prompt, not on its last word: an engine
that reads a stale KV cache says something else.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aclgraph_dispatch.errors import ConfigError

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}

_WORDS = """
a about above across after again against age air all along already also always among an and animal answer
apple are around art as ask at autumn away back bag bank be bear because bed before begin behind bell below
best better between big bird black blue boat body book both bottle box boy branch bread bridge bright bring
brother brown build but butter by call can candle care carry castle cat chair change child circle city clean
clear clock close cloud coat cold colour come cook copper corn could country cross cup dance dark day deep
desk door down dream dress drink drive dry each ear early earth east edge egg eight empty end engine evening
every eye face fall family far farm fast father feather field fire first fish five flag floor flower fly
food foot forest four fox free friend from fruit full garden gate gentle girl give glass go gold good grass
great green grey ground grow hand happy harbour hat head hear heart heavy hill hold home honey horse hour
house how hundred ice if in island it jump just keep key kind king kitchen know lake lamp land large last
late leaf learn left letter light like lion listen little long look loud low make many map market meadow
milk mill mirror moon more morning mother mountain mouse music name near new night nine north not ocean old
one open paper path pear pine quiet rain river road rose sea star sun the tree water wind
"""

VOCABULARY = [*SPECIAL_TOKENS.values(), *_WORDS.split()]
"""The tokens in the order of their ids; a text of n words is n tokens."""

_COMMON = {
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {
        **_COMMON,
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "mla": {
        **_COMMON,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        # Plain rope would go to a CPU kernel that rotates DeepSeek's 3-D queries by the wrong positions, so
        # that the tokens of a request depend on who else is in the batch. Yarn takes another path.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4,
            "original_max_position_embeddings": 512,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}
"""The models by name: what Hugging Face's config of that model type takes."""

ADAPTER_RANK = 8
ADAPTED = {"gqa": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
"""The models that have adapters, and the linear layers these change."""

_FORMAT = 1  # to be raised when the same architecture and seed give another checkpoint
_FINGERPRINT_FILE = "aclgraph_dispatch.json"


def write_checkpoint(name: str, directory: Path, *, seed: int = 0, num_layers: int | None = None) -> Path:
    """
    Write the model *name* into *directory*, or leave it as it is if it is there already.

    With *num_layers*, only its first layers, with the weights of the whole model: such a drafter is often right.
    """

    def write(unfinished: Path) -> None:
        _write_model(fingerprint["architecture"], unfinished, seed)
        _write_tokenizer(unfinished)

    fingerprint = _fingerprint(name, seed, num_layers)
    return write_once(directory, fingerprint, write)


def cached_checkpoint(name: str, *, seed: int = 0, num_layers: int | None = None) -> Path:
    """
    The model *name* in the user's cache (``ACLGRAPH_DISPATCH_CACHE``), written on first use.
    """
    directory = _cached("checkpoints", name, seed, _fingerprint(name, seed, num_layers))
    return write_checkpoint(name, directory, seed=seed, num_layers=num_layers)


def write_adapter(name: str, directory: Path, *, seed: int = 0) -> Path:
    """
    Write a LoRA adapter (PEFT's format) of the model *name* into *directory*, unless it is there already.

    It changes every linear layer of attention and MLPs, by enough that a request gets other tokens.
    """

    def write(unfinished: Path) -> None:
        _write_adapter(name, unfinished, seed)

    fingerprint = _adapter_fingerprint(name, seed)
    return write_once(directory, fingerprint, write)


def cached_adapter(name: str, *, seed: int = 0) -> Path:
    """
    An adapter of the model *name* in the user's cache, written on first use; another for each *seed*.
    """
    return write_adapter(name, _cached("adapters", name, seed, _adapter_fingerprint(name, seed)), seed=seed)


def _cached(kind: str, name: str, seed: int, fingerprint: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    cache = os.environ.get("ACLGRAPH_DISPATCH_CACHE") or Path.home() / ".cache" / "aclgraph-dispatch"
    return Path(cache) / kind / f"{name}-{seed}-{digest[:8]}"


def write_once(directory: Path, fingerprint: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """
    Let *write* fill *directory*, unless it was filled under the same *fingerprint* (plain JSON) before.

    The directory appears complete or not at all; whatever else is there is an error.
    """
    if _holds(directory, fingerprint):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch_directory = tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent)
    except OSError as exc:
        msg = f"{directory} must be writable: {exc}; name another directory, for the cache ACLGRAPH_DISPATCH_CACHE"
        raise ConfigError(msg) from None
    with scratch_directory as scratch:
        unfinished = Path(scratch) / "checkpoint"
        unfinished.mkdir()
        write(unfinished)
        (unfinished / _FINGERPRINT_FILE).write_text(json.dumps(fingerprint, indent=2))
        try:
            unfinished.rename(directory)
        except OSError:  # another process may have been first
            if not _holds(directory, fingerprint):
                raise
    return directory


def _fingerprint(name: str, seed: int, num_layers: int | None = None) -> dict[str, Any]:
    if name not in MODELS:
        msg = f"model must be one of {', '.join(MODELS)}: {name!r}; choose one of them"
        raise ConfigError(msg)
    architecture = MODELS[name] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    return {"format": _FORMAT, "name": name, "seed": seed, "architecture": architecture}


def _adapter_fingerprint(name: str, seed: int) -> dict[str, Any]:
    if name not in ADAPTED:
        msg = f"the model of an adapter must be one of {', '.join(ADAPTED)}: {name!r}; choose one of them"
        raise ConfigError(msg)
    return _fingerprint(name, seed) | {"adapter_rank": ADAPTER_RANK}


def _holds(directory: Path, fingerprint: dict[str, Any]) -> bool:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        found = json.loads((directory / _FINGERPRINT_FILE).read_text())
    except (OSError, ValueError):
        found = None
    if found != fingerprint:
        wanted = ", ".join(f"{key} {fingerprint[key]!r}" for key in fingerprint if key != "architecture")
        msg = (
            f"{directory} must be absent, empty or hold the checkpoint of {wanted}, but holds something else;"
            " remove it or name another directory"
        )
        raise ConfigError(msg)
    return True


def _write_model(architecture: dict[str, Any], directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**architecture)
    with torch.device("meta"):  # its own initial weights are neither needed nor drawn
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if parameter_name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=1.0 if "embed_tokens" in parameter_name else 0.08, generator=generator)
        # Special tokens then lose to the best of the words: no output ends early or shows a gap.
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0
    model.generation_config = GenerationConfig()  # the config's own would name an end token
    model.save_pretrained(directory)


def _write_adapter(name: str, directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # only names and shapes are wanted
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for module_name, module in sorted(model.named_modules()):
        if module_name.endswith(ADAPTED[name]):
            prefix = f"base_model.model.{module_name}"
            down = torch.empty(ADAPTER_RANK, module.in_features)
            up = torch.empty(module.out_features, ADAPTER_RANK)
            weights[f"{prefix}.lora_A.weight"] = down.normal_(std=0.1, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = up.normal_(std=0.2, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": list(ADAPTED[name]),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    ids = {token: token_id for token_id, token in enumerate(VOCABULARY)}
    words = Tokenizer(WordLevel(ids, unk_token=SPECIAL_TOKENS["unk_token"]))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=_COMMON["max_position_embeddings"], **SPECIAL_TOKENS
    )
    tokenizer.save_pretrained(directory)
