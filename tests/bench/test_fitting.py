"""Fits of measured steps."""

import attrs
import pytest

from aclgraph_dispatch import CapturePlan, RuntimeMode
from aclgraph_dispatch.bench.calibration import TOKEN_SIZES, grid
from aclgraph_dispatch.bench.fitting import agreed, fit
from aclgraph_dispatch.calibration import MeasuredStep
from aclgraph_dispatch.cost_model import CostModel, StepLoad
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape

NONE, PIECEWISE, FULL = RuntimeMode

SIZES = (*TOKEN_SIZES, 1024, 2048)
PLAN = CapturePlan(full_sizes=[s for s in SIZES if s <= 256], piecewise_sizes=SIZES)
FACTS = {
    "model": "made up",
    "num_layers": 1,
    "num_parameters": 1,
    "kv_bytes_per_token": 1.0,
    "num_shapes": 0,
    "left_out": {},
    "backend": "CostModel",
    "device": "none",
    "versions": {},
    "engine": {},
    "captured": {"FULL": PLAN.full_sizes, "PIECEWISE": PLAN.piecewise_sizes},
}


def points(cost, *, host_is_device=False, scale=lambda mode, num_tokens: 1.0):
    """
    What a timer would measure on the grid if steps took what *cost* says.
    """
    made = []
    for is_held_out, shapes in zip((False, True), grid(PLAN, 8192), strict=True):
        for shape in shapes:
            num_tokens = shape.num_decodes + shape.chunk_tokens
            for mode in RuntimeMode:
                fitting = [size for size in PLAN.sizes(mode) if size >= num_tokens]
                if (mode is FULL and shape.chunk_tokens) or (mode is not NONE and not fitting):
                    continue
                padded = num_tokens if mode is NONE else fitting[0]
                time = cost.times(mode, padded, shape.load)
                # The pass ends when host and device are done.
                seconds = max(time.host_seconds, time.device_seconds) * scale(mode, padded)
                made.append(
                    MeasuredStep(
                        mode=mode.name,
                        num_tokens=padded,
                        load=shape.load,
                        num_steps=1,
                        prepare_seconds=time.prepare_seconds,
                        host_seconds=seconds if host_is_device else time.host_seconds,
                        device_seconds=seconds,
                        sample_seconds=time.sample_seconds,
                        spread=0.0,
                        is_held_out=is_held_out,
                    )
                )
    return made


def fitted(model, measured, *, host_is_device=False):
    """
    The fit of *measured* steps.
    """
    return fit(
        measured,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        host_is_device=host_is_device,
        **FACTS,
    )


@pytest.mark.parametrize("device", ["ascend-910b", "h200"])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_cost_model(name, device):
    """
    Steps of another form, host against device and a soft roofline, are met within 4 % on average if held out.
    """
    model = ModelShape.named(name)
    calibration = fitted(model, points(CostModel(model, Device.named(device))))

    assert calibration.errors["pass"]["points"] > 50
    assert calibration.errors["pass"]["mean"] < 0.04
    assert calibration.errors["step"]["mean"] < 0.04


def test_exact_form():
    """
    Steps of its own form are met exactly.
    """
    model = ModelShape.named("deepseek-v2-lite")
    first = fitted(model, points(CostModel(model, Device.named("h200"))))
    form = attrs.evolve(
        first,
        host_is_device=True,
        passes={
            mode: attrs.evolve(of_mode, corrections={}, host_coefficients=())
            for mode, of_mode in first.passes.items()
        },
    )
    again = fitted(model, points(form, host_is_device=True), host_is_device=True)

    assert again.errors["pass"]["max"] < 1e-6
    assert again.errors["step"]["max"] < 1e-6
    assert all(of_mode.host_coefficients == () for of_mode in again.passes.values())


