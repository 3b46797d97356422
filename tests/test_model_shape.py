"""How large a model is on a rank."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, activated_share, kv_blocks

LLAMA = catalogue("models")["llama-3.1-8b"]["config"]
MOE = catalogue("models")["qwen3-30b-a3b"]["config"]
LITE = catalogue("models")["deepseek-v2-lite"]["config"]
V3 = catalogue("models")["deepseek-v3"]["config"]


@pytest.mark.parametrize("name", catalogue("models"))
def test_published_parameters(name):
    """
    Models of the catalogue have as many parameters as is published, within 0.5 %.
    """
    published = catalogue("models")[name]["published_parameters"]["value"]

    assert published == pytest.approx(ModelShape.named(name).num_parameters, rel=0.005)


@pytest.mark.parametrize(
    ("name", "active", "with_embeddings"),
    # Who published them did or did not count the input embeddings, of which a token meets one row.
    [
        ("qwen3-30b-a3b", 3.3e9, True),
        ("qwen3-235b-a22b", 22e9, True),
        ("deepseek-v3", 37e9, False),
        ("deepseek-v2-lite", 2.4e9, False),
    ],
)
def test_published_active_parameters(name, active, with_embeddings):
    """
    A token meets as many parameters as is published, within 2.5 %.
    """
    config = catalogue("models")[name]["config"]
    embeddings = 0 if with_embeddings else config["vocab_size"] * config["hidden_size"]

    assert active == pytest.approx(ModelShape.named(name).num_active_parameters - embeddings, rel=0.025)


@pytest.mark.parametrize(
    ("name", "num_layers", "kind", "kv_bytes_per_token"),
    [
        # costs.md 4.2: 57, 31 and 70 KB.
        ("qwen2.5-7b", 28, "dense", 2 * 28 * 4 * 128 * 2),
        ("deepseek-v2-lite", 27, "mla_moe", 27 * 576 * 2),
        ("deepseek-v3", 61, "mla_moe_int8", 61 * 576 * 2),
        ("qwen3-235b-a22b", 94, "moe", 2 * 94 * 1 * 128 * 2),
    ],
)
def test_layers_and_cache(name, num_layers, kind, kv_bytes_per_token):
    """
    Layers, kind, and KV cache of a token: keys and values of a rank's heads, or MLA's latent on every rank.
    """
    shape = ModelShape.named(name)

    assert (num_layers, kind, kv_bytes_per_token) == (shape.num_layers, shape.kind, shape.kv_bytes_per_token)


def test_weights():
    """
    Weights on one rank are those of the model: read in every pass, head, and embeddings.
    """
    shape = ModelShape.from_config(LLAMA)

    assert shape.memory_bytes == 2 * shape.num_parameters == 2 * 8_030_261_248
    assert shape.head_bytes == shape.embedding_bytes == 2 * 128256 * 4096
    assert shape.token_flops == shape.dense_bytes
    assert shape.head_flops == shape.head_bytes
    # Queries with keys, and weights with values: 32 heads of 128, 32 layers.
    assert shape.decode_pair_flops == shape.prefill_pair_flops == 2 * 32 * 32 * 2 * 128


def test_tied_embeddings():
    """
    Embeddings that serve as head are there once.
    """
    tied, own = (ModelShape.from_config({**LLAMA, "tie_word_embeddings": tied}) for tied in (True, False))

    assert tied.embedding_bytes == 0
    assert own.memory_bytes - tied.memory_bytes == own.embedding_bytes
    assert own.num_parameters - tied.num_parameters == 128256 * 4096


def test_tensor_parallel():
    """
    Four ranks have a quarter each, and reduce twice a layer: three quarters of a row there, as much back.
    """
    one, four = (ModelShape.from_config(LLAMA, tensor_parallel=n) for n in (1, 4))
    norms = 2 * (2 * 32 + 1) * 4096

    assert four.dense_bytes - norms == (one.dense_bytes - norms) / 4
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4
    assert four.decode_pair_flops == one.decode_pair_flops / 4
    assert (one.num_collectives, one.collective_bytes_per_token) == (0, 0)
    assert four.num_collectives == 64
    assert four.collective_bytes_per_token == 64 * 2 * 0.75 * 4096 * 2


def test_experts():
    """
    Without expert parallelism each rank has a share of every expert; with it, some of the experts.
    """
    cut, spread = (ModelShape.from_config(MOE, tensor_parallel=4, expert_parallel=n) for n in (1, 4))
    wide = ModelShape.from_config(MOE, tensor_parallel=1, expert_parallel=4)

    assert cut.expert_bytes == spread.expert_bytes == wide.expert_bytes == 2 * 48 * 128 * 3 * 2048 * 768 / 4
    assert (cut.expert_tokens, spread.expert_tokens, wide.expert_tokens) == (1, 1, 4)
    # Whoever computes a token's experts, it is a quarter of the work for one of four ranks' tokens.
    assert wide.token_flops > spread.token_flops
    assert cut.token_flops == spread.token_flops
    assert (spread.num_collectives, wide.num_collectives) == (96, 96)
    assert wide.collective_bytes_per_token == 96 * 2 * 2048 * 8 * 0.75


def test_mla():
    """
    MLA decodes on its latent, by more operations than a prefill, and every rank has all of it.
    """
    one, two = (ModelShape.from_config(LITE, tensor_parallel=n) for n in (1, 2))

    assert one.decode_pair_flops == 27 * 2 * 16 * (512 + 64 + 512)
    assert one.prefill_pair_flops == 27 * 2 * 16 * (128 + 64 + 128)
    assert one.kv_bytes_per_token == two.kv_bytes_per_token
    assert two.dense_bytes > one.dense_bytes / 2


def test_weight_bytes():
    """
    Eight-bit weights are half as large, but for norms and routers, and another kind of layer.
    """
    wide, narrow = (ModelShape.from_config(V3, weight_bytes=n) for n in (2, 1))

    assert wide.kind == "mla_moe"
    assert narrow.kind == "mla_moe_int8"
    assert wide.expert_bytes == 2 * narrow.expert_bytes
    assert wide.head_bytes == narrow.head_bytes
    assert narrow.dense_bytes < wide.dense_bytes < 2 * narrow.dense_bytes


def test_from_file(tmp_path):
    """
    A directory, its file and its contents are the same model, named by the directory.
    """
    directory = tmp_path / "some-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.from_config(directory)

    assert shape.name == "some-model"
    assert shape == ModelShape.from_config(str(directory / "config.json"))
    assert shape == attrs.evolve(ModelShape.from_config(LLAMA), name="some-model")
    assert ModelShape.from_config(LLAMA).name == "llama"
    assert ModelShape.from_config(directory, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "'tensor_parallel' must be an integer >= 1: 0 @ llama"),
        ({"tensor_parallel": 1.5}, "'tensor_parallel' must be an integer >= 1: 1.5 @ llama"),
        (
            {"expert_parallel": 2},
            "'expert_parallel' must be a multiple of 'tensor_parallel' = 1, and 1 without experts: 2 @ llama",
        ),
        ({"weight_bytes": 0}, "'weight_bytes' must be a finite number > 0: 0 @ ModelShape 'llama'"),
        ({"kv_bytes": 0}, "'kv_bytes_per_token' must be a finite number > 0: 0 @ ModelShape 'llama'"),
    ],
)
def test_wrong_layout(options, message):
    """
    Ranks and widths that cannot be are refused.
    """
    with pytest.raises(ConfigError) as excinfo:
        ModelShape.from_config(LLAMA, **options)

    assert message == str(excinfo.value)


def test_expert_parallel_not_a_multiple():
    """
    Tensor-parallel groups are not torn apart.
    """
    with pytest.raises(ConfigError, match="'expert_parallel' must be a multiple of 'tensor_parallel' = 2"):
        ModelShape.from_config(MOE, tensor_parallel=2, expert_parallel=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "'kind' must be one of dense, moe, moe_int8, mla_moe, mla_moe_int8: 'mamba'"),
        ({"experts_per_token": 1}, "'experts_per_token' must be <= 'num_experts' = 0: 1"),
        ({"num_layers": 0}, "'num_layers' must be a finite number > 0: 0"),
    ],
)
def test_wrong_shape(change, message):
    """
    What no model is, is refused.
    """
    with pytest.raises(ConfigError) as excinfo:
        attrs.evolve(ModelShape.from_config(LLAMA), **change)

    assert f"{message} @ ModelShape 'llama'" == str(excinfo.value)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 5000), st.integers(0, 5000))
def test_activated_share(num_experts, experts_per_token, num_tokens, more):
    """
    One token meets its experts, more tokens meet no fewer, and never more than all.
    """
    k = min(experts_per_token, num_experts)

    assert activated_share(num_experts, k, 1) == pytest.approx(k / num_experts)
    assert activated_share(num_experts, k, num_tokens) <= activated_share(num_experts, k, num_tokens + more) <= 1


def test_expert_tokens():
    """
    Experts of data-parallel ranks see the tokens of all of them; a dense model has none to meet.
    """
    alone, among_four = (ModelShape.from_config(MOE, expert_parallel=n) for n in (1, 4))

    assert among_four.activated_share(4) == alone.activated_share(16)
    assert ModelShape.from_config(LLAMA).activated_share(16) == 0


def test_kv_blocks():
    """
    Blocks fill what weights and activations leave.
    """
    shape = ModelShape.from_config(LLAMA)
    block_bytes = 16 * shape.kv_bytes_per_token

    assert 1000 == kv_blocks(shape, (shape.memory_bytes + 2**30 + 1000.5 * block_bytes) / 0.9)
    assert 500 == kv_blocks(
        shape,
        shape.memory_bytes + 1000.5 * block_bytes,
        gpu_memory_utilization=1,
        block_size=32,
        activation_bytes=0,
    )
    assert 999 == kv_blocks(
        shape,
        shape.memory_bytes + 1000.5 * block_bytes,
        gpu_memory_utilization=1,
        activation_bytes=0,
        graph_bytes=block_bytes,
    )


def test_too_large():
    """
    A model that does not fit is refused, with its size.
    """
    with pytest.raises(ConfigError) as excinfo:
        kv_blocks(ModelShape.from_config(V3), 64 * 2**30)

    assert "must hold the weights of deepseek_v3, 1342.1 GB, and a KV cache: 68.7 GB at 0.9" in str(excinfo.value)


def test_weights_as_the_configuration_says():
    """
    A configuration quantized to FP8 has weights of one byte, unless told otherwise; another method is an error.
    """
    config = dict(LLAMA)
    fp8 = config | {"quantization_config": {"quant_method": "fp8"}}

    assert 1.0 == ModelShape.from_config(fp8).weight_bytes
    assert 2.0 == ModelShape.from_config(fp8, weight_bytes=2.0).weight_bytes
    assert 2.0 == ModelShape.from_config(config).weight_bytes
    for wrong in ({"quant_method": "awq"}, "awq"):
        with pytest.raises(ConfigError, match="'quantization_config' is understood for fp8 only: 'awq'"):
            ModelShape.from_config(config | {"quantization_config": wrong})
