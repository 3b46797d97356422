"""
The engines that tests compare, and the requests they serve. Each engine is started once a session, in a
process of its own, two at a time.
"""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import attrs

from aclgraph_dispatch.bench.checkpoints import SPECIAL_TOKENS, VOCABULARY, cached_adapter, cached_checkpoint
from aclgraph_dispatch.bench.engine import EngineRequest, EngineRun, run_engine
from aclgraph_dispatch.config import KEY

MAX_NUM_SEQS = 16
SPECULATIVE_MODEL_LEN = 320


def words(rng: random.Random, count: int) -> list[int]:
    """
    A prompt of *count* random words.
    """
    return [rng.randrange(len(SPECIAL_TOKENS), len(VOCABULARY)) for _ in range(count)]


def ngram(num_drafts: int) -> dict[str, Any]:
    """
    Speculation without a model.
    """
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def drafter(num_drafts: int) -> dict[str, Any]:
    """
    Speculation by the first of the target's layers; every fifth draft or so is accepted.
    """
    model = str(cached_checkpoint("gqa", num_layers=3))
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num_drafts}


def churn() -> list[EngineRequest]:
    """
    Forty requests of mixed lengths, one arriving a step, so that some finish while others start; every tenth
    is given up on its way.
    """
    rng = random.Random(0)
    return [
        EngineRequest(
            f"request-{i}",
            words(rng, rng.choice([1, 2, 5, 17, 40, 90, 150])),
            rng.randint(4, 30),
            arrival_step=i,
            abort_step=i + 6 if i % 10 == 9 else None,
        )
        for i in range(40)
    ]


def shared_prefixes() -> list[EngineRequest]:
    """
    Requests that begin like an earlier one, by up to its whole prompt.
    """
    rng = random.Random(1)
    prefixes = [words(rng, 96) for _ in range(3)]
    return [
        EngineRequest(f"request-{i}", prefixes[i % 3] + words(rng, i % 5), 8 + i % 9, arrival_step=2 * i)
        for i in range(32)
    ]


def long_answers() -> list[EngineRequest]:
    """
    Requests that together outgrow a small KV cache.
    """
    rng = random.Random(2)
    return [
        EngineRequest(f"request-{i}", words(rng, rng.randint(20, 60)), rng.randint(40, 90), arrival_step=i)
        for i in range(32)
    ]


def adapters() -> list[EngineRequest]:
    """
    Eight requests of the base model, the same with an adapter, the same of the base model again, each after the
    other; then those of `churn`, every fourth of the base model, the others with one of three adapters.
    """
    first, second, third = (str(cached_adapter("gqa", seed=seed)) for seed in range(3))
    rng = random.Random(3)
    prompts = [words(rng, 5) for _ in range(8)]
    alike = [
        EngineRequest(f"{phase}-{i}", prompt, 10, arrival_step=start, lora=lora)
        for phase, start, lora in (("base", 0, None), ("adapted", 12, first), ("again", 24, None))
        for i, prompt in enumerate(prompts)
    ]
    mixed = [
        attrs.evolve(request, arrival_step=36 + i, abort_step=None, lora=(None, first, second, third)[i % 4])
        for i, request in enumerate(churn())
    ]
    return alike + mixed


def repetitive() -> list[EngineRequest]:
    """
    Prompts in which an n-gram drafter finds something. Three that hold every word, so that it always does: while
    they are alone, every step verifies the same number of drafts. Then short ones, in which it sometimes does;
    they also ask for log probabilities and for outputs by a grammar. Last one that ends at the model's maximum
    length.
    """
    rng = random.Random(4)
    vocabulary = range(len(SPECIAL_TOKENS), len(VOCABULARY))
    extras: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"structured_outputs": {"regex": "(river|road|rose)(stone|sea){2,9}"}, "ignore_eos": False},
    ]
    covering = [EngineRequest(f"covering-{i}", rng.sample(vocabulary, len(vocabulary)), 24) for i in range(3)]
    short = [
        EngineRequest(
            f"short-{i}",
            (words(rng, rng.choice([2, 3, 5])) * 20)[: rng.choice([1, 5, 17, 40])],
            rng.randint(6, 30),
            arrival_step=24 + i,
            sampling=extras[i % len(extras)],
        )
        for i in range(16)
    ]
    longest = EngineRequest("longest", words(rng, SPECULATIVE_MODEL_LEN - 20), 20, arrival_step=60)
    return [*covering, *short, longest]


def adapted() -> list[EngineRequest]:
    """
    Repetitive requests of the base model and of two adapters together.
    """
    adapters = (None, *(str(cached_adapter("gqa", seed=seed)) for seed in range(2)))
    return [
        attrs.evolve(request, arrival_step=i, sampling={}, lora=adapters[i % 3])
        for i, request in enumerate(repetitive()[3:15])
    ]