def test_size_of_its_own():
    """
    A captured size that takes longer than its neighbours, whatever the load, is corrected; an eager one is not.
    """
    model = ModelShape.named("qwen2.5-7b")
    cost = CostModel(model, Device.named("ascend-910b"))
    load = StepLoad.decodes(16, 2000)
    slow = fitted(
        model, points(cost, scale=lambda mode, num_tokens: 1.3 if (mode, num_tokens) == (FULL, 16) else 1)
    )
    plain = fitted(model, points(cost))

    assert slow.times(FULL, 16, load).device_seconds == pytest.approx(
        1.3 * plain.times(FULL, 16, load).device_seconds, rel=0.05
    )
    assert slow.times(FULL, 32, load).device_seconds == pytest.approx(
        plain.times(FULL, 32, load).device_seconds, rel=0.05
    )
    assert {} == slow.passes["NONE"].corrections
    assert set(PLAN.full_sizes) == set(slow.passes["FULL"].corrections)


@pytest.mark.parametrize(
    ("factors", "factor"),
    [
        ([1.2], 1.2),
        ([0.8], 0.8),
        ([1.3, 1.1, 1.2], 1.1),
        ([0.7, 0.9], 0.9),
        ([0.9, 1.6], 1.0),
        ([1.0, 1.6], 1.0),
    ],
)
def test_agreed(factors, factor):
    """
    Loads of one size agree as far as the one nearest to the fit; in contradiction they say nothing.
    """
    assert factor == agreed(factors)


def step(num_tokens, seconds, *, is_held_out=False):
    """
    An eager prefill that was measured.
    """
    return MeasuredStep(
        mode="NONE",
        num_tokens=num_tokens,
        load=StepLoad(),
        num_steps=1,
        prepare_seconds=1e-3,
        host_seconds=seconds,
        device_seconds=seconds,
        sample_seconds=1e-3,
        spread=0.0,
        is_held_out=is_held_out,
    )


def test_relative_errors_are_least():
    """
    Of measurements that contradict each other, errors count by what was measured: 1 and 3 s give 1.2, not 2.
    """
    calibration = fitted(ModelShape.named("qwen2.5-7b"), [step(1, 1.0), step(1, 3.0)])

    # (x - 1)^2 + (x / 3 - 1)^2 is least where x = (1 + 1 / 3) / (1 + 1 / 9).
    assert calibration.times(NONE, 1, StepLoad()).device_seconds == pytest.approx(1.2)


def test_errors():
    """
    Of relative errors of 0, 1, ... 20 % on held-out steps the mean is 10, the 95th percentile 19, the largest 20.
    """
    held_out = [step(1, 1 / (1 + percent / 100), is_held_out=True) for percent in range(21)]
    errors = fitted(ModelShape.named("qwen2.5-7b"), [step(1, 1.0), *held_out]).errors["pass"]

    assert {"points": 21, "mean": 0.1, "p95": 0.19, "max": 0.2} == pytest.approx(errors)


def test_range():
    """
    The fit tells what it was made of: no held-out point widens it.
    """
    model = ModelShape.named("qwen2.5-7b")
    full = fitted(model, points(CostModel(model, Device.named("h200")))).passes["FULL"]

    assert (1, 256) == (full.least, full.most[0])
    assert not full.has_mixed


def test_held_out_only():
    """
    A mode that has nothing to be fitted is named.
    """
    model = ModelShape.named("qwen2.5-7b")
    measured = [
        point
        for point in points(CostModel(model, Device.named("h200")))
        if point.is_held_out or point.mode != "PIECEWISE"
    ]

    with pytest.raises(ConfigError) as excinfo:
        fitted(model, measured)

    assert "'points' must hold some of PIECEWISE that are not held out" == str(excinfo.value)


def test_nothing_held_out():
    """
    Without held-out points no error is claimed on them.
    """
    model = ModelShape.named("qwen2.5-7b")
    measured = [point for point in points(CostModel(model, Device.named("h200"))) if not point.is_held_out]

    assert ["pass of the fit itself"] == list(fitted(model, measured).errors)
