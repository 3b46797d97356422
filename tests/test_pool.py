"""The captured graphs of one engine."""

import pytest

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.errors import CaptureError, ReplayError
from aclgraph_dispatch.pool import GraphKey, GraphPool

FULL = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1)
PIECEWISE = BatchDescriptor(RuntimeMode.PIECEWISE, 4)
OTHER = BatchDescriptor(RuntimeMode.PIECEWISE, 8)


class FakeGraph:
    """
    Counts its replays.
    """

    def __init__(self):
        self.num_replays = 0
        self.num_resets = 0

    def replay(self):
        self.num_replays += 1

    def reset(self):
        self.num_resets += 1


class FakeBackend:
    """
    Captures by running, holds an output weakly by naming it, and remembers what it was asked.
    """

    def __init__(self):
        self.graphs = []
        self.released = []

    def capture(self, run, *, release_output):
        output = run()
        self.graphs.append(FakeGraph())
        self.released.append(release_output)
        return self.graphs[-1], f"weak {output}", output

    def record_task(self, run):
        run()

    def order_updates(self):
        pass


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def pool(backend):
    return GraphPool(backend)


def capture(pool, descriptor, piece=0, **options):
    """
    Capture a graph with two inputs and the output "out".
    """
    return pool.capture(GraphKey(descriptor, piece), lambda: "out", addresses=[16, 32], **options)


def test_capture_and_replay(pool, backend):
    """
    The capture returns the output itself; a replay returns the one held weakly.
    """
    graph, output = capture(pool, FULL)

    assert output == "out"
    assert graph.replay([16, 32]) == "weak out"
    assert backend.graphs[0].num_replays == 1


@pytest.mark.parametrize(("options", "released"), [({}, False), ({"release_output": True}, True)])
def test_output_is_released_only_if_asked(pool, backend, options, released):
    """
    An output is let go of within the capture only where the caller says that no later graph reads it.
    """
    capture(pool, FULL, **options)

    assert [released] == backend.released


@pytest.mark.parametrize(
    ("addresses", "moved"), [([16, 48], r"input \[1\]"), ([48, 64], r"input \[0, 1\]"), ([16], "input count")]
)
def test_moved_inputs(pool, backend, addresses, moved):
    """
    A graph reads where its inputs lay at capture: others are refused, named, and nothing is replayed.
    """
    graph, _ = capture(pool, FULL)

    with pytest.raises(ReplayError, match=f"{moved} of .* moved, .*; keep them in persistent buffers"):
        graph.replay(addresses)
    assert backend.graphs[0].num_replays == 0


def test_capture_twice(pool, backend):
    """
    A key has one graph; the first one stays in use.
    """
    graph, _ = capture(pool, FULL)

    with pytest.raises(CaptureError, match=r"captured once: .*num_tokens=4.* exists; release it first"):
        capture(pool, FULL)
    assert len(backend.graphs) == 1
    assert graph.replay([16, 32]) == "weak out"


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError, CaptureError), (TypeError, TypeError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_failed_capture_leaves_nothing(pool, backend, error, raised):
    """
    After a capture that failed there is no graph and nothing to refresh, and another try is fine.
    """

    def run():
        pool.params.record(FULL, "layer.0", lambda metadata: None, "captured")
        raise error("207008")

    with pytest.raises(raised, match="207008"):
        pool.capture(GraphKey(FULL), run, addresses=[])

    assert pool.params.replay(FULL, {}, lambda: "nothing to update") == "nothing to update"
    assert not pool.num_graphs()
    assert capture(pool, FULL)[1] == "out"


def test_release_takes_all_pieces_of_one_descriptor(pool, backend):
    """
    Release gives back every piece of a descriptor, with what was recorded for it, and nothing else.
    """
    pieces = [capture(pool, PIECEWISE, piece)[0] for piece in range(3)]
    other, _ = capture(pool, OTHER)
    for descriptor in (PIECEWISE, OTHER):
        pool.params.record(descriptor, "layer.0", lambda metadata: None, "captured")

    pool.release(PIECEWISE)
    pool.params.replay(PIECEWISE, {}, list)

    assert [graph.num_resets for graph in backend.graphs] == [1, 1, 1, 0]
    assert pool.num_graphs() == {OTHER: 1}
    assert other.replay([16, 32]) == "weak out"
    with pytest.raises(ReplayError, match="no attention metadata"):
        pool.params.replay(OTHER, {}, list)
    for piece in pieces:
        with pytest.raises(ReplayError, match=r"was released; capture it again before it is replayed"):
            piece.replay([16, 32])


def test_release_and_capture_again(pool):
    """
    A key is free again once it was released; releasing what is not there does nothing.
    """
    capture(pool, FULL)
    pool.release(FULL)
    pool.release(FULL)

    assert capture(pool, FULL)[1] == "out"


def test_counts_and_clear(pool, backend):
    """
    Graphs are counted by descriptor and by mode, until all are released.
    """
    capture(pool, FULL)
    for descriptor in (PIECEWISE, OTHER):
        for piece in range(3):
            capture(pool, descriptor, piece)

    assert pool.num_graphs() == {FULL: 1, PIECEWISE: 3, OTHER: 3}
    assert pool.num_graphs_by_mode() == {RuntimeMode.FULL: 1, RuntimeMode.PIECEWISE: 6}

    pool.clear()

    assert (pool.num_graphs(), pool.num_graphs_by_mode()) == ({}, {})
    assert {1} == {graph.num_resets for graph in backend.graphs}
