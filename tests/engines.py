"""
The engines that tests compare, and the requests they serve. Each engine is started once a session, in a
process of its own, two at a time.
"""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from aclgraph_dispatch.bench.checkpoints import SPECIAL_TOKENS, VOCABULARY, cached_checkpoint
from aclgraph_dispatch.bench.live import EngineRequest, EngineRun, run_engine
from aclgraph_dispatch.config import KEY

MAX_NUM_SEQS = 16


def words(rng: random.Random, count: int) -> list[int]:
    """
    A prompt of *count* random words.
    """
    return [rng.randrange(len(SPECIAL_TOKENS), len(VOCABULARY)) for _ in range(count)]


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


LOADS = {"churn": churn, "shared_prefixes": shared_prefixes, "long_answers": long_answers}

# The CPU platform switches chunked prefill and prefix caching off for MLA, and sets its own token budget.
_GQA = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
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
