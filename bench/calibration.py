"""
Measures how long steps take on the machine at hand.

A grid of shapes is timed on one real engine (`integrations.timing`): decodes at the captured sizes with a short
and a long context, prefills, and decodes beside a prefill, each in every mode that it can run in. Shapes between
those of the grid are timed too and kept from the fit (`fitting`): the errors are those on them. The grid is gone
through several times, in another order each time, so that what else the machine does falls on all alike, and what
is still noisy again; a point is a median.
"""

import platform
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch import CapturePlan, RuntimeMode
from aclgraph_dispatch.calibration import MODEL_FIELDS, BatchShape, Calibration, MeasuredStep
from aclgraph_dispatch.config import KEY
from aclgraph_dispatch.cost_model import StepLoad
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape

from .checkpoints import MODELS, cached_checkpoint
from .engine import KV_CACHE_BYTES, run_engine
from .fitting import fit

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32)
TOKEN_SIZES = (*DECODE_SIZES, 64, 128, 256, 512)
"""What is captured: little enough for a CPU, in steps as a server's sizes have them."""
MAX_MODEL_LEN = 1024
NUM_SWEEPS = 6
"""How often the whole grid is gone through; what is noisy then, half as often again."""
MOST_BLOCK_TOKENS = 128
"""Of a block of the KV cache, on any backend: it is sized for those."""
MAX_SPREAD = 0.1
"""What is more is noisy: see `MeasuredStep.spread`."""

_PRELUDE = "from aclgraph_dispatch.bench.calibration import install; install({num_rounds}, {num_sweeps}, {seed})"


