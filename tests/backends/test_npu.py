"""The same backend on the emulated namespace, and the calls it makes to any."""

import gc
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.errors import CaptureError
from aclgraph_dispatch.pool import GraphKey, GraphPool

FULL = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1)


@pytest.fixture(autouse=True)
def _inference_mode():
    gc.disable()  # streams are counted: graphs that other tests left behind keep theirs
    with torch.inference_mode():
        yield
    gc.enable()


@pytest.fixture
def backend():
    return NpuBackend(emulated, emulated.weak_ref_tensor)


def test_calls_to_the_namespace():
    """
    All captures share a memory pool; a task group, behind the wait for its event, is opened on the stream that
    captures, and updated on a stream of its own, which then records the event.
    """
    calls = []

    def note(*names):
        return {name: lambda *arguments, name=name: calls.append((name, *arguments)) or name for name in names}

    @contextmanager
    def entered(name, *arguments, **options):
        calls.append((name, *arguments, *options.values()))
        yield
        calls.append(("end of", name))

    npu = SimpleNamespace(
        NPUGraph=lambda: "graph",
        Stream=lambda: SimpleNamespace(**note("wait_stream")),
        ExternalEvent=lambda: SimpleNamespace(**note("wait", "reset", "record")),
        current_stream=lambda: "current",
        graph=partial(entered, "capture"),
        stream=partial(entered, "stream"),
        graph_pool_handle=iter([(0, 1)]).__next__,
        **note("graph_task_group_begin", "graph_task_group_end"),
        **note("graph_task_update_begin", "graph_task_update_end"),
    )
    backend = NpuBackend(npu, lambda tensor: tensor)
    operator, update_stream = note("operator")["operator"], backend.update_stream
    for _ in range(2):
        _, _, handle = backend.capture(lambda: backend.record_task(operator), release_output=False)
    backend.order_updates()
    backend.update_task(handle, operator)
    backend.release_task(handle)

    assert calls == [
        *[
            ("capture", "graph", (0, 1)),
            ("wait", "current"),
            ("reset", "current"),
            ("graph_task_group_begin", "current"),
            ("operator",),
            ("graph_task_group_end", "current"),
            ("end of", "capture"),
        ]
        * 2,
        ("wait_stream", "current"),
        ("stream", update_stream),
        ("graph_task_update_begin", update_stream, "graph_task_group_end"),
        ("operator",),
        ("graph_task_update_end", update_stream),
        ("record", update_stream),
        ("end of", "stream"),
        ("record", update_stream),
    ]


@pytest.mark.parametrize("release_output", [False, True])
def test_output_in_any_nesting(backend, release_output):
    """
    The output comes back twice as it was built: once held weakly, once as the caller's own.
    """
    x = torch.arange(4.0)
    graph, weak, output = backend.capture(
        lambda: (x * 2, {"sum": x.sum(), "rest": [None, 7]}), release_output=release_output
    )
    graph.replay()

    for doubled, others in (weak, output):
        assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert others == {"sum": 6.0, "rest": [None, 7]}
    assert weak[0] is not output[0]
    assert weak[0].data_ptr() == output[0].data_ptr()


@pytest.mark.parametrize("release_output", [False, True])
def test_a_released_output_may_be_overwritten_by_the_next_graph(backend, release_output):
    """
    Who holds the output holds its memory, unless it was released within the capture.
    """
    x = torch.ones(2)
    first, weak, output = backend.capture(lambda: x + 1, release_output=release_output)
    second, _, _ = backend.capture(lambda: x + 2, release_output=release_output)
    first.replay()
    second.replay()

    assert release_output is bool(weak.isnan().all())
    assert release_output is bool(output.isnan().all())


def test_is_capturing(backend):
    """
    Within a capture, and only there, the backend says so.
    """
    _, _, during = backend.capture(lambda: backend.is_capturing, release_output=False)

    assert (during, backend.is_capturing) == (True, False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_capture_gives_everything_back(backend, error):
    """
    After an exception in the captured function the stream is back, and the backend captures again.
    """
    streams_held, stream = emulated.hardware.streams_held, emulated.current_stream()
    x = torch.ones(2)

    def run():
        x.add_(1)
        raise error("half-way")

    # Whoever keeps the exception keeps the graph, but not its stream.
    with pytest.raises(error) as caught:
        backend.capture(run, release_output=False)

    assert caught.value.args == ("half-way",)
    assert not backend.is_capturing
    assert (streams_held, stream) == (emulated.hardware.streams_held, emulated.current_stream())
    assert x.tolist() == [1.0, 1.0]
    assert isinstance(backend.capture(lambda: x + 1, release_output=False)[2], torch.Tensor)


def test_no_stream_is_left(backend, monkeypatch):
    """
    When streams run out the user reads CANN's text; the graphs captured so far still work.
    """
    monkeypatch.setattr(emulated.hardware.limits, "streams", emulated.hardware.streams_held + 1)
    pool, x = GraphPool(backend), torch.ones(2)
    graph, output = pool.capture(GraphKey(FULL), lambda: x + 1, addresses=[])

    with pytest.raises(CaptureError, match=r"207008.*stream resource"):
        pool.capture(GraphKey(FULL, piece=1), lambda: x + 1, addresses=[])
    graph.replay([])
    assert output.tolist() == [2.0, 2.0]

    pool.clear()

    assert emulated.hardware.limits.streams == emulated.hardware.streams_held + 1


def test_updates_of_a_pool_on_this_backend(backend):
    """
    Recorded at capture, updated with each replay: the graph computes with the step's own parameters.
    """
    pool, x, output = GraphPool(backend), torch.arange(3.0), torch.empty(3)

    def issue(metadata):
        torch.add(x, metadata["offset"], alpha=metadata["scale"], out=output)

    def run():
        pool.params.record(FULL, "layer.0", issue, {"offset": torch.ones(3), "scale": 1})
        return output * 2

    graph, result = pool.capture(GraphKey(FULL), run, addresses=[])
    results = []
    for scale in (10, 20):
        metadata = {"layer.0": {"offset": torch.full((3,), 2.0), "scale": scale}}
        pool.params.replay(FULL, metadata, partial(graph.replay, []))
        results.append(result.tolist())

    assert results == [[40.0, 42.0, 44.0], [80.0, 82.0, 84.0]]


def test_an_update_that_fails_is_closed(backend):
    """
    An exception while an operator is issued anew leaves no update open, in which later operations would vanish.
    """
    x = torch.ones(2)
    _, _, handle = backend.capture(lambda: backend.record_task(lambda: x.add_(1)), release_output=False)

    def issue():
        raise ValueError("no such sequence")

    try:
        with pytest.raises((ValueError, RuntimeError)):
            backend.update_task(handle, issue)
        x.add_(1)
    finally:
        with suppress(RuntimeError):  # left open, it would swallow the operations of later tests
            emulated.graph_task_update_end(backend.update_stream)

    assert x.tolist() == [2.0, 2.0]
    assert emulated.current_stream() is emulated.default_stream()
