"""What an engine tells of its graphs and routes."""

from collections import Counter
from typing import Any

from vllm.logger import init_logger

from aclgraph_dispatch import POLICIES, CapturePlan, RuntimeMode
from aclgraph_dispatch.config import DispatchConfig
from aclgraph_dispatch.policy import modes_used
from aclgraph_dispatch.pool import GraphPool
from aclgraph_dispatch.records import StepRecords

from .dispatcher import DispatchCudagraphDispatcher
from .drafter import ROLE

# vLLM drops INFO of loggers that are not its own.
logger = init_logger("vllm.aclgraph_dispatch")


def report(dispatcher: DispatchCudagraphDispatcher, graphs: GraphPool, records: StepRecords) -> dict[str, Any]:
    """
    What is captured, which routes were taken, and the last decisions one by one, as plain values.

    Sizes are those of the longest query length; `graphs_per_size` counts all LoRA cases of all lengths.
    """
    core = dispatcher.core
    plan = core.plan if core else CapturePlan()
    graphs_per_size: Counter[str] = Counter()
    for descriptor, num_graphs in graphs.num_graphs().items():
        if descriptor.role != ROLE:
            graphs_per_size[f"{descriptor.mode.name}-{descriptor.num_tokens}"] += num_graphs
    return {
        "policy": core.policy if core else "eager",
        "full_sizes": list(plan.full_sizes),
        "piecewise_sizes": list(plan.piecewise_sizes),
        "lora_cases": list(plan.lora_cases),
        "query_lens": list(dispatcher.cores),
        "graphs": {mode.name: n for mode, n in graphs.num_graphs_by_mode().items()},
        "draft_graphs": {mode.name: n for mode, n in graphs.num_graphs_by_mode(ROLE).items()},
        "graphs_per_size": dict(graphs_per_size),
        "routes": [
            {
                "mode": count.mode.name,
                "reason": count.reason.name,
                "steps": count.num_parts,
                "tokens": count.num_tokens,
                "paddings": count.num_paddings,
            }
            for count in records.counts()
        ],
        "decisions": [
            {
                "mode": part.mode.name,
                "reason": part.reason.name,
                "requests": part.requests[1],
                "tokens": part.num_tokens,
                "padded": part.num_padded_tokens,
                "loras": part.descriptor.num_active_loras,
                "idle": is_idle,
            }
            for step_plan, is_idle in records.recent()
            for part in step_plan.parts
        ],
    }


def log_plan(
    dispatcher: DispatchCudagraphDispatcher,
    graphs: GraphPool,
    capture_seconds: float,
    max_num_batched_tokens: int,
) -> None:
    """
    Say once, at start-up, what was captured and what no graph covers.
    """
    core = dispatcher.core
    assert core is not None
    counts = graphs.num_graphs_by_mode()
    sizes = {query_len: list(of_length.plan.full_sizes) for query_len, of_length in dispatcher.cores.items()}
    logger.info(
        "policy %s; FULL %s: %d graphs; PIECEWISE %s: %d graphs; captured in %.1f s",
        core.policy,
        sizes if len(sizes) > 1 else list(core.plan.full_sizes),
        counts.get(RuntimeMode.FULL, 0),
        list(core.plan.piecewise_sizes),
        counts.get(RuntimeMode.PIECEWISE, 0),
        capture_seconds,
    )
    modes = modes_used(POLICIES[core.policy])
    covered = max(core.plan.full_sizes, default=0) // core.query_len
    if RuntimeMode.FULL in modes and covered < core.max_num_seqs:
        wanted = core.max_num_seqs * core.query_len
        threshold = DispatchConfig.load(dispatcher.vllm_config.additional_config).threshold
        is_capped = threshold is not None and threshold < wanted
        logger.warning(
            "no FULL graph holds a decode batch of more than %d requests, up to %d can be scheduled: %s",
            covered,
            core.max_num_seqs,
            f"raise threshold to {wanted}" if is_capped else f"add {wanted} to full_sizes",
        )
    covered = max(core.plan.piecewise_sizes, default=0)
    if RuntimeMode.PIECEWISE in modes and covered < max_num_batched_tokens:
        logger.info(
            "no PIECEWISE graph holds a step of more than %d tokens, up to %d can be scheduled: those run eagerly",
            covered,
            max_num_batched_tokens,
        )
