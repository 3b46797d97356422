"""Calibration: the grid, how it is timed, and one on a real engine."""

import itertools

import pytest

from aclgraph_dispatch import CapturePlan, RuntimeMode
from aclgraph_dispatch.bench.calibration import (
    MAX_SPREAD,
    MOST_BLOCK_TOKENS,
    cached_tokens,
    calibrate,
    grid,
    measure,
)
from aclgraph_dispatch.bench.checkpoints import cached_checkpoint
from aclgraph_dispatch.calibration import BatchShape, Calibration
from aclgraph_dispatch.cost_model import StepLoad
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape

NONE, PIECEWISE, FULL = RuntimeMode

PLAN = CapturePlan(full_sizes=(1, 2, 4, 8), piecewise_sizes=(1, 2, 4, 8, 16, 32, 64))


class Sample:
    """
    A step as a timer tells it.
    """

    def __init__(self, mode, num_tokens, seconds):
        self.mode, self.num_tokens = mode, num_tokens
        self.prepare_seconds = self.sample_seconds = 1e-4
        self.host_seconds = self.device_seconds = seconds


class Timer:
    """
    In place of `StepTimer`: every step takes as long as *seconds* says of its shape and number.
    """

    plan = PLAN
    max_model_len = 320

    def __init__(self, seconds):
        self.seconds = seconds
        self.asked = []

    def refusal(self, shape):
        return "no chunks" if shape.tokens_before else ""

    def samples(self, shape, modes, num_rounds):
        self.asked.append(shape)
        possible = [mode for mode in modes if mode is not FULL or not shape.chunk_tokens]
        return [
            Sample(mode, shape.num_decodes + shape.chunk_tokens, self.seconds(shape, index))
            for index in range(num_rounds)
            for mode in possible
        ]


def test_grid():
    """
    Decodes fill every FULL size, short and long; prefills and mixtures fill every PIECEWISE size from 16 on.
    """
    fitted, _ = grid(PLAN, 320)

    assert {(n, context) for n in (1, 2, 4, 8) for context in (20, 240)} == {
        (shape.num_decodes, shape.context_tokens) for shape in fitted if not shape.chunk_tokens
    }
    filled = [shape for shape in fitted if shape.chunk_tokens]
    assert {16, 32, 64} == {shape.num_decodes + shape.chunk_tokens for shape in filled}
    assert {(0, 0), (0, 96)} <= {(shape.num_decodes, shape.tokens_before) for shape in filled}
    assert {(1, 15, 240), (8, 8, 20), (4, 60, 240), (32, 32, 20)} <= {
        (shape.num_decodes, shape.chunk_tokens, shape.context_tokens) for shape in filled
    }


@pytest.mark.parametrize(
    "plan",
    [PLAN, CapturePlan(full_sizes=(1, 2, 4, 8, 16, 32)), CapturePlan(piecewise_sizes=(1, 8, 16, 512))],
)
def test_held_out(plan):
    """
    What is held out lies between what is fitted, and is not among it.
    """
    fitted, checked = grid(plan, 1024)

    assert checked
    assert set() == set(fitted) & set(checked)
    for number in (lambda s: s.num_decodes, lambda s: s.chunk_tokens, lambda s: s.num_decodes * s.context_tokens):
        assert max(map(number, checked)) <= max(map(number, fitted))


def test_measure():
    """
    All that the runner holds is timed in every sweep, in another order; a point is the median of its steps.
    """
    timer = Timer(lambda _, index: [1e-3, 1.09e-3, 1.01e-3][index])
    points, left_out = measure(timer, 3, 4, 0)
    shapes = [shape for shapes in grid(PLAN, 320) for shape in shapes]
    held = [shape for shape in shapes if not timer.refusal(shape)]
    sweeps = [timer.asked[i : i + len(held)] for i in range(0, len(timer.asked), len(held))]

    assert 4 == len(sweeps)
    assert all(set(held) == set(sweep) for sweep in sweeps)
    assert all(one != other for one, other in itertools.pairwise(sweeps))
    assert {1.01e-3} == {point.device_seconds for point in points}
    assert {3 * 4} == {point.num_steps for point in points}
    # Three modes of decodes, two with a prefill.
    assert sum(2 if shape.chunk_tokens else 3 for shape in held) == len(points)
    assert {shape.load for shape in grid(PLAN, 320)[1] if not timer.refusal(shape)} == {
        point.load for point in points if point.is_held_out
    }
    assert {"no chunks": len(shapes) - len(held)} == left_out
    assert len(shapes) > len(held)


