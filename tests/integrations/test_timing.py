"""Which runners can be timed; that their steps are is tested where they are calibrated."""

import pytest

pytest.importorskip("vllm")

from aclgraph_dispatch import RuntimeMode
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.model_runner import DispatchMixin
from aclgraph_dispatch.integrations.timing import POLICY, StepTimer


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
