"""What users get wrong: vLLM refuses to start, and the message says what was written and what to write."""

import json
import os
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from aclgraph_dispatch.bench.checkpoints import cached_checkpoint
from aclgraph_dispatch.bench.engine import WORKER_CLS, EngineFailedError
from aclgraph_dispatch.config import KEY
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.plugin import EMULATE
from aclgraph_dispatch.policy import POLICIES

from ..engines import start, started

pytestmark = pytest.mark.engine

PATH = f"additional_config.{KEY}"
OFF = "or set enforce_eager, which turns the dispatcher off"

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown policy": (
        {"policy": "fastest"},
        {},
        f"'policy' must be one of {', '.join(POLICIES)}: 'fastest' @ {PATH}.policy",
    ),
    "number as text": ({"threshold": "12"}, {}, f"expected int, got '12' @ {PATH}.threshold"),
    "size above the token budget": (
        {"piecewise_sizes": [32, 128]},
        {},
        "'piecewise_sizes' must be <= max_num_batched_tokens = 64, no step fills more: 128 @ " + PATH,
    ),
    "FULL size above max_num_seqs": (
        {"full_sizes": [8, 32]},
        {},
        "'full_sizes' must be <= max_num_seqs * query length = 16, no step fills more: 32 @ " + PATH,
    ),
    "size above the threshold": (
        {"full_sizes": [16], "threshold": 8},
        {},
        f"'full_sizes' must be <= 'threshold' = 8: 16; change either @ {PATH}",
    ),
    "no sizes": (
        {"full_sizes": []},
        {},
        f"'full_sizes' must not be empty; leave it out to capture vLLM's sizes @ {PATH}.full_sizes",
    ),
    "misspelled key": (
        {"polcy": "eager"},
        {},
        f"unknown key 'polcy'; known keys: policy, full_sizes, piecewise_sizes, threshold @ {PATH}",
    ),
    "no object": ("eager", {}, f"{PATH} must be an object: 'eager'"),
    "wrong, though it would not be used": (
        {"threshold": 0},
        {"enforce_eager": True},
        f"'threshold' must be >= 1: 0 @ {PATH}.threshold",
    ),
    "all errors at once": (
        {"policy": "fastest", "threshold": "12", "polcy": "eager", "full_sizes": []},
        {},
        f"'policy' must be one of {', '.join(POLICIES)}: 'fastest' @ {PATH}.policy; "
        f"expected int, got '12' @ {PATH}.threshold; "
        f"unknown key 'polcy'; known keys: policy, full_sizes, piecewise_sizes, threshold @ {PATH}; "
        f"'full_sizes' must not be empty; leave it out to capture vLLM's sizes @ {PATH}.full_sizes",
    ),
    "all sizes at once": (
        {"full_sizes": [8, 32], "piecewise_sizes": [65]},
        {},
        "'full_sizes' must be <= max_num_seqs * query length = 16, no step fills more: 32; "
        f"'piecewise_sizes' must be <= max_num_batched_tokens = 64, no step fills more: 65 @ {PATH}",
    ),
    "policy against cudagraph_mode": (
        {"policy": "eager"},
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        "'policy' and vLLM's 'cudagraph_mode' must agree: 'eager' stands for NONE, cudagraph_mode is PIECEWISE; "
        "leave one of them out",
    ),
    "mode that no policy stands for": (
        {},
        {"compilation_config": {"cudagraph_mode": "FULL"}},
        "cudagraph_mode must be one of NONE, PIECEWISE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE: FULL",
    ),
    "policy that needs compilation": (
        {"policy": "piecewise"},
        {"compilation_config": {"mode": 0}},
        "'policy' 'piecewise' cannot be run here: vLLM lowered cudagraph_mode to NONE (its log says why); use "
        "'eager', or a backend or compilation mode that supports more",
    ),
    "method of speculation": (
        {"policy": "full_and_piecewise"},
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "aclgraph-dispatch: not supported with graphs: speculative decoding by the method 'ngram_gpu'; use one of "
        f"ngram, draft_model, {OFF}",
    ),
    "pipeline parallelism": (
        {},
        {"pipeline_parallel_size": 2},
        f"aclgraph-dispatch: not supported with graphs: pipeline parallelism; use size 1, {OFF}",
    ),
    "expert parallelism": (
        {},
        {"model": "mla", "enable_expert_parallel": True, "tensor_parallel_size": 2},
        "aclgraph-dispatch: not supported with graphs: expert parallelism; drop enable_expert_parallel: each "
        "expert is then split over the ranks",
    ),
    "vLLM's worker": (
        {},
        {"worker_cls": "auto"},
        "aclgraph-dispatch: not supported with graphs: vLLM's own CPU worker; "
        f"set --worker-cls {WORKER_CLS}, {OFF}",
    ),
    "several features": (
        {},
        {"worker_cls": "auto", "pipeline_parallel_size": 2},
        "aclgraph-dispatch: not supported with graphs: vLLM's own CPU worker; "
        f"set --worker-cls {WORKER_CLS}, {OFF}; "
        f"not supported with graphs: pipeline parallelism; use size 1, {OFF}",
    ),
}
"""Name: our configuration, what else the engine is told, the message."""