def sampled() -> list[EngineRequest]:
    """
    Requests with several outputs each, drawn by a seed of their own, with log probabilities and by a grammar.
    """
    rng = random.Random(5)
    extras: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 7, "n": 3},
        {"temperature": 1.0, "seed": 8, "n": 2, "logprobs": 3},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"structured_outputs": {"choice": ["river", "road"]}, "ignore_eos": False, "logprobs": 1},
    ]
    return [
        EngineRequest(f"request-{i}", words(rng, 1 + 3 * i), 12, arrival_step=i, sampling=extras[i % len(extras)])
        for i in range(12)
    ]


LOADS = {
    "repetitive": repetitive,
    "sampled": sampled,
    "adapted": adapted,
    "churn": churn,
    "shared_prefixes": shared_prefixes,
    "long_answers": long_answers,
    "adapters": adapters,
}

# The CPU platform switches chunked prefill and prefix caching off for MLA, and sets its own token budget.
_GQA = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
_SPECULATION = {**_GQA, "max_model_len": SPECULATIVE_MODEL_LEN}
_LORA = {**_GQA, "enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mla": ("mla", "churn", {}),
    "gqa": ("gqa", "churn", _GQA),
    "gqa-prefix_caching": (
        "gqa",
        "shared_prefixes",
        {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "block_size": 32},
    ),
    # Twenty blocks of 32 tokens for sixteen requests of up to 150.
    "gqa-preemption": (
        "gqa",
        "long_answers",
        {**_GQA, "block_size": 32, "num_gpu_blocks_override": 20, "max_model_len": 256},
    ),
    # On the CPU, stock vLLM gives requests of the base model the adapter in the last slot: here that is empty.
    "gqa-lora": ("gqa", "adapters", {**_LORA, "max_loras": 4}),
    "gqa-lora-specialised": ("gqa", "adapters", {**_LORA, "specialize_active_lora": True}),
    "gqa-lora-unspecialised": (
        "gqa",
        "adapters",
        {**_LORA, "compilation_config": {"cudagraph_specialize_lora": False}},
    ),
    # Stock vLLM cannot seed the sampling of a prompt that comes in chunks on the CPU.
    "gqa-sampled": ("gqa", "sampled", {**_GQA, "max_num_batched_tokens": 256}),
    **{f"gqa-ngram-{k}": ("gqa", "repetitive", {**_SPECULATION, "speculative_config": ngram(k)}) for k in (1, 3)},
    "gqa-ngram-dynamic": (
        "gqa",
        "repetitive",
        {
            **_SPECULATION,
            "speculative_config": ngram(3)
            | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1], [9, MAX_NUM_SEQS, 0]]},
        },
    ),
    "mla-ngram-1": ("mla", "repetitive", {"max_model_len": SPECULATIVE_MODEL_LEN, "speculative_config": ngram(1)}),
    "gqa-drafter": ("gqa", "repetitive", {**_SPECULATION, "speculative_config": drafter(3)}),
    "gqa-lora-ngram": ("gqa", "adapted", {**_LORA, "max_loras": 4, "speculative_config": ngram(3)}),
}
"""Name: model, load, and what the engine is told besides."""

NO_REFRESH = """
from aclgraph_dispatch.params import AttentionParams
AttentionParams.update = lambda self, descriptor, metadata_of: [
    self.backend.release_task(task.handle) for task in self._tasks[descriptor]
]
"""
EXPLORE = "import os; os.environ['ACLGRAPH_DISPATCH_EXPLORE'] = '{seed}'"
CHECK = "import os; os.environ['ACLGRAPH_DISPATCH_CHECK'] = '1'"
SHIFTED_INPUT = """
from aclgraph_dispatch.integrations.cpu import DispatchModelRunner
stock = DispatchModelRunner._model_forward
def _model_forward(self, input_ids, **kwargs):
    return stock(self, input_ids=input_ids.clone(), **kwargs)
DispatchModelRunner._model_forward = _model_forward
"""

_executor = ThreadPoolExecutor(max_workers=2)
submit = _executor.submit
"""For engines other than these: no more than two run at a time."""


def start(
    variant: str, policy: str | None, prelude: str = "", *, enforce_eager: bool = False
) -> "Future[EngineRun]":
    """
    Start the engine of *variant*: stock for no *policy*, else with our worker.
    """
    model, load, options = VARIANTS[variant]
    engine = {
        "model": str(cached_checkpoint(model)),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": MAX_NUM_SEQS,
        "seed": 0,
        "disable_log_stats": False,
        "enforce_eager": enforce_eager or policy is None,
        **options,
    }
    if policy is not None:
        engine["additional_config"] = {KEY: {"policy": policy}}
    return _executor.submit(run_engine, engine, LOADS[load](), emulate=policy is not None, prelude=prelude)


started = cache(start)
"""The same engine is started once."""
