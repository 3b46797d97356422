import numpy as np
import pytest

from aclgraph_dispatch import Batch, BatchKind, CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.bench.scheduling import ScheduledStep
from aclgraph_dispatch.bench.timers import CostTimer, OracleTimer, step_load
from aclgraph_dispatch.cost_model import CostModel, StepLoad
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.model_shape import ModelShape


def step(*rows: tuple[int, int, int, int]) -> ScheduledStep:
    """
    A step of requests with tokens scheduled, computed before, drafts, and in the prompt.
    """
    scheduled, computed, drafts, prompt = np.array(rows, dtype=np.int32).reshape(-1, 4).T
    return ScheduledStep(tuple(range(len(rows))), scheduled, computed, computed + scheduled, drafts, prompt)


def brute_load(*rows: tuple[int, int, int, int]) -> StepLoad:
    load = StepLoad()
    for scheduled, computed, drafts, prompt in rows:
        if computed >= prompt and scheduled - drafts == 1:
            load = StepLoad(
                load.num_decodes + 1,
                load.decode_context + computed + scheduled,
                load.num_prefill_tokens,
                load.prefill_pairs,
                load.num_sampled + 1,
            )
        else:
            load = load.chunk(scheduled, computed)
    return load


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(1, 300, 0, 200)],
        [(4, 300, 3, 200), (1, 50, 0, 50)],
        [(1, 300, 0, 200), (32, 64, 0, 128), (16, 0, 0, 16)],
        [(1, 99, 0, 100)],
        [(7, 300, 0, 200)],
    ],
)
def test_load_counts_request_by_request(rows):
    """
    The load of a step is the sum over its requests: decodes read their context, all else are chunks; the last
    token of a prompt is a chunk, and so are tokens computed again after a preemption.
    """
    assert brute_load(*rows) == step_load(step(*rows))


def test_timers_ask_the_model():
    """
    A part costs what the model says for its mode and size; the oracle pays neither host nor padding.
    """
    cost = CostModel(ModelShape.named("qwen2.5-7b"), Device.named("ascend-910b"))
    decodes = step(*[(1, 300, 0, 200)] * 5)
    dispatcher = Dispatcher(CapturePlan((8,)), max_num_seqs=8)
    [part] = dispatcher.dispatch(Batch(BatchKind.UNIFORM_DECODE, 5, 5, 5, 1)).parts
    time, oracle = CostTimer(cost)(decodes, part), OracleTimer(cost)(decodes, part)

    assert cost.times(part.mode, 8, step_load(decodes)) == time
    assert 0 == oracle.host_seconds == oracle.prepare_seconds == oracle.sync_seconds
    assert oracle.device_seconds + oracle.sample_seconds == oracle.seconds
    assert oracle.seconds < time.seconds
    exact = cost.times(RuntimeMode.NONE, 5, step_load(decodes))
    assert exact.device_seconds == oracle.device_seconds
