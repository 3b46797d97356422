"""
What is run live, and the server that each contender needs for it.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from aclgraph_dispatch.config import KEY
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.parameters import read_config

from .checkpoints import MODELS, cached_checkpoint
from .contenders import CONTENDERS
from .engine import KV_CACHE_BYTES, WORKER_CLS, environment
from .ladders import Limits
from .server import ServerOptions

STOCK = "stock"
STOCK_COMPILED = "stock_compiled"
STOCKS = (STOCK, STOCK_COMPILED)
"""vLLM without us. On a CPU it comes compiled, which our kernels are not; there `stock` is told to be eager."""
SERVABLE = (*STOCKS, *(name for name, c in CONTENDERS.items() if not c.by_cost and not c.is_oracle))
"""vLLM without us, and the contenders that a server can be told to be."""

SET_BY_US = (
    *("--model", "--served-model-name", "--host", "--port", "--uds", "--config", "--seed"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--kv-cache-memory-bytes"),
    *("--worker-cls", "--additional-config", "--enforce-eager", "--no-enforce-eager"),
    *("--compilation-config", "-cc", "--optimization-level", "-O"),
    *("--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
)
"""Arguments of vLLM's server that make the comparison what it is: another value would replace a contender."""

WORKERS: Mapping[str, str] = MappingProxyType({"cpu": WORKER_CLS})
"""Our worker for a type of device, as vLLM's platforms name it."""
_EAGER_STOCK = (
    f"vLLM told to be eager, as our kernels on a CPU are; its compiled default, {STOCK_COMPILED}, is another "
    "program, whose speed and texts differ"
)

_positive = attrs.validators.ge(1)


def _finite(_case: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"'{attribute.name}' must be a finite number, 0 or more: {value}")


def _not_ours(_case: object, attribute: "attrs.Attribute[tuple[str, ...]]", arguments: tuple[str, ...]) -> None:
    # As vLLM reads them: `_` for `-`, a key of a JSON value after a dot, options cut short, and -O3.
    named = {a: re.split("[=.]", a.replace("_", "-"))[0] for a in arguments if re.match("--?[A-Za-z]", a)}
    taken = [
        a
        for a, option in named.items()
        if option.startswith("-O") or any(own.startswith(option) for own in SET_BY_US)
    ]
    if arguments and not arguments[0].startswith("-"):
        taken.append(arguments[0])  # a model's name
    if taken:
        raise ValueError(
            f"'{attribute.name}' of all servers must be options that the comparison does not set itself: "
            f"{', '.join(taken)}; leave out what --policies and the command's other options stand for"
        )


@attrs.frozen(kw_only=True)
class LiveCase:
    """
    What is run, besides the contenders.

    Args:
        trace: A trace's file, or the name of a synthetic preset.
        model: A name in `MODELS`, or the directory of a checkpoint.
        rate: How many times as fast requests arrive.
        limit: The most requests; None for all.
        is_scaled: Whether lengths are divided and cut, to suit a model of a few layers on a CPU.
        max_num_seqs: As in vLLM, and so are the following three.
        max_num_batched_tokens: See vLLM.
        max_model_len: See vLLM.
        kv_cache_bytes: Of each server.
        worker_cls: Our worker; by default the one for this machine's device.
        arguments: More arguments of vLLM's server, for all; none of `SET_BY_US`.
        port: Of the first server; by default any that is free.
        rounds: How often each contender serves the requests.
        slo_ttft_ms: The most a good request waits for its first token.
        slo_tpot_ms: The most it takes per token after that.
        seed: Of the prompts' words, and of a preset's requests.
    """

    trace: str
    model: str
    rate: float = 1.0
    limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    is_scaled: bool = False
    max_num_seqs: int = attrs.field(default=16, validator=_positive)
    max_num_batched_tokens: int = attrs.field(default=512, validator=_positive)
    max_model_len: int = attrs.field(default=512, validator=attrs.validators.ge(2))
    kv_cache_bytes: int = attrs.field(default=KV_CACHE_BYTES, validator=_positive)
    worker_cls: str | None = None
    arguments: tuple[str, ...] = attrs.field(default=(), validator=_not_ours)
    port: int | None = None
    rounds: int = attrs.field(default=4, validator=_positive)
    slo_ttft_ms: float = attrs.field(default=2000.0, validator=_finite)
    slo_tpot_ms: float = attrs.field(default=100.0, validator=_finite)
    seed: int = 0


