import json
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from aclgraph_dispatch.bench.checkpoints import (
    ADAPTER_RANK,
    MODELS,
    SPECIAL_TOKENS,
    VOCABULARY,
    cached_adapter,
    cached_checkpoint,
    write_adapter,
    write_checkpoint,
)
from aclgraph_dispatch.errors import ConfigError


def read(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_gives_the_same_bytes(name, tmp_path):
    """
    A name and a seed determine every byte; another seed changes the weights.
    """
    first = read(write_checkpoint(name, tmp_path / "first", seed=3))
    second = read(write_checkpoint(name, tmp_path / "second", seed=3))
    other = read(write_checkpoint(name, tmp_path / "other", seed=4))

    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["config.json"] == other["config.json"]


def test_first_layers_are_the_whole_models(tmp_path):
    """
    A checkpoint of fewer layers has the weights of the whole model, and its own place in the cache.
    """
    whole = load_file(write_checkpoint("gqa", tmp_path / "whole") / "model.safetensors")
    first = load_file(write_checkpoint("gqa", tmp_path / "first", num_layers=3) / "model.safetensors")

    assert {name for name in whole if "layers.3." not in name} == first.keys()
    assert all(torch.equal(whole[name], weight) for name, weight in first.items())


def test_special_tokens_come_first_and_the_vocabulary_is_the_models():
    """
    Token ids in the architectures mean the tokens they are meant for.
    """
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    for architecture in MODELS.values():
        assert architecture["vocab_size"] == len(VOCABULARY)
        for kind in ("pad", "bos", "eos"):
            assert VOCABULARY[architecture[f"{kind}_token_id"]] == SPECIAL_TOKENS[f"{kind}_token"]


def test_no_end_token_is_configured_for_generation(tmp_path):
    """
    The checkpoint's own generation defaults stop at nothing.
    """
    written = json.loads((write_checkpoint("gqa", tmp_path / "gqa") / "generation_config.json").read_text())

    assert "eos_token_id" not in written


def test_same_checkpoint_is_reused_as_it_is(tmp_path):
    """
    A second call touches nothing and leaves nothing beside the directory.
    """
    directory = write_checkpoint("gqa", tmp_path / "gqa")
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}

    assert directory == write_checkpoint("gqa", tmp_path / "gqa")
    assert before == {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert [directory] == list(tmp_path.iterdir())


def test_an_empty_directory_is_filled(tmp_path):
    """
    An empty directory holds nothing to lose.
    """
    (tmp_path / "gqa").mkdir()

    assert (write_checkpoint("gqa", tmp_path / "gqa") / "model.safetensors").is_file()


def test_another_seed_in_the_directory_is_an_error(tmp_path):
    """
    A directory never silently serves another checkpoint than the one asked for.
    """
    write_checkpoint("gqa", tmp_path / "gqa", seed=0)

    with pytest.raises(ConfigError, match="name 'gqa', seed 1"):
        write_checkpoint("gqa", tmp_path / "gqa", seed=1)


def test_a_foreign_directory_or_file_is_an_error_and_stays(tmp_path):
    """
    The message names path and remedy, and what was there is still there.
    """
    (tmp_path / "mine").mkdir()
    for foreign in (tmp_path / "mine" / "thesis.txt", tmp_path / "file"):
        foreign.write_text("years of work")
    for directory in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"{directory} must be absent, empty or .* remove it or name"):
            write_checkpoint("gqa", directory)

    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "years of work"


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """
    A checkpoint is there completely or not at all.
    """

    def fail(directory):
        raise OSError("disk full")

    monkeypatch.setattr("aclgraph_dispatch.bench.checkpoints._write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint("gqa", tmp_path / "gqa")

    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    """
    The message names path, cause and remedy.
    """
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "gqa"

    with pytest.raises(ConfigError, match=f"{directory} must be writable: .*; name another"):
        write_checkpoint("gqa", directory)


def test_unknown_name_is_an_error_naming_the_known_ones(tmp_path):
    """
    A misspelt model is told what there is.
    """
    with pytest.raises(ConfigError, match="must be one of gqa, mla: 'gpa'"):
        write_checkpoint("gpa", tmp_path / "gpa")


def test_cache_keeps_models_and_seeds_apart(tmp_path, monkeypatch):
    """
    Each model and seed has its own directory under ACLGRAPH_DISPATCH_CACHE.
    """
    monkeypatch.setenv("ACLGRAPH_DISPATCH_CACHE", str(tmp_path))
    paths = {cached_checkpoint("gqa"), cached_checkpoint("gqa", seed=1), cached_checkpoint("mla")}

    assert len(paths) == 3
    assert all(path.is_relative_to(tmp_path) and path.is_dir() for path in paths)
    assert cached_checkpoint("gqa") in paths


def test_adapter_of_the_same_seed_has_the_same_bytes(tmp_path):
    """
    A name and a seed determine every byte of an adapter; another seed changes the weights.
    """
    first = read(write_adapter("gqa", tmp_path / "first", seed=3))
    second = read(write_adapter("gqa", tmp_path / "second", seed=3))
    other = read(write_adapter("gqa", tmp_path / "other", seed=4))

    assert first == second
    assert first["adapter_model.safetensors"] != other["adapter_model.safetensors"]
    assert first["adapter_config.json"] == other["adapter_config.json"]


def test_adapter_changes_every_linear_layer_of_its_model(tmp_path):
    """
    Each weight between embedding and head, norms aside, has a pair of factors of the adapter's rank whose product
    has its shape.
    """
    model = load_file(write_checkpoint("gqa", tmp_path / "gqa") / "model.safetensors")
    directory = write_adapter("gqa", tmp_path / "adapter")
    adapter = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    adapted = {name for name in model if name.endswith("proj.weight")}

    assert 7 * MODELS["gqa"]["num_hidden_layers"] == len(adapted)
    assert 2 * len(adapted) == len(adapter)
    assert (ADAPTER_RANK, ADAPTER_RANK) == (config["r"], config["lora_alpha"])
    assert set(config["target_modules"]) == {name.split(".")[-2] for name in adapted}
    for name in adapted:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = (adapter[f"{prefix}.lora_{half}.weight"] for half in "AB")
        assert ADAPTER_RANK == len(down)
        change = up @ down
        assert change.shape == model[name].shape
        assert change.norm() > 0.3 * model[name].norm()


def test_adapters_are_cached_apart_from_models(tmp_path, monkeypatch):
    """
    Each adapter has its own directory, and is found there again.
    """
    monkeypatch.setenv("ACLGRAPH_DISPATCH_CACHE", str(tmp_path))
    paths = {cached_adapter("gqa"), cached_adapter("gqa", seed=1), cached_checkpoint("gqa")}

    assert len(paths) == 3
    assert all(path.is_relative_to(tmp_path) and path.is_dir() for path in paths)
    assert cached_adapter("gqa") in paths


def test_adapter_of_a_model_that_has_none_is_an_error(tmp_path):
    """
    The message names the models that have adapters.
    """
    with pytest.raises(ConfigError, match="model of an adapter must be one of gqa: 'mla'"):
        write_adapter("mla", tmp_path / "mla")


STOCK_VLLM = {
    "VLLM_PLUGINS": "",  # none, so not our platform either
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

SERVE_ALONE_AND_TOGETHER = """
import json, sys
from vllm import LLM, SamplingParams

model, requests = json.load(sys.stdin)
llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16,
          max_num_batched_tokens=64, enable_prefix_caching=False)
prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
alone = [llm.generate(*request, use_tqdm=False)[0] for request in zip(prompts, params)]
together = llm.generate(prompts, params, use_tqdm=False)
said = [[(list(r.outputs[0].token_ids), r.outputs[0].text) for r in run] for run in (alone, together)]
print("\\n" + json.dumps(said))
"""


@pytest.mark.engine
@pytest.mark.parametrize("name", MODELS)
def test_a_request_says_the_same_alone_and_in_a_batch(name, tmp_path):
    """
    In stock vLLM tokens depend on the whole prompt and on nothing but the prompt, and are readable words.
    """
    rng = random.Random(0)
    words = range(len(SPECIAL_TOKENS), len(VOCABULARY))
    prompts = [rng.choices(words, k=n) for n in [1, 150, *rng.choices(range(1, 151), k=14), 20]]
    prompts.append([words[0], *prompts[-1][1:]])  # the same but for the first word
    requests = [(prompt, rng.randint(8, 40)) for prompt in prompts]
    model = write_checkpoint(name, tmp_path / name)

    done = subprocess.run(
        [sys.executable, "-c", SERVE_ALONE_AND_TOGETHER],
        input=json.dumps([str(model), requests]),
        env={**os.environ, **STOCK_VLLM},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    alone, together = json.loads(done.stdout.splitlines()[-1])

    assert alone == together
    assert [n for _, n in requests] == [len(tokens) for tokens, _ in alone]
    assert all(text.split() == [VOCABULARY[token] for token in tokens] for tokens, text in alone)
    assert len({tuple(tokens[:8]) for tokens, _ in alone}) == len(requests)
    assert all(len(set(tokens)) > len(tokens) / 3 for tokens, _ in alone)
    assert len({token for tokens, _ in alone for token in tokens}) > 100
