"""Which runners can be timed, and which steps; that they are is tested where they are calibrated."""

from types import SimpleNamespace as Namespace

import pytest

pytest.importorskip("vllm")

import torch

from aclgraph_dispatch import CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.calibration import BatchShape
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.model_runner import DispatchMixin
from aclgraph_dispatch.integrations.timing import POLICY, StepSample, StepTimer


class Runner(DispatchMixin):
    """
    A runner with so much of one as is looked at.
    """

    def __init__(self, cores, data_parallel_size=1):
        core = cores.get(max(cores, default=0))
        self.cudagraph_dispatcher = type("Dispatcher", (), {"core": core, "cores": cores})()
        self.parallel_config = type("Config", (), {"data_parallel_size": data_parallel_size})()


def test_policies():
    """
    Every mode has a policy that leads to it.
    """
    assert set(RuntimeMode) == set(POLICY)


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (object(), "steps are only timed on a worker of this package: set worker_cls, not enforce_eager"),
        (Runner({}), "steps are only timed on a worker of this package: set worker_cls, not enforce_eager"),
        (Runner({4: "core"}), "steps are only timed without speculation and data parallelism: turn them off"),
        (Runner({1: "core"}, 2), "steps are only timed without speculation and data parallelism: turn them off"),
    ],
)
def test_refused(runner, message):
    """
    A runner that is not ours, or whose batches are of another kind, is refused with the remedy.
    """
    with pytest.raises(ConfigError) as excinfo:
        StepTimer(runner)

    assert message == str(excinfo.value)


def timed_runner():
    """
    A runner with caches and limits, whose steps nobody runs.
    """
    plan = CapturePlan(full_sizes=(1, 2), piecewise_sizes=(1, 2, 8))
    runner = Runner({1: Dispatcher(plan, policy="eager", max_num_seqs=4)})
    runner.device = "cpu"
    runner.max_model_len = 64
    runner.model_config = Namespace(get_vocab_size=lambda: 100)
    runner.scheduler_config = Namespace(max_num_seqs=4, max_num_batched_tokens=32, enable_chunked_prefill=False)
    groups = [Namespace(kv_cache_spec=Namespace(block_size=16))]
    runner.kv_cache_config = Namespace(kv_cache_groups=groups, num_blocks=8)
    runner.kv_caches = [torch.zeros(2, 8, 16), torch.zeros(8, dtype=torch.uint8)]
    runner.execute_model = lambda _decision: None
    return runner


def test_keys_and_values():
    """
    Every key and value of the cache is a random number, by the seed; a cache of another kind is left alone.
    """
    caches = []
    for seed in (1, 1, 2):
        runner = timed_runner()
        StepTimer(runner, seed=seed)
        caches.append(runner.kv_caches)
    (first, whole), (same, _), (other, _) = caches

    assert first.unique().numel() > 0.9 * first.numel()
    assert first.std() > 0.5
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not whole.any()


def test_warming_steps(monkeypatch):
    """
    The first step of every mode warms it up and is no sample, nor is what makes the requests.
    """
    timer = StepTimer(timed_runner())
    runs = []

    def run(_new, decodes):
        [core] = timer._runner.cudagraph_dispatcher.cores.values()
        [mode] = [mode for mode, forced in timer._forced.items() if forced is core] or [None]
        runs.append(mode)
        return StepSample(mode, len(decodes), 0.0, len(runs), len(runs), 0.0)

    monkeypatch.setattr(timer, "_run", run)
    samples = timer.samples(BatchShape(2, 16), list(RuntimeMode), 2)
    warming = {runs.index(mode) + 1 for mode in RuntimeMode}

    # One step makes the requests; then three modes by turns, three times.
    assert [None] == runs[:1]
    assert 1 + 3 * 3 == len(runs)
    assert set(range(2, 11)) - warming == {sample.device_seconds for sample in samples}
    assert dict.fromkeys(RuntimeMode, 2) == {
        mode: sum(sample.mode is mode for sample in samples) for mode in RuntimeMode
    }


@pytest.mark.parametrize(
    ("shape", "refusal"),
    [
        (BatchShape(3, 16, 8), ""),
        (BatchShape(4, 16, 8), "more than max_num_seqs = 4 requests"),
        (BatchShape(1, 16, 32), "more than max_num_batched_tokens = 32 tokens"),
        (BatchShape(1, 64), "not shorter than max_model_len = 64 tokens"),
        (BatchShape(4, 32), "not fewer than the KV cache's 8 blocks"),
        (BatchShape(0, chunk_tokens=8, tokens_before=8), "prompts are not computed in chunks here"),
    ],
)
def test_refusal(shape, refusal):
    """
    A batch for which there is no room is refused with the reason.
    """
    assert refusal == StepTimer(timed_runner()).refusal(shape)