def checkpoint(model: str) -> Path:
    """
    The directory of a model.

    Raises:
        ConfigError: There is none.
    """
    if model in MODELS:
        return cached_checkpoint(model)
    if not Path(model, "config.json").is_file():
        msg = f"'model' must be one of {', '.join(MODELS)}, or a directory with a config.json: {model!r}"
        raise ConfigError(msg)
    return Path(model)


def own_arguments(case: LiveCase, name: str, model: Path, device_type: str) -> tuple[str, ...]:
    """
    The arguments that only this contender's server gets.

    Raises:
        ConfigError: There is no such contender for this type of device.
    """
    if name == STOCK:
        return ("--enforce-eager",) if device_type == "cpu" else ()
    if name == STOCK_COMPILED:
        if device_type != "cpu":
            raise ConfigError(f"{name!r} is for CPUs; on {device_type!r} {STOCK!r} is vLLM as it comes: name that")
        return ()
    worker_cls = case.worker_cls or WORKERS.get(device_type)
    if worker_cls is None:
        raise ConfigError(
            f"'policies' other than {STOCK!r} need our worker for the device, and there is none for "
            f"{device_type!r} yet, only for {', '.join(WORKERS)}; name a class with 'worker_cls'"
        )
    config = json.dumps({KEY: dispatch_config(case, name, model)})
    return ("--worker-cls", worker_cls, "--additional-config", config)


def description(name: str, device_type: str) -> str:
    """
    What a contender's server is told, in words.
    """
    if name == STOCK_COMPILED:
        return "vLLM as it comes on a CPU, compiled; its texts are its own and not compared"
    if name == STOCK:
        return _EAGER_STOCK if device_type == "cpu" else "vLLM as it comes"
    contender = CONTENDERS[name]
    sizes = "vLLM's sizes" if contender.ladder == "vllm" else f"sizes of the ladder {contender.ladder}"
    return f"our worker, policy {contender.policy}" + ("" if contender.policy == "eager" else f", {sizes}")


def server_options(case: LiveCase, name: str, model: Path, device_type: str) -> ServerOptions:
    """
    The server of a contender.

    Raises:
        ConfigError: It needs a worker that there is none of for this type of device.
    """
    return ServerOptions(
        name,
        (
            *("--model", str(model)),
            *("--max-num-seqs", str(case.max_num_seqs)),
            *("--max-num-batched-tokens", str(case.max_num_batched_tokens)),
            *("--max-model-len", str(case.max_model_len)),
            *("--kv-cache-memory-bytes", str(case.kv_cache_bytes)),
            *("--seed", "0"),
            "--disable-uvicorn-access-log",
            *own_arguments(case, name, model, device_type),
            *case.arguments,
        ),
        environment(emulate=name not in STOCKS and is_emulated(device_type), log_level="INFO")
        # For the paths that empty the prefix cache and ask our worker for its report.
        | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )


def is_emulated(device_type: str) -> bool:
    """
    Whether the NPU is emulated on such a machine.
    """
    return device_type == "cpu"


def dispatch_config(case: LiveCase, name: str, model: Path) -> dict[str, Any]:
    """
    What our worker is told of a contender, as `DispatchConfig` reads it.
    """
    contender = CONTENDERS[name]
    if contender.ladder == "vllm":
        return {"policy": contender.policy}
    num_layers = int(read_config(model / "config.json").get("num_hidden_layers", 1))
    plan = contender.plan(Limits(case.max_num_seqs, case.max_num_batched_tokens, num_layers=num_layers))
    sizes = {"full_sizes": plan.full_sizes, "piecewise_sizes": plan.piecewise_sizes}
    return {"policy": contender.policy} | {key: list(values) for key, values in sizes.items() if values}
