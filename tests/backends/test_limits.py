"""What graphs take of the device, how much of it there is, and that a release gives it back."""

import gc

import attrs
import pytest
import torch

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.emulated.limits import STREAM_LIMITS
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.errors import CaptureError
from aclgraph_dispatch.pool import GraphKey, GraphPool

NUM_LAYERS = 94
NUM_PIECES = NUM_LAYERS + 1
"""One before every attention, one after the last."""
HIDDEN = 4


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """
    What the device has to give, to this test alone: graphs that other tests left behind are gone, or stay.
    """
    gc.collect()
    gc.disable()
    streams = STREAM_LIMITS["legacy-1800"] + npu.hardware.streams_held
    monkeypatch.setattr(npu.hardware, "limits", attrs.evolve(npu.hardware.limits, streams=streams))
    with torch.inference_mode():
        yield npu.hardware.limits
    gc.enable()


class Model:
    """
    As many pieces as PIECEWISE makes of a deep model; attention, between them, runs eagerly.

    Args:
        has_side_stream: A part of every piece runs on a stream of its own.
    """

    def __init__(self, *, has_side_stream):
        self.pool = GraphPool(NpuBackend(npu, npu.weak_ref_tensor))
        self.side_stream = npu.Stream() if has_side_stream else None
        self.graphs = {}
        self.inputs = {}

    def piece(self, x):
        if self.side_stream is None:
            return x * 1.5 + x.sum(dim=1, keepdim=True)
        main = npu.current_stream()
        self.side_stream.wait_stream(main)
        with npu.stream(self.side_stream):
            total = x.sum(dim=1, keepdim=True)
        result = x * 1.5
        main.wait_stream(self.side_stream)
        return result + total

    def attention(self, x):
        return x.clamp_(-2, 2)

    def descriptor(self, num_tokens):
        return BatchDescriptor(RuntimeMode.PIECEWISE, num_tokens)

    def capture(self, num_tokens):
        """
        Capture all pieces of one size; each reads what the one before wrote, and attention in between.
        """
        x = self.inputs[num_tokens] = torch.zeros(num_tokens, HIDDEN)
        for piece in range(NUM_PIECES):
            key = GraphKey(self.descriptor(num_tokens), piece)
            run, addresses = (lambda x=x: self.piece(x)), [x.data_ptr()]
            graph, x = self.pool.capture(key, run, addresses=addresses, release_output=piece == NUM_LAYERS)
            self.graphs[key] = graph, addresses

    def run(self, num_tokens, x):
        """
        The last piece's result for *x*.
        """
        self.inputs[num_tokens].copy_(x)
        for piece in range(NUM_PIECES):
            graph, addresses = self.graphs[GraphKey(self.descriptor(num_tokens), piece)]
            output = graph.replay(addresses)
            if piece < NUM_LAYERS:
                self.attention(output)
        return output

    def run_eagerly(self, x):
        x = x.clone()
        for _ in range(NUM_LAYERS):
            x = self.attention(self.piece(x))
        return self.piece(x)


def taken():
    """
    Streams and bytes that are gone.
    """
    free, total = npu.mem_get_info()
    return npu.hardware.streams_held, total - free


@pytest.mark.parametrize("streams_per_graph", [1, 2])
@pytest.mark.parametrize(
    ("old_driver", "text"),
    [
        (False, r"207008: the stream resource is insufficient \(ACL_ERROR_RT_NO_STREAM_RESOURCE"),
        (True, r"207005 \(0x7020023\): Alloc sq cq fail"),
    ],
)
def test_a_deep_model_runs_out_of_streams(limits, streams_per_graph, old_driver, text):
    """
    94 layers have room for 1800 // 95 sizes, half as many with a side stream in every graph. The next size fails
    in the very piece where streams run out; its release gives back what it took, and the sizes before go on.
    """
    limits.old_driver = old_driver
    nothing = taken()
    model = Model(has_side_stream=streams_per_graph == 2)
    num_sizes, rest = divmod(STREAM_LIMITS["legacy-1800"], NUM_PIECES * streams_per_graph)
    for num_tokens in range(1, num_sizes + 1):
        model.capture(num_tokens)
    before = taken()

    with pytest.raises(CaptureError, match=rf"piece={rest // streams_per_graph}\) failed: .*{text}"):
        model.capture(num_sizes + 1)
    assert npu.hardware.streams_held == limits.streams - rest % streams_per_graph
    model.pool.release(model.descriptor(num_sizes + 1))
    assert taken() == before

    for num_tokens in (num_sizes, 1):
        x = torch.linspace(-1, 1, num_tokens * HIDDEN).view(num_tokens, HIDDEN)
        assert torch.equal(model.run(num_tokens, x), model.run_eagerly(x))
    model.pool.clear()

    assert taken() == nothing


def test_room_that_was_given_back_is_room(limits):
    """
    What failed for want of streams succeeds as soon as another size is released.
    """
    model = Model(has_side_stream=False)
    limits.streams = npu.hardware.streams_held + 2 * NUM_PIECES
    for num_tokens in (1, 2):
        model.capture(num_tokens)
    for released, num_tokens in ((None, 3), (1, 3), (2, 4)):
        if released is None:
            with pytest.raises(CaptureError, match="piece=0"):
                model.capture(num_tokens)
            continue
        model.pool.release(model.descriptor(released))
        model.capture(num_tokens)

    x = torch.ones(3, HIDDEN)
    assert torch.equal(model.run(3, x), model.run_eagerly(x))


def test_the_side_stream_that_is_one_too_many(limits):
    """
    With one stream left a capture begins and fails where its side stream joins; it keeps nothing.
    """
    model = Model(has_side_stream=True)
    limits.streams = npu.hardware.streams_held + 1
    before = taken()

    with pytest.raises(CaptureError, match=r"New capture stream failed, error code is 207008"):
        model.capture(1)
    model.pool.release(model.descriptor(1))

    assert taken() == before


def test_bytes_of_a_pool():
    """
    A pool holds every graph's output, and of intermediate results what its largest graph has.
    """
    pool = GraphPool(NpuBackend(npu, npu.weak_ref_tensor))
    nothing, sizes = taken()[1], (8, 2, 4)
    held = []
    for num_tokens in sizes:
        x = torch.zeros(num_tokens, HIDDEN)
        key = GraphKey(BatchDescriptor(RuntimeMode.PIECEWISE, num_tokens))
        pool.capture(key, lambda x=x: (x + 1) * 2, addresses=[], release_output=True)
        held.append(taken()[1] - nothing)

    row = 4 * HIDDEN
    assert held == [(8 + 8) * row, (8 + 8 + 2) * row, (8 + 8 + 2 + 4) * row]
    pool.release(BatchDescriptor(RuntimeMode.PIECEWISE, 8))
    assert taken()[1] - nothing == (4 + 2 + 4) * row
    pool.clear()
    assert taken()[1] == nothing
