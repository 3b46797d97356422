"""
What is simulated, besides the contender: as plain values that travel to other processes, and made real.
"""

from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.constants import entry
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks

from .acceptance import MOST_DRAFTS
from .checkpoints import MODELS
from .ladders import Limits
from .scheduling import SchedulerSettings
from .synthetic import PRESETS, synthetic_requests
from .traces import Trace, load, scaled, sliced

MOST_REQUESTS, MOST_TOKENS, MOST_LENGTH, MOST_MS = 1 << 14, 1 << 17, 1 << 24, 1e9
"""Of settings: more is a slip of the finger, and tables of that size would take minutes."""

MOST_SECONDS = 1e8
"""Of a trace: three years, beyond which the clock would lose microseconds."""

SYNTHETIC_REQUESTS = 1000
"""Of a preset, unless a limit says otherwise."""


def _within(low: float, high: float) -> Any:
    return attrs.validators.and_(attrs.validators.ge(low), attrs.validators.le(high))


@attrs.frozen(kw_only=True)
class Case:
    """
    What is simulated, besides the contender.

    Args:
        trace: A trace's file, or the name of a synthetic preset.
        model: A name in the catalogue or of our tiny checkpoints, or the file of a model's `config.json`.
        device: A name in the catalogue, or a file that `calibrate` wrote, of the same model.
        rate: How many times as fast requests arrive.
        start_seconds: Where a slice of the trace starts.
        end_seconds: Where it ends; None for the trace's end.
        limit: The most requests; None for all.
        max_num_seqs: As in vLLM, and so are the following up to `num_spec_tokens`.
        max_num_batched_tokens: See vLLM.
        max_model_len: See vLLM.
        num_blocks: Blocks of the KV cache; None for as many as fit beside the model.
        enable_prefix_caching: See vLLM.
        async_scheduling: See vLLM.
        num_spec_tokens: Drafts of a decode.
        acceptance_rate: The probability that a draft is accepted.
        tensor_parallel: Ranks that share a layer; None for what the catalogue has, 1 for a file.
        weight_bytes: Bytes of a weight; None for what the catalogue or the model's file says.
        ranks: Data-parallel ranks that share the experts and the requests, in lockstep; of dense models only 1.
        is_fast: Whether by the compact scheduler instead of vLLM's.
        slo_ttft_ms: The most a good request waits for its first token.
        slo_tpot_ms: The most it takes per token after that.
        seed: Of all random numbers.
    """

    trace: str
    model: str
    device: str
    rate: float = 1.0
    start_seconds: float = 0.0
    end_seconds: float | None = None
    limit: int | None = None
    max_num_seqs: int = attrs.field(default=256, validator=_within(1, MOST_REQUESTS))
    max_num_batched_tokens: int = attrs.field(default=2048, validator=_within(1, MOST_TOKENS))
    max_model_len: int = attrs.field(default=32768, validator=_within(2, MOST_LENGTH))
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    num_spec_tokens: int = attrs.field(default=0, validator=_within(0, MOST_DRAFTS))
    acceptance_rate: float = attrs.field(default=0.7, validator=_within(0, 1))
    tensor_parallel: int | None = None
    weight_bytes: float | None = attrs.field(default=None, validator=attrs.validators.optional(_within(0.25, 4)))
    ranks: int = attrs.field(default=1, validator=_within(1, 64))
    is_fast: bool = False
    slo_ttft_ms: float = attrs.field(default=2000.0, validator=_within(0, MOST_MS))
    slo_tpot_ms: float = attrs.field(default=100.0, validator=_within(0, MOST_MS))
    seed: int = 0


@attrs.frozen
class World:
    """
    A case, made real.

    Args:
        trace: The requests.
        model: The model on one rank.
        tensor_parallel: Ranks that share a layer.
        cost: What times the steps.
        settings: Of the scheduler. All contenders have the same KV cache, what is left beside the model: what
            graphs take is told, but would make one contender admit fewer requests than another.
        limits: What ladders may depend on.
    """

    trace: Trace
    model: ModelShape
    tensor_parallel: int
    cost: CostModel | Calibration
    settings: SchedulerSettings
    limits: Limits