def grid(plan: CapturePlan, max_model_len: int) -> tuple[list[BatchShape], list[BatchShape]]:
    """
    The shapes to fit, and those between them to check the fit with.

    Args:
        plan: The captured sizes; the shapes fill them.
        max_model_len: The most tokens of a sequence; contexts are shares of it.
    """
    short, middle, long = max_model_len // 16, max_model_len * 3 // 10, max_model_len * 3 // 4
    decodes = plan.full_sizes or plan.piecewise_sizes
    tokens = [size for size in plan.piecewise_sizes or plan.full_sizes if size >= 16]
    fitted = [BatchShape(size, context) for size in decodes for context in (short, long)]
    checked = [BatchShape((low + high) // 2, middle) for low, high in pairwise(decodes)]
    for size in tokens:
        fitted += [BatchShape(0, chunk_tokens=size), BatchShape(0, chunk_tokens=size, tokens_before=middle)]
        # A few decodes beside a long prefill, and many beside a short one.
        few, many = max(1, size // 16), size // 2
        fitted += [BatchShape(few, long, size - few), BatchShape(many, short, size - many)]
    for low, high in pairwise(tokens):
        size = (low + high) // 2
        some = max(1, size // 8)
        checked += [
            BatchShape(0, chunk_tokens=size),
            BatchShape(0, chunk_tokens=size, tokens_before=long // 4),
            BatchShape(some, middle, size - some),
        ]
    return fitted, [shape for shape in checked if shape not in fitted]


def calibrate(
    model: str,
    *,
    num_rounds: int = 3,
    num_sweeps: int = NUM_SWEEPS,
    seed: int = 0,
    sizes: Sequence[int] = TOKEN_SIZES,
) -> Calibration:
    """
    Time *model* on an engine of this machine and fit it.

    Args:
        model: A name in `MODELS`, or a checkpoint's directory.
        num_rounds: Steps of a shape and mode in a sweep.
        num_sweeps: How often the grid is gone through.
        seed: Of tokens, keys and values, and of the order.
        sizes: What is captured, ascending; those in `DECODE_SIZES`, at least one, for FULL too.

    Raises:
        ConfigError: There is no such model.
        EngineFailedError: The engine failed.
    """
    if model not in MODELS and not Path(model, "config.json").is_file():
        raise ConfigError(
            f"'model' must be one of {', '.join(MODELS)}, or a directory with a config.json: {model!r}"
        )
    directory = cached_checkpoint(model) if model in MODELS else Path(model)
    shape = ModelShape.from_config(directory, name=model if model in MODELS else directory.resolve().name)
    full_sizes = [size for size in sizes if size in DECODE_SIZES]
    shapes = [
        batch
        for batches in grid(CapturePlan(full_sizes=full_sizes, piecewise_sizes=tuple(sizes)), MAX_MODEL_LEN)
        for batch in batches
    ]
    kv_bytes_per_token = ModelShape.from_config(directory, kv_bytes=4.0).kv_bytes_per_token
    engine: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max(batch.num_decodes + (batch.chunk_tokens > 0) for batch in shapes),
        "kv_cache_memory_bytes": max(KV_CACHE_BYTES, int(cached_tokens(shapes) * kv_bytes_per_token)),
        # vLLM's CPU platform wants whole prompts of MLA.
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
        "additional_config": {
            KEY: {
                "policy": "full_and_piecewise",
                "full_sizes": full_sizes,
                "piecewise_sizes": list(sizes),
            }
        },
    }
    prelude = _PRELUDE.format(num_rounds=num_rounds, num_sweeps=num_sweeps, seed=seed)
    report = run_engine({"model": str(directory), **engine}, [], emulate=True, prelude=prelude).report
    measured = report["calibration"]
    points = [MeasuredStep(**{**point, "load": StepLoad(**point["load"])}) for point in measured.pop("points")]
    return fit(
        points,
        captured={"FULL": report["full_sizes"], "PIECEWISE": report["piecewise_sizes"]},
        model=shape.name,
        **{name: getattr(shape, name) for name in MODEL_FIELDS},
        versions={name: version(name) for name in ("aclgraph-dispatch", "torch", "numpy", "scipy")}
        | {"vllm": measured.pop("vllm"), "python": platform.python_version()},
        engine=engine | {"num_rounds": num_rounds, "num_sweeps": num_sweeps, "seed": seed},
        **measured,
    )


def install(num_rounds: int, num_sweeps: int, seed: int) -> None:
    """
    Make the runner of this process time the grid when it is asked for its report.
    """
    import vllm

    from aclgraph_dispatch.integrations.model_runner import DispatchMixin
    from aclgraph_dispatch.integrations.timing import StepTimer

    mixin: Any = DispatchMixin
    report = mixin.dispatch_report

    def timed(runner: Any) -> dict[str, Any]:
        timer = StepTimer(runner, seed=seed)
        points, left_out = measure(timer, num_rounds, num_sweeps, seed)
        num_shapes = sum(map(len, grid(timer.plan, timer.max_model_len)))
        facts = {"backend": timer.backend, "device": timer.device, "host_is_device": timer.host_is_device}
        facts |= {"num_shapes": num_shapes, "left_out": left_out}
        measured = {**facts, "vllm": vllm.__version__, "points": [attrs.asdict(point) for point in points]}
        return {**report(runner), "calibration": measured}

    mixin.dispatch_report = timed


def cached_tokens(shapes: Iterable[BatchShape]) -> int:
    """
    Tokens of the KV cache that the largest of *shapes* takes, in blocks of as many tokens as one may have.
    """
    return MOST_BLOCK_TOKENS * max(
        # The first block is for padding.
        1
        + shape.num_decodes * -(-(shape.context_tokens + 1) // MOST_BLOCK_TOKENS)
        + (shape.chunk_tokens > 0) * -(-(shape.tokens_before + shape.chunk_tokens + 1) // MOST_BLOCK_TOKENS)
        for shape in shapes
    )


def measure(
    timer: Any, num_rounds: int, num_sweeps: int, seed: int
) -> tuple[list[MeasuredStep], Mapping[str, int]]:
    """
    Time the grid of a runner (`StepTimer`), and count by why the shapes that it cannot hold.
    """
    grids = grid(timer.plan, timer.max_model_len)
    left_out = Counter(why for shapes in grids for shape in shapes if (why := timer.refusal(shape)))
    fitted, checked = ([shape for shape in shapes if not timer.refusal(shape)] for shapes in grids)
    rng = random.Random(seed)
    samples: dict[tuple[BatchShape, RuntimeMode], list[Any]] = {}
    shapes = fitted + checked
    for sweep in range(num_sweeps + num_sweeps // 2):
        if sweep >= num_sweeps:
            noisy = {shape for (shape, _), of_point in samples.items() if _spread(of_point) > MAX_SPREAD}
            shapes = [shape for shape in shapes if shape in noisy]
        for shape in rng.sample(shapes, len(shapes)):
            for sample in timer.samples(shape, list(RuntimeMode), num_rounds):
                samples.setdefault((shape, sample.mode), []).append(sample)
    points = []
    held_out = set(checked)
    for (shape, mode), of_point in sorted(
        samples.items(), key=lambda item: (item[0][1].value, attrs.astuple(item[0][0]))
    ):
        seconds = {
            name: [getattr(sample, name) for sample in of_point]
            for name in ("prepare_seconds", "host_seconds", "device_seconds", "sample_seconds")
        }
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        points.append(
            MeasuredStep(
                mode=mode.name,
                num_tokens=of_point[0].num_tokens,
                load=shape.load,
                num_steps=len(of_point),
                spread=_spread(of_point),
                is_held_out=shape in held_out,
                **medians,
            )
        )
    return points, dict(left_out)


def _spread(samples: Sequence[Any]) -> float:
    """
    Half of the distance between the quartiles of the pass, by the median.
    """
    low, median, high = statistics.quantiles([sample.device_seconds for sample in samples], n=4)
    return (high - low) / 2 / median
