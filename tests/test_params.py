"""What a FULL graph cannot read from memory, and is told before every replay."""

from functools import partial

import pytest

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.errors import ReplayError
from aclgraph_dispatch.params import AttentionParams

FOUR = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1)
TWO_BY_TWO = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=2, query_len=2)


class FakeBackend:
    """
    Runs what it is given and numbers the tasks; `log` says in which order.
    """

    def __init__(self):
        self.log = []
        self.num_tasks = 0

    def record_task(self, run):
        run()
        self.num_tasks += 1
        return self.num_tasks - 1

    def order_updates(self):
        self.log.append("order")

    def update_task(self, handle, run):
        run()
        self.log.append(f"update {handle}")

    def release_task(self, handle):
        self.log.append(f"release {handle}")

    def replay(self):
        self.log.append("replay")
        return "output"


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def params(backend):
    return AttentionParams(backend)


def record(params, descriptor, *layer_names):
    """
    Record one operator a layer, which fails if it is issued with an error; return the list of what they were
    issued with.
    """
    issued = []

    def issue(name, metadata):
        issued.append((name, metadata))
        if isinstance(metadata, BaseException):
            raise metadata

    for name in layer_names:
        params.record(descriptor, name, partial(issue, name), "captured")
    return issued


def test_record_issues_once_with_the_metadata_of_the_capture(params, backend):
    """
    At capture every operator is issued within its own task, and nothing else happens.
    """
    issued = record(params, FOUR, "layer.0", "layer.1")

    assert issued == [("layer.0", "captured"), ("layer.1", "captured")]
    assert (backend.num_tasks, backend.log) == (2, [])


@pytest.mark.parametrize(
    ("update_first", "log"),
    [(False, ["order", "replay", "update 0", "update 1"]), (True, ["order", "update 0", "update 1", "replay"])],
)
def test_each_replay_gets_its_own_metadata(backend, update_first, log):
    """
    Updates are ordered behind the replays so far, and issued layer by layer as captured, whatever the order of
    the metadata.
    """
    params = AttentionParams(backend, update_first=update_first)
    issued = record(params, FOUR, "layer.0", "layer.1")

    for step in (1, 2):
        del issued[:], backend.log[:]
        output = params.replay(FOUR, {"layer.1": f"b{step}", "other": "c", "layer.0": f"a{step}"}, backend.replay)

        assert issued == [("layer.0", f"a{step}"), ("layer.1", f"b{step}")]
        assert (output, backend.log) == ("output", log)


def test_records_are_kept_by_the_whole_descriptor(params, backend):
    """
    Two graphs of the same number of tokens do not share records.
    """
    four, two_by_two = record(params, FOUR, "layer.0"), record(params, TWO_BY_TWO, "layer.0")
    params.replay(TWO_BY_TWO, {"layer.0": "new"}, backend.replay)

    assert (four[1:], two_by_two[1:]) == ([], [("layer.0", "new")])
    assert backend.log == ["order", "replay", "update 1"]


@pytest.mark.parametrize(
    ("metadata", "missing"),
    [({}, r"layer\.0, layer\.1"), ({"layer.0": "a"}, r"layer\.1"), ({"layer.1": "a"}, r"layer\.0")],
)
def test_replay_without_metadata(params, backend, metadata, missing):
    """
    A layer without metadata would compute with those of another step: it is named, and nothing is submitted.
    """
    issued = record(params, FOUR, "layer.0", "layer.1")

    with pytest.raises(ReplayError, match=f"no attention metadata for {missing} in a replay of .*num_tokens=4"):
        params.replay(FOUR, metadata, backend.replay)

    assert (issued[2:], backend.log) == ([], [])


@pytest.mark.parametrize(
    ("update_first", "log"),
    [(False, ["order", "replay", "update 0", "release 1", "release 2"]), (True, ["order", "update 0"])],
)
@pytest.mark.parametrize("error", [ValueError("too long"), KeyboardInterrupt("too long")])
def test_an_update_that_fails(backend, update_first, log, error):
    """
    A replay under way gets all it waits for; the graph is not replayed again, others are, until its next capture.
    """
    params = AttentionParams(backend, update_first=update_first)
    layers = ["layer.0", "layer.1", "layer.2"]
    record(params, FOUR, *layers)
    record(params, TWO_BY_TWO)

    with pytest.raises(type(error), match="too long"):
        params.replay(FOUR, dict.fromkeys(layers, "a") | {"layer.1": error}, backend.replay)
    assert backend.log == log

    with pytest.raises(ReplayError, match=r"num_tokens=4.* must be captured again before it is replayed") as again:
        params.replay(FOUR, dict.fromkeys(layers, "a"), backend.replay)
    assert (again.value.__cause__, backend.log) == (error, log)
    assert params.replay(TWO_BY_TWO, {}, backend.replay) == "output"

    params.forget(FOUR)
    record(params, FOUR, *layers)

    assert params.replay(FOUR, dict.fromkeys(layers, "a"), backend.replay) == "output"


def test_forget_one_graph(params, backend):
    """
    What was forgotten is not refreshed, may be recorded anew, and takes nothing else along.
    """
    record(params, FOUR, "layer.0")
    record(params, TWO_BY_TWO, "layer.0")
    params.forget(FOUR)
    params.forget(FOUR)
    record(params, FOUR, "layer.0")

    for descriptor in (FOUR, TWO_BY_TWO):
        params.replay(descriptor, {"layer.0": "a"}, backend.replay)

    assert backend.log == ["order", "replay", "update 2", "order", "replay", "update 1"]