def make_world(case: Case) -> World:
    """
    Read what a case names, and check that it can be simulated.

    Raises:
        ConfigError: It cannot.
        TraceError: The trace cannot be read.
    """
    trace = load_trace(case)
    model, tensor_parallel = find_model(case)
    cost = _find_cost(case, model)
    num_blocks = _num_blocks(case, model, cost)
    settings = SchedulerSettings(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        case.max_model_len,
        num_blocks,
        enable_prefix_caching=case.enable_prefix_caching,
        async_scheduling=case.async_scheduling,
        num_spec_tokens=case.num_spec_tokens,
    )
    _check_blocks(case, settings, num_blocks)
    if case.max_num_batched_tokens <= case.num_spec_tokens:
        raise ConfigError(
            f"'max_num_batched_tokens' must hold a decode with its drafts, {1 + case.num_spec_tokens} tokens: "
            f"{case.max_num_batched_tokens}"
        )
    limits = Limits(
        case.max_num_seqs,
        case.max_num_batched_tokens,
        1 + case.num_spec_tokens,
        model.num_layers,
        (tensor_parallel > 1) + (case.ranks > 1),
    )
    return World(trace, model, tensor_parallel, cost, settings, limits)


def _check_blocks(case: Case, settings: SchedulerSettings, num_blocks: int) -> None:
    if num_blocks <= -(-case.max_model_len // settings.block_size):
        raise ConfigError(
            f"'max_model_len' must fit into the KV cache of {num_blocks} blocks, "
            f"{(num_blocks - 1) * settings.block_size} tokens: {case.max_model_len}; lower it"
        )


def load_trace(case: Case) -> Trace:
    """
    The requests of a case.

    Raises:
        ConfigError: Its slice is empty, or its rate not positive.
        TraceError: The trace cannot be read.
    """
    # Of a slice the limit counts what is inside; else what is beyond it need not even be read.
    is_slice = case.start_seconds > 0 or case.end_seconds is not None
    if case.trace in PRESETS:
        count = SYNTHETIC_REQUESTS if case.limit is None or is_slice else case.limit
        trace = Trace(case.trace, synthetic_requests(PRESETS[case.trace], count, seed=case.seed))
    else:
        trace = load(Path(case.trace), limit=None if is_slice else case.limit)
    end = case.end_seconds if case.end_seconds is not None else float("inf")
    requests = sliced(trace.requests, start_seconds=case.start_seconds, end_seconds=end)[: case.limit]
    requests = scaled(requests, rate=case.rate)
    if not requests[-1].arrival_seconds < MOST_SECONDS:
        raise ConfigError(f"'rate' must leave all arrivals below {MOST_SECONDS:g} s: {case.rate:g}")
    return attrs.evolve(trace, requests=requests)


def find_model(case: Case) -> tuple[ModelShape, int]:
    """
    The model of a case on one rank, from the catalogue or a file, and the ranks that share a layer.

    Raises:
        ConfigError: There is none, or it cannot be shared so.
    """
    layout: dict[str, Any] = {"tensor_parallel": 1, "expert_parallel": 1, "weight_bytes": None}
    config: Any = case.model
    name = None
    if case.model in MODELS:
        config, name = MODELS[case.model], case.model
    elif not (case.model.endswith(".json") or Path(case.model).is_dir()):
        table = entry("models", case.model)
        config, name = table["config"], case.model
        layout = {key: table[key]["value"] for key in layout}
    if case.tensor_parallel is not None:
        layout |= {"tensor_parallel": case.tensor_parallel, "expert_parallel": 1}
    if case.weight_bytes is not None:
        layout["weight_bytes"] = case.weight_bytes
    model = ModelShape.from_config(config, name=name, **layout)
    if case.ranks > 1:
        if not model.num_experts:
            raise ConfigError(
                f"'ranks' of a dense model exchange nothing and must be 1: {case.ranks}; simulate one of them "
                f"with its share of the requests, --rate {1 / case.ranks:.3g}"
            )
        # vLLM spreads experts over the ranks of all groups.
        layout["expert_parallel"] = case.ranks * layout["tensor_parallel"]
        model = ModelShape.from_config(config, name=name, **layout)
    return model, layout["tensor_parallel"]


def _find_cost(case: Case, model: ModelShape) -> CostModel | Calibration:
    if not (case.device.endswith(".json") or Path(case.device).is_file()):
        return CostModel(model, Device.named(case.device), async_scheduling=case.async_scheduling)
    calibration = Calibration.load(case.device)
    if case.num_spec_tokens or case.ranks > 1:
        raise ConfigError(
            "'num_spec_tokens' must be 0 and 'ranks' 1 with a calibration, which has measured neither: "
            f"{case.num_spec_tokens}, {case.ranks}"
        )
    if case.tensor_parallel is not None or case.weight_bytes is not None:
        raise ConfigError("'tensor_parallel' and 'weight_bytes' are those of the calibration; leave them out")
    calibration.check_model(model)
    return calibration


def _num_blocks(case: Case, model: ModelShape, cost: CostModel | Calibration) -> int:
    if case.num_blocks is not None:
        return case.num_blocks
    if isinstance(cost, Calibration):
        raise ConfigError("'num_blocks' must be given with a calibration, which does not know the device's memory")
    return kv_blocks(model, cost.device.memory_bytes)
