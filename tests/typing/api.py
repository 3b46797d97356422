"""The public API as users annotate it; mypy reads this, nothing runs it."""

from collections.abc import Mapping
from typing import assert_type

import numpy as np
import numpy.typing as npt

from aclgraph_dispatch import (
    POLICIES,
    BackendTraits,
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    DispatchConfig,
    Dispatcher,
    FullGraphs,
    Part,
    Reason,
    RuntimeMode,
    ScheduledRequest,
    StepCost,
    StepPlan,
)


def classify(lengths: npt.NDArray[np.int32]) -> Batch:
    requests = [
        ScheduledRequest(1, 64, 65),
        ScheduledRequest(4, 119, 120, num_drafts=3, num_prompt=100, lora_id=2, resumed=True),
    ]
    batch = Batch.of(requests, query_len=4)
    assert_type(batch.kind, BatchKind)
    assert_type(batch.num_tokens, int)
    Batch.from_arrays(lengths, lengths, lengths)
    Batch.from_arrays(lengths, lengths, lengths, lengths, num_prompt=lengths, query_len=4, num_active_loras=1)
    assert_type(Batch.of(requests, max_model_len=4096, extend_equals_decode=True).can_pad_drafts, bool)
    return Batch.of(tuple(requests))


def configure(additional_config: Mapping[str, object] | None) -> Dispatcher:
    config = DispatchConfig.load(additional_config)
    assert_type(config.policy, str | None)
    assert_type(config.threshold, int | None)
    assert_type(DispatchConfig(full_sizes=(1, 2)).full_sizes, tuple[int, ...] | None)
    plan = CapturePlan(full_sizes=(4, 8), piecewise_sizes=range(8, 64, 8))
    assert_type(plan.full_sizes, tuple[int, ...])
    assert_type(plan.descriptors(query_len=4), tuple[BatchDescriptor, ...])
    assert_type(CapturePlan((4, 8), (8,), lora_cases=[0, 1]).lora_cases, tuple[int, ...])
    cost = StepCost({mode: {1: 0.004, 64: 0.005} for mode in RuntimeMode})
    assert_type(cost.seconds(RuntimeMode.FULL, 8), float)
    return Dispatcher(
        plan,
        policy=config.policy or next(iter(POLICIES)),
        query_len=4,
        max_num_seqs=8,
        traits=BackendTraits(FullGraphs.RAGGED, extend_equals_decode=True),
        cost=cost,
        role="draft",
    )


def dispatch(dispatcher: Dispatcher, batch: Batch) -> StepPlan:
    step_plan = dispatcher.dispatch(batch)
    for part in step_plan.parts:
        assert_type(part, Part)
        assert_type(part.mode, RuntimeMode)
        assert_type(part.reason, Reason)
        assert_type(part.num_paddings, int)
        assert_type(part.pads_drafts, bool)
        assert_type(part.seconds, float | None)
        assert_type(part.descriptor.num_reqs, int | None)
        first, last = part.tokens
        assert_type(last - first, int)
    return dispatcher.dispatch(batch, {RuntimeMode.PIECEWISE})


def observe(graphs: dict[BatchDescriptor, str]) -> str | None:
    assert_type(POLICIES["eager"][BatchKind.MIXED], tuple[RuntimeMode, ...])
    return graphs.get(BatchDescriptor(RuntimeMode.FULL, 8, num_reqs=2, query_len=4))
