"""What is run live: the servers' arguments, as data."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aclgraph_dispatch.bench.contenders import CONTENDERS
from aclgraph_dispatch.bench.engine import WORKER_CLS
from aclgraph_dispatch.bench.ladders import Limits
from aclgraph_dispatch.bench.live_case import (
    SERVABLE,
    SET_BY_US,
    STOCKS,
    LiveCase,
    checkpoint,
    description,
    is_emulated,
    server_options,
)
from aclgraph_dispatch.config import KEY, DispatchConfig
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.policy import POLICIES

CASE = LiveCase(trace="t", model="m", max_num_seqs=8, max_num_batched_tokens=64, arguments=("--dtype", "float32"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """
    A directory with a configuration.
    """
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    return tmp_path


def config(arguments: tuple[str, ...]) -> Any:
    """
    Our part of a server's `--additional-config`.
    """
    return json.loads(arguments[arguments.index("--additional-config") + 1])[KEY]


def test_servable() -> None:
    """
    vLLM without us, every policy, and the ladders; not what only a simulation can do.
    """
    assert {"stock", "stock_compiled", *POLICIES, "legacy", "exponential", "powers_of_two", "to_budget"} == set(
        SERVABLE
    )
    assert STOCKS == SERVABLE[:2]


@pytest.mark.parametrize("name", SERVABLE)
def test_all_get_the_same(name: str, model: Path) -> None:
    """
    Model, limits and the user's own arguments, which come last, are the same for all.
    """
    arguments = server_options(CASE, name, model, "cpu").arguments
    limits = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "512")

    assert ("--model", str(model), *limits, "--kv-cache-memory-bytes", str(1 << 28)) == arguments[:10]
    assert ("--dtype", "float32") == arguments[-2:]


@pytest.mark.parametrize(
    ("name", "device_type", "is_eager", "emulated", "worker"),
    [
        ("stock", "cpu", True, "0", None),
        ("stock", "cuda", False, "0", None),
        ("stock_compiled", "cpu", False, "0", None),
        ("eager", "cpu", False, "1", WORKER_CLS),
        ("full_and_piecewise", "cpu", False, "1", WORKER_CLS),
    ],
)
def test_platforms(
    name: str, device_type: str, *, is_eager: bool, emulated: str, worker: str | None, model: Path
) -> None:
    """
    The NPU is emulated where there is only a CPU, and only for us; stock is eager where our kernels are.
    """
    options = server_options(CASE, name, model, device_type)
    arguments = options.arguments

    assert is_eager == ("--enforce-eager" in arguments)
    assert emulated == options.environment["ACLGRAPH_DISPATCH_EMULATE"]
    assert worker == (arguments[arguments.index("--worker-cls") + 1] if "--worker-cls" in arguments else None)
    assert "1" == options.environment["VLLM_SERVER_DEV_MODE"]
    assert (device_type == "cpu") == is_emulated(device_type)


def test_no_worker_for_the_device(model: Path) -> None:
    """
    Where there is none of our workers, the error says for which device; a class that is named is taken.
    """
    with pytest.raises(
        ConfigError, match="there is none for 'npu' yet, only for cpu; name a class with 'worker_cls"
    ):
        server_options(CASE, "eager", model, "npu")
    case = LiveCase(trace="t", model="m", worker_cls="my.Worker")
    options = server_options(case, "eager", model, "npu")

    assert ("--worker-cls", "my.Worker") == options.arguments[-4:-2]
    assert "0" == options.environment["ACLGRAPH_DISPATCH_EMULATE"]


@pytest.mark.parametrize("name", SERVABLE[2:])
def test_configurations_are_ours(name: str, model: Path) -> None:
    """
    What a server is told is a configuration of ours that plans the contender's graphs.
    """
    case = LiveCase(trace="t", model="m")
    limits = Limits(case.max_num_seqs, case.max_num_batched_tokens, num_layers=4)
    told = DispatchConfig.load({KEY: config(server_options(case, name, model, "cpu").arguments)})
    contender = CONTENDERS[name]
    plan = contender.plan(limits)

    assert contender.policy == told.policy
    if contender.ladder == "vllm":
        assert (None, None) == (told.full_sizes, told.piecewise_sizes)
    else:
        assert (plan.full_sizes, plan.piecewise_sizes) == (told.full_sizes, told.piecewise_sizes)


def test_compiled_stock_is_for_cpus(model: Path) -> None:
    """
    Elsewhere stock is vLLM as it comes, and a second one would be the same.
    """
    with pytest.raises(ConfigError, match="'stock_compiled' is for CPUs; on 'cuda' 'stock' is vLLM as it comes"):
        server_options(CASE, "stock_compiled", model, "cuda")


@pytest.mark.parametrize(
    ("name", "device_type", "words"),
    [
        ("stock", "cpu", "eager, as our kernels on a CPU are; its compiled default, stock_compiled, is another"),
        ("stock", "cuda", "vLLM as it comes"),
        ("stock_compiled", "cpu", "compiled; its texts are its own and not compared"),
        ("eager", "cpu", "our worker, policy eager"),
        ("piecewise", "cpu", "our worker, policy piecewise, vLLM's sizes"),
        ("legacy", "cpu", "our worker, policy full_and_piecewise, sizes of the ladder legacy"),
    ],
)
def test_descriptions(name: str, device_type: str, words: str) -> None:
    """
    Each contender is described as its server is told to be.
    """
    assert words in description(name, device_type)


@pytest.mark.parametrize(
    "arguments",
    [
        *((option, "1") for option in SET_BY_US),
        ("--additional-config.aclgraph_dispatch.policy=eager",),
        ("--additional_config", "{}"),
        ("--addit={}",),
        ("-cc.cudagraph_mode=NONE",),
        ("-c", "{}"),
        ("-O3",),
        ("-O.mode", "3"),
        ("--compilation-config={}",),
        ("--dtype", "float32", "--enforce_eager"),
        ("another/model",),
    ],
)
def test_arguments_that_replace_a_contender(arguments: tuple[str, ...]) -> None:
    """
    What the comparison sets itself is refused, in each way that vLLM reads an option.
    """
    with pytest.raises(
        ValueError, match="'arguments' of all servers must be options that the comparison does not"
    ):
        LiveCase(trace="t", model="m", arguments=arguments)


def test_arguments_that_are_the_users() -> None:
    """
    Everything else is let through, also what begins alike, and values.
    """
    arguments = (
        "--dtype",
        "float32",
        "--model-impl",
        "vllm",
        "--swap-space=-1",
        "-tp",
        "2",
        "--port-range",
        "model",
    )

    assert arguments == LiveCase(trace="t", model="m", arguments=arguments).arguments


@pytest.mark.parametrize("name", ["slo_ttft_ms", "slo_tpot_ms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_objectives_are_finite(name: str, value: float) -> None:
    """
    An objective that is no number is refused.
    """
    with pytest.raises(ValueError, match=f"'{name}' must be a finite number, 0 or more"):
        LiveCase(trace="t", model="m", **{name: value})  # type: ignore[arg-type]


def test_checkpoints(model: Path) -> None:
    """
    A directory with a configuration is a model; anything else that is no name is not.
    """
    assert model == checkpoint(str(model))
    for wrong in ("gpa", "", str(model / "config.json")):
        with pytest.raises(ConfigError, match="'model' must be one of gqa, mla, or a directory"):
            checkpoint(wrong)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "rounds"])
def test_limits(name: str) -> None:
    """
    Counts are positive.
    """
    with pytest.raises(ValueError, match=name):
        LiveCase(trace="t", model="m", **{name: 0})  # type: ignore[arg-type]
