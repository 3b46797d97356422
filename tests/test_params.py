"""What a FULL graph cannot read from memory, and is told before every replay."""

from functools import partial
from types import SimpleNamespace

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


def test_a_replay_in_the_hands_of_the_caller(params, backend):
    """
    Prepared, submitted and updated by the caller, it gets what it is told layer by layer.
    """
    issued = record(params, FOUR, "layer.0", "layer.1")
    params.order_updates(FOUR)
    backend.replay()
    params.update(FOUR, "new {}".format)
    params.update(TWO_BY_TWO, "never recorded: {}".format)

    assert issued[2:] == [("layer.0", "new layer.0"), ("layer.1", "new layer.1")]
    assert backend.log == ["order", "replay", "update 0", "update 1"]


@pytest.mark.parametrize("layer_name", ["layer.0", "layer.1"])
def test_metadata_that_cannot_be_told(params, backend, layer_name):
    """
    An error on the way to the metadata is an update that failed.
    """
    record(params, FOUR, "layer.0", "layer.1")
    first = {"layer.0": ["release 0", "release 1"], "layer.1": ["update 0", "release 1"]}[layer_name]

    with pytest.raises(KeyError, match=layer_name):
        params.update(FOUR, {name: "a" for name in ("layer.0", "layer.1") if name != layer_name}.__getitem__)
    assert backend.log == first

    with pytest.raises(ReplayError, match="must be captured again"):
        params.order_updates(FOUR)
    assert backend.log == first


@pytest.mark.parametrize(
    ("update_first", "log"), [(False, ["release 0", "release 1", "release 0", "release 1"]), (True, [])]
)
def test_abandon(backend, update_first, log):
    """
    A graph given up is refused for the first reason. A replay that may be under way comes to its end, even one
    submitted nevertheless.
    """
    params = AttentionParams(backend, update_first=update_first)
    record(params, FOUR, "layer.0", "layer.1")
    reasons = [ValueError("first"), ValueError("second")]
    params.abandon(FOUR, reasons[0])

    with pytest.raises(ReplayError, match="must be captured again") as refused:
        params.update(FOUR, "new {}".format)
    assert refused.value.__cause__ is reasons[0]
    assert backend.log == log

    del backend.log[:]
    params.abandon(TWO_BY_TWO, reasons[1])
    assert backend.log == []


def test_descriptors(params):
    """
    The graphs with records are known.
    """
    record(params, FOUR, "layer.0", "layer.1")
    record(params, TWO_BY_TWO, "layer.0")
    params.forget(FOUR)

    assert set(params.descriptors) == {TWO_BY_TWO}


def allocations(*sizes):
    """
    A function that makes workspaces of *sizes*, one a call.
    """
    return iter([SimpleNamespace(nbytes=nbytes) for nbytes in sizes]).__next__


def test_a_workspace_is_allocated_once_a_shape(params):
    """
    Layers of one shape share; one that needs more gets its own, which later ones that need less take.
    """
    allocate = allocations(8, 4, 16, 12)
    taken = [params.workspace(FOUR, shape, allocate) for shape in ("a", "a", "b", "c", "d", "a", "c")]

    assert [workspace.nbytes for workspace in taken] == [8, 8, 8, 16, 16, 8, 16]
    assert taken[0] is taken[1] is taken[2] is taken[5]


def test_workspaces_are_kept_by_the_whole_descriptor(params):
    """
    Graphs share none, and forgetting one lets go of its own only.
    """
    allocate = allocations(8, 8, 8)
    four, two_by_two = (params.workspace(descriptor, "a", allocate) for descriptor in (FOUR, TWO_BY_TWO))
    params.forget(FOUR)

    assert four is not two_by_two
    assert params.workspace(TWO_BY_TWO, "a", allocate) is two_by_two
    assert params.workspace(FOUR, "a", allocate) is not four
