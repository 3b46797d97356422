"""
What is run live, and the server that each contender needs for it.
"""

import json
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
SERVABLE = (STOCK, *(name for name, c in CONTENDERS.items() if not c.by_cost and not c.is_oracle))
"""vLLM without us, and the contenders that a server can be told to be."""

WORKERS: Mapping[str, str] = MappingProxyType({"cpu": WORKER_CLS})
"""Our worker for a type of device, as vLLM's platforms name it."""
_STOCK_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("--enforce-eager",)})
"""vLLM's platform for CPUs has no graphs; elsewhere its defaults stand."""

_positive = attrs.validators.ge(1)


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
        arguments: More arguments of vLLM's server, for all.
        port: Of the first server; by default any that is free.
        rounds: How often each contender serves the requests.
        slo_ttft_ms: The most a good request waits for its first token.
        slo_tpot_ms: The most it takes per token after that.
        seed: Of the prompts' words, and of a preset's requests.
    """

    trace: str
    model: str
    rate: float = 1.0
    limit: int | None = None
    is_scaled: bool = False
    max_num_seqs: int = attrs.field(default=16, validator=_positive)
    max_num_batched_tokens: int = attrs.field(default=512, validator=_positive)
    max_model_len: int = attrs.field(default=512, validator=attrs.validators.ge(2))
    kv_cache_bytes: int = attrs.field(default=KV_CACHE_BYTES, validator=_positive)
    worker_cls: str | None = None
    arguments: tuple[str, ...] = ()
    port: int | None = None
    rounds: int = attrs.field(default=4, validator=_positive)
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0
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


def server_options(case: LiveCase, name: str, model: Path, device_type: str) -> ServerOptions:
    """
    The server of a contender.

    Raises:
        ConfigError: It needs a worker that there is none of for this type of device.
    """
    own: tuple[str, ...] = _STOCK_ARGUMENTS.get(device_type, ())
    if name != STOCK:
        worker_cls = case.worker_cls or WORKERS.get(device_type)
        if worker_cls is None:
            raise ConfigError(
                f"'policies' other than {STOCK!r} need our worker for the device, and there is none for "
                f"{device_type!r} yet, only for {', '.join(WORKERS)}; name a class with 'worker_cls'"
            )
        own = ("--worker-cls", worker_cls, "--additional-config", json.dumps({KEY: _config(case, name, model)}))
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
            *own,
            *case.arguments,
        ),
        environment(emulate=name != STOCK and is_emulated(device_type), log_level="INFO")
        # For the paths that empty the prefix cache and ask our worker for its report.
        | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )


def is_emulated(device_type: str) -> bool:
    """
    Whether the NPU is emulated on such a machine.
    """
    return device_type == "cpu"


def _config(case: LiveCase, name: str, model: Path) -> dict[str, Any]:
    contender = CONTENDERS[name]
    if contender.ladder == "vllm":
        return {"policy": contender.policy}
    num_layers = int(read_config(model / "config.json").get("num_hidden_layers", 1))
    plan = contender.plan(Limits(case.max_num_seqs, case.max_num_batched_tokens, num_layers=num_layers))
    sizes = {"full_sizes": plan.full_sizes, "piecewise_sizes": plan.piecewise_sizes}
    return {"policy": contender.policy} | {key: list(values) for key, values in sizes.items() if values}
