"""What a Hugging Face configuration says of a model's size."""

import pytest

from aclgraph_dispatch.bench.checkpoints import MODELS
from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.parameters import ARCHITECTURES, ParameterCount, read_config

LLAMA = catalogue("models")["llama-3.1-8b"]["config"]
MOE = catalogue("models")["qwen3-30b-a3b"]["config"]


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name):
    """
    The count equals the number of parameters of the model that transformers makes of the configuration.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**MODELS[name])
        model = transformers.AutoModelForCausalLM.from_config(config)

    assert ParameterCount(MODELS[name], name).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"model_type": "mistral"},
        {"tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 64},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        {
            "model_type": "deepseek_v3",
            "q_lora_rank": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ],
    ids=lambda change: change.get("model_type", "llama"),
)
def test_architectures(change):
    """
    So it does for other architectures, biases and buffers of a few numbers a layer left aside.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    small = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 if "kv_lora_rank" in change else 2,
        "vocab_size": 500,
        "tie_word_embeddings": False,
    }
    config = small | change
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))

    assert ParameterCount(config, "small").total == sum(p.numel() for p in model.parameters())


def test_all_errors_at_once():
    """
    Whatever is missing or wrong is said in one error.
    """
    config = {**MOE, "hidden_size": "2048", "num_hidden_layers": 0, "model_type": "mamba2"}
    del config["vocab_size"], config["num_experts_per_tok"]

    with pytest.raises(ConfigError) as excinfo:
        ParameterCount(config, "broken")

    assert str(excinfo.value) == (
        f"'model_type' must be one of {', '.join(ARCHITECTURES)}: 'mamba2'; "
        "'hidden_size' must be an integer >= 1: '2048'; "
        "'num_hidden_layers' must be an integer >= 1: 0; "
        "'vocab_size' must be an integer >= 1, but is missing; "
        "'num_experts_per_tok' must be an integer >= 1, but is missing @ the configuration of broken"
    )


def test_another_family():
    """
    A configuration of another family, whose keys have other names, is refused by its first key.
    """
    with pytest.raises(ConfigError, match=r"'model_type' must be one of llama, .*: 'gpt2'; 'hidden_size' must be"):
        ParameterCount({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257}, "gpt2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a model's config.json: Expecting property name"),
        ("[1]", "must hold a JSON object: list"),
        ('"llama"', "must hold a JSON object: str"),
    ],
)
def test_broken_file(tmp_path, text, message):
    """
    A file that is no configuration is refused by name.
    """
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ConfigError) as excinfo:
        read_config(path)

    assert str(excinfo.value).startswith(f"{path} {message}")


def test_binary_file(tmp_path):
    """
    So is one that is no text, and one that is not there.
    """
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")

    for wrong in (path, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match=r"must be a model's config\.json: "):
            read_config(wrong)


def test_dense_layers_must_be_a_list():
    """
    The dense layers of an expert model are a list, or an error.
    """
    config = dict(MOE) | {"mlp_only_layers": 5}

    with pytest.raises(ConfigError, match="'mlp_only_layers' must be a list: 5"):
        ParameterCount(config, "model")
