"""
What a FULL graph saves of a decode step: replay against eager forward, in pairs.

A step's forward pass can be run twice: it writes the same keys to the same slots. So every decode step of an
engine is run both ways, in alternating order, and the ratio is taken pair by pair: it holds whatever else the
machine does meanwhile. Times include everything between the runner and the hidden states: updates of attention
parameters, address checks, the wrapper.

    python -m aclgraph_dispatch.bench.replay --model gqa

On a CPU the ratio says what the host saves, as on an NPU, but kernels take their time on the same processor: it is
bounded by their share of the eager step, and nothing follows for an NPU.
"""

import json
import statistics
import time
from typing import Any

import attrs
import click

from aclgraph_dispatch.config import KEY

from .checkpoints import MODELS, SPECIAL_TOKENS, cached_checkpoint
from .engine import EngineRequest, run_engine

_PRELUDE = "from aclgraph_dispatch.bench.replay import install; install()"

_pairs: list[tuple[float, float]] = []


@attrs.frozen
class ReplayTiming:
    """
    Times of the same forward passes, eager and replayed, in seconds.
    """

    model: str
    num_decodes: int
    eager_seconds: list[float]
    replay_seconds: list[float]

    def figures(self) -> dict[str, Any]:
        """
        Medians, and the median of the ratios.
        """
        pairs = list(zip(self.eager_seconds, self.replay_seconds, strict=True))
        return {
            "model": self.model,
            "num_decodes": self.num_decodes,
            "num_pairs": len(pairs),
            "eager_ms": round(1e3 * statistics.median(self.eager_seconds), 3),
            "replay_ms": round(1e3 * statistics.median(self.replay_seconds), 3),
            "ratio": round(statistics.median(eager / replay for eager, replay in pairs), 3),
        }


def measure(model: str, num_decodes: int, num_pairs: int) -> ReplayTiming:
    """
    Time decode steps of *num_decodes* requests on a real engine.
    """
    engine = {
        "model": str(cached_checkpoint(model)),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": num_decodes,
        "additional_config": {KEY: {"policy": "full_decode_only"}},
    }
    prompt = list(range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 20))
    requests = [EngineRequest(f"request-{i}", [*prompt, 30 + i], num_pairs + 5) for i in range(num_decodes)]
    run = run_engine(engine, requests, emulate=True, prelude=_PRELUDE)
    pairs = run.report["pairs"][-num_pairs:]
    return ReplayTiming(model, num_decodes, [eager for eager, _ in pairs], [replay for _, replay in pairs])


def install() -> None:
    """
    Make the runner of this process take every FULL step twice.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    from aclgraph_dispatch.integrations.cpu import DispatchModelRunner

    runner_cls: Any = DispatchModelRunner
    forward, report = runner_cls._model_forward, runner_cls.dispatch_report

    def timed(runner: Any, mode: CUDAGraphMode, *args: Any, **kwargs: Any) -> tuple[float, Any]:
        context = get_forward_context()
        context.cudagraph_runtime_mode, context.skip_compiled = mode, False
        start = time.perf_counter()
        output = forward(runner, *args, **kwargs)
        return time.perf_counter() - start, output

    def both(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return forward(runner, *args, **kwargs)
        order = [CUDAGraphMode.NONE, CUDAGraphMode.FULL]
        if len(_pairs) % 2:
            order.reverse()
        seconds, outputs = zip(*(timed(runner, mode, *args, **kwargs) for mode in order), strict=True)
        _pairs.append(seconds if order[0] is CUDAGraphMode.NONE else seconds[::-1])
        return outputs[order.index(CUDAGraphMode.NONE)]

    runner_cls._model_forward = both
    runner_cls.dispatch_report = lambda runner: report(runner) | {"pairs": _pairs}


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="gqa", show_default=True)
@click.option("--decodes", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--pairs", type=click.IntRange(7, 400), default=40, show_default=True)
def main(model: str, decodes: int, pairs: int) -> None:
    """
    Time FULL replays against eager forward passes; the last line is a JSON object.
    """
    figures = measure(model, decodes, pairs).figures()
    click.echo(
        f"{model}, {decodes} decodes: eager {figures['eager_ms']} ms, replay {figures['replay_ms']} ms, "
        f"ratio {figures['ratio']} (median of {figures['num_pairs']} pairs)"
    )
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