ACCEPTED: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "nothing": ({}, {}, ["FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 24, 32]]),
    "ranks": (
        {},
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        ["FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 24, 32]],
    ),
    "policy with its mode": (
        {"policy": "piecewise"},
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        ["PIECEWISE", [1, 2, 4, 8, 16, 24, 32]],
    ),
    "mode alone": (
        {},
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        ["FULL_DECODE_ONLY", [1, 2, 4, 8, 16]],
    ),
    "sizes": (
        {"full_sizes": [3, 16], "piecewise_sizes": [5, 64]},
        {},
        ["FULL_AND_PIECEWISE", [3, 5, 16, 64]],
    ),
    "threshold": ({"threshold": 8}, {}, ["FULL_AND_PIECEWISE", [1, 2, 4, 8]]),
    "eager policy": ({"policy": "eager"}, {}, ["NONE", []]),
    "speculation": (
        {"policy": "full_decode_only"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        ["FULL_DECODE_ONLY", [3, 6, 9, 12, 18, 24, 36, 48]],
    ),
    "enforce_eager": ({}, {"enforce_eager": True}, ["NONE", []]),
    "LoRA": ({}, {"enable_lora": True}, ["FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 24, 32]]),
    "enforce_eager and more": (
        {"policy": "piecewise", "full_sizes": [99]},
        {"enforce_eager": True, "enable_lora": True},
        ["NONE", []],
    ),
}
"""Name: our configuration, what else the engine is told, mode and sizes that vLLM ends up with."""

ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "seed": 0,
    "worker_cls": WORKER_CLS,
}
ENVIRONMENT = {
    EMULATE: "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}

CONFIGURE = """
import json, sys
from vllm import EngineArgs
from aclgraph_dispatch.errors import ConfigError

answers = []
for options in json.load(sys.stdin):
    try:
        compilation = EngineArgs(**options).create_engine_config().compilation_config
    except ConfigError as error:
        answers.append(str(error))
    else:
        answers.append([compilation.cudagraph_mode.name, compilation.cudagraph_capture_sizes])
print("\\n" + json.dumps(answers))
"""


def engine(config: Any, model: str = "gqa", **options: Any) -> dict[str, Any]:
    """
    What vLLM is told besides our *config*.
    """
    return {"model": str(cached_checkpoint(model)), **ENGINE, "additional_config": {KEY: config}, **options}


@cache
def answers() -> dict[str, Any]:
    """
    What vLLM says to every configuration above, asked in one process.
    """
    cases = REFUSED | ACCEPTED
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE],
        input=json.dumps([engine(config, **options) for config, options, _ in cases.values()]),
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """
    vLLM's configuration cannot be built, and one message names the thing, the rule and the value.
    """
    assert REFUSED[name][-1] == answers()[name]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    """
    The same ways of saying it, said right, are accepted: mode and sizes are those asked for.
    """
    assert ACCEPTED[name][-1] == answers()[name]


def test_enforce_eager_is_stock() -> None:
    """
    Under `enforce_eager` our worker is vLLM's, whatever else is configured: same tokens, nothing to report.
    """
    stock, ours = started("gqa", None), start("gqa", "full_and_piecewise", enforce_eager=True)
    run = ours.result()

    assert stock.result().tokens == run.tokens
    assert {} == run.report


OFF_PLATFORM = (
    "DispatchWorker runs on the emulated NPU, not on CpuPlatform: ACLGRAPH_DISPATCH_EMULATE must be 1: {!r}; "
    "VLLM_PLUGINS, where set, must list aclgraph_dispatch_emulated"
)


@pytest.mark.parametrize("value", [None, "0", "yes", "1"])
def test_worker_without_its_platform(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Our worker refuses any other platform and shows the variable.
    """
    from aclgraph_dispatch.integrations.cpu import DispatchWorker

    monkeypatch.delenv(EMULATE, raising=False)
    if value is not None:
        monkeypatch.setenv(EMULATE, value)
    worker = object.__new__(DispatchWorker)  # no engine: this is the first thing it asks
    worker.model_config = SimpleNamespace(enforce_eager=False)
    with pytest.raises(ConfigError) as caught:
        worker.init_device()

    assert OFF_PLATFORM.format(value) == str(caught.value)


def test_misspelled_variable() -> None:
    """
    vLLM swallows what our plugin says of a value that is neither 0 nor 1; the worker then says it.
    """
    misspell = f"import os; os.environ[{EMULATE!r}] = 'yes'"
    with pytest.raises(EngineFailedError) as caught:
        start("gqa", "full_and_piecewise", misspell).result()

    assert str(caught.value).splitlines()[-1].endswith(f"ConfigError: {OFF_PLATFORM.format('yes')}")


def test_server_does_not_start() -> None:
    """
    A server with a misspelled key ends with that message and an exit code, and serves nobody meanwhile.
    """
    config, _, message = REFUSED["misspelled key"]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(cached_checkpoint("gqa")),
    ]
    command += ["--worker-cls", WORKER_CLS, "--additional-config", json.dumps({KEY: config})]
    done = subprocess.run(
        [*command, "--host", "127.0.0.1", "--port", "0"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 != done.returncode
    assert f"aclgraph_dispatch.errors.ConfigError: {message}" in done.stderr.splitlines()
    assert "startup complete" not in done.stdout + done.stderr