def test_cached_tokens():
    """
    The KV cache has room for the largest batch; its sequences fill whole blocks, one token longer than they are.
    """
    size = MOST_BLOCK_TOKENS
    shapes = [BatchShape(3, size - 1), BatchShape(2, size), BatchShape(0, chunk_tokens=size, tokens_before=size)]

    assert 4 * size == cached_tokens(shapes[:1])
    assert 5 * size == cached_tokens(shapes[:2])
    assert 4 * size == cached_tokens(shapes[2:])


def test_noise():
    """
    What is noisy is timed again, alone, until it is not or often enough.
    """
    noisy = BatchShape(4, 20)
    timer = Timer(lambda shape, index: 1e-3 * (1 + index * (shape == noisy)))
    points, _ = measure(timer, 3, 4, 0)

    assert [noisy] * 2 == timer.asked[-2:]
    assert [noisy.load] * 3 == [point.load for point in points if point.spread > MAX_SPREAD]
    assert {3 * (4 + 2)} == {p.num_steps for p in points if p.load == noisy.load}
    assert {3 * 4} == {p.num_steps for p in points if p.load != noisy.load}


def test_same_seed():
    """
    The seed decides the order.
    """

    def order(seed):
        timer = Timer(lambda _shape, _index: 1e-3)
        measure(timer, 2, 1, seed)
        return timer.asked

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize("model", ["gpt", "/nowhere"])
def test_unknown_model(model):
    """
    A model that is not there is refused before an engine starts.
    """
    with pytest.raises(ConfigError) as excinfo:
        calibrate(model)

    assert f"'model' must be one of gqa, mla, or a directory with a config.json: {model!r}" == str(excinfo.value)


@pytest.mark.engine
def test_engine(tmp_path):
    """
    On a real engine all modes are timed in the sizes that are captured, and the file says what was found.
    """
    found = calibrate("gqa", num_rounds=2, num_sweeps=1, sizes=(1, 4, 8, 16, 64))
    path = tmp_path / "gqa.json"
    path.write_text(found.dumps())
    read = Calibration.load(path)
    full = [point for point in found.points if point.mode == "FULL"]

    assert found == read
    assert {} == found.left_out
    assert sum(map(len, grid(CapturePlan([1, 4, 8, 16], [1, 4, 8, 16, 64]), 1024))) == found.num_shapes
    found.check_model(ModelShape.from_config(cached_checkpoint("gqa")))
    assert (32, 32) in {(p.load.num_decodes, p.load.num_prefill_tokens) for p in found.points}
    assert {"NONE", "PIECEWISE", "FULL"} == set(found.passes)
    assert {1, 4, 8, 16} == {point.num_tokens for point in full}
    assert {4, 8, 16, 64} <= {point.num_tokens for point in found.points if point.mode == "PIECEWISE"}
    assert 40 in {point.num_tokens for point in found.points if point.mode == "NONE"}
    assert found.host_is_device
    assert found.device
    # One query reads the keys before it, and twelve times as many take longer.
    context = {(p.load.num_decodes, p.load.decode_context): p.device_seconds for p in full if not p.is_held_out}
    assert context[16, 16 * 768] > 1.5 * context[16, 16 * 64]
    # It is a real machine, with others on it: not a matter of a few percent.
    assert found.errors["pass"]["mean"] < 0.5
    load = StepLoad.decodes(8, 300)
    assert found.covers(FULL, 8, load)
    assert not found.covers(FULL, 8, StepLoad.decodes(8, 5000))
    assert 1e-4 < found.times(FULL, 8, load).seconds < 1
