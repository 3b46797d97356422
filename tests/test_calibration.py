"""A measured cost: what it predicts, what it claims, and its file."""

import json

import attrs
import pytest

from aclgraph_dispatch import RuntimeMode
from aclgraph_dispatch.calibration import BatchShape, Calibration, MeasuredStep
from aclgraph_dispatch.cost_model import StepLoad
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.pass_fit import PassFit

NONE, PIECEWISE, FULL = RuntimeMode

EAGER = PassFit(
    knots=(8,),
    token_coefficients=(1e-3, 1e-5, 2e-5, 0.0),
    load_coefficients=(1e-6, 1e-7, 2e-6, 2e-7, 1e-5, 1e-8),
    corrections={},
    host_coefficients=(),
    least=1,
    most=(64, 16, 16000, 63, 5000, 16),
    has_mixed=True,
)
GRAPHS = attrs.evolve(EAGER, corrections={4: 0.5, 8: 1.0}, least=4, most=(8, 8, 8000, 0, 0, 8), has_mixed=False)
POINT = MeasuredStep(
    mode="NONE",
    num_tokens=4,
    load=StepLoad.decodes(4, 100),
    num_steps=15,
    prepare_seconds=1e-3,
    host_seconds=2e-3,
    device_seconds=2e-3,
    sample_seconds=1e-4,
    spread=0.02,
    is_held_out=False,
)
CALIBRATION = Calibration(
    format=1,
    model="tiny",
    backend="CpuPlatform (cpu)",
    device="cpu",
    versions={"vllm": "0.32.0"},
    engine={"max_num_seqs": 16},
    host_is_device=True,
    num_experts=0,
    experts_per_token=0,
    prepare=(1e-4, 1e-5, 0.0, 0.0),
    sample=(2e-4, 0.0, 1e-4, 0.0),
    passes={"NONE": EAGER, "FULL": GRAPHS},
    errors={"pass": {"points": 4, "mean": 0.03, "p95": 0.07, "max": 0.08}},
    points=(POINT,),
)
HOST = (5e-4, 1e-5, 0.0, 0.0)
ON_DEVICE = attrs.evolve(
    CALIBRATION, host_is_device=False, passes={"NONE": attrs.evolve(EAGER, host_coefficients=HOST)}
)


def written(tmp_path, text):
    """
    A file with *text*.
    """
    path = tmp_path / "calibration.json"
    path.write_text(text)
    return path


def test_times():
    """
    The parts of a step are the sums of their terms; the pass is one time where host and device are one.
    """
    time = CALIBRATION.times(NONE, 16, StepLoad(4, 400, 12, 78, 5))
    expected = 1e-3 + 16e-5 + 8 * 2e-5 + 4 * 3e-6 + 400 * 3e-7 + 12e-5 + 78e-8

    assert time.device_seconds == pytest.approx(expected)
    assert time.host_seconds == time.device_seconds
    assert time.prepare_seconds == pytest.approx(1.5e-4)
    assert time.sample_seconds == pytest.approx(3e-4)
    assert time.sync_seconds == time.update_seconds == 0
    assert time.seconds == pytest.approx(expected + 4.5e-4)


def test_host_of_its_own():
    """
    Where the device is another, the host has its own time.
    """
    time = ON_DEVICE.times(NONE, 4, StepLoad.decodes(4, 100))

    assert time.host_seconds == pytest.approx(5.4e-4)
    assert time.device_seconds == CALIBRATION.times(NONE, 4, StepLoad.decodes(4, 100)).device_seconds


def test_corrections():
    """
    A captured size is corrected by its own factor, every time.
    """
    load = StepLoad.decodes(4, 100)
    eager = [CALIBRATION.times(NONE, size, load).device_seconds for size in (4, 6, 8)]
    full = [CALIBRATION.times(FULL, size, load).device_seconds for size in (4, 6, 8)]

    assert [0.5, 0.75, 1.0] == pytest.approx([a / b for a, b in zip(full, eager, strict=True)])
    assert full == [CALIBRATION.times(FULL, size, load).device_seconds for size in (4, 6, 8)]


def test_experts():
    """
    Experts are read as far as the tokens meet them.
    """
    with_experts = attrs.evolve(EAGER, token_coefficients=(1e-3, 0.0, 0.0, 4e-3))
    cost = attrs.evolve(CALIBRATION, num_experts=4, experts_per_token=2, passes={"NONE": with_experts})

    assert cost.times(NONE, 2, StepLoad()).device_seconds == pytest.approx(1e-3 + 4e-3 * 0.75)


def test_unmeasured_mode():
    """
    A mode that was not measured has no time.
    """
    with pytest.raises(ConfigError) as excinfo:
        CALIBRATION.times(PIECEWISE, 8, StepLoad())

    assert str(excinfo.value) == (
        "no PIECEWISE step was measured in the calibration of tiny; calibrate with sizes for it"
    )


@pytest.mark.parametrize(
    ("mode", "num_tokens", "load", "is_covered"),
    [
        (NONE, 64, StepLoad(16, 16000, 48, 5000, 16), True),
        (FULL, 8, StepLoad.decodes(8, 1000), True),
        (FULL, 4, StepLoad.decodes(3, 1000), True),
        # More tokens, more context, more pairs, fewer tokens, another mode, a mixture that was not measured.
        (NONE, 65, StepLoad(), False),
        (NONE, 64, StepLoad.decodes(16, 1001), False),
        (NONE, 64, StepLoad(0, 0, 63, 5001, 1), False),
        (FULL, 2, StepLoad.decodes(2, 100), False),
        (PIECEWISE, 8, StepLoad.decodes(8, 100), False),
        (FULL, 8, StepLoad(4, 100, 4, 10, 5), False),
    ],
)
def test_covers(mode, num_tokens, load, is_covered):
    """
    It claims what lies within the measured, no more.
    """
    assert is_covered == CALIBRATION.covers(mode, num_tokens, load)


def test_mixed_where_decodes_and_prefills_were_alone():
    """
    Decodes beside a prefill are not claimed where each was only measured alone.
    """
    alone = attrs.evolve(CALIBRATION, passes={"NONE": attrs.evolve(EAGER, has_mixed=False)})

    assert alone.covers(NONE, 8, StepLoad.decodes(4, 100))
    assert alone.covers(NONE, 8, StepLoad().chunk(8))
    assert not alone.covers(NONE, 8, StepLoad.decodes(4, 100).chunk(4))


def test_step_cost():
    """
    A dispatcher can decide by it.
    """
    every = attrs.evolve(CALIBRATION, passes={mode.name: EAGER for mode in RuntimeMode})
    step_cost = every.step_cost([4, 8], context_tokens=100)

    assert step_cost.seconds(FULL, 4) == every.times(FULL, 4, StepLoad.decodes(4, 100)).seconds


def test_shapes():
    """
    A shape is a load: decodes read their context, a chunk is sampled like them.
    """
    assert StepLoad(3, 300, num_sampled=3) == BatchShape(3, 100).load
    assert StepLoad(3, 300, 8, 8 * 50 + 36, 4) == BatchShape(3, 100, 8, 50).load


@pytest.mark.parametrize("calibration", [CALIBRATION, ON_DEVICE])
def test_file(tmp_path, calibration):
    """
    What is written is read, used or unused.
    """
    calibration.times(NONE, 4, StepLoad())

    assert calibration == Calibration.load(written(tmp_path, calibration.dumps()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "'format' must be 1: 2; calibrate again"),
        ({"passes": {}}, "'passes' must hold NONE, and no mode but NONE, PIECEWISE, FULL: []"),
        (
            {"passes": {"NONE": EAGER, "FASTEST": EAGER}},
            "'passes' must hold NONE, and no mode but NONE, PIECEWISE, FULL: ['FASTEST']",
        ),
        ({"experts_per_token": 2}, "'experts_per_token' must be <= 0: 2"),
        ({"prepare": (1.0,)}, "'prepare' must be 4 finite numbers >= 0: [1.0]"),
        ({"sample": (1, -1, 0, 0)}, "'sample' must be 4 finite numbers >= 0: [1, -1, 0, 0]"),
        (
            {"passes": {"NONE": attrs.evolve(EAGER, knots=())}},
            "'NONE.token_coefficients' must be 3 finite numbers >= 0: [0.001, 1e-05, 2e-05, 0.0]",
        ),
        (
            {"passes": {"NONE": attrs.evolve(EAGER, load_coefficients=())}},
            "'NONE.load_coefficients' must be 6 finite numbers >= 0: []",
        ),
        (
            {"passes": {"NONE": attrs.evolve(EAGER, host_coefficients=HOST)}},
            "'NONE.host_coefficients' must be 0 finite numbers >= 0: [0.0005, 1e-05, 0.0, 0.0]",
        ),
        (
            {"passes": {"NONE": attrs.evolve(EAGER, corrections={4: float("nan")})}},
            "'NONE.corrections' must be 1 finite numbers >= 0: [nan]",
        ),
        (
            {"passes": {"NONE": attrs.evolve(EAGER, most=(1, 2))}},
            "'NONE.most' must be 6 finite numbers >= 0: [1, 2]",
        ),
    ],
)
def test_contradictions(tmp_path, change, message):
    """
    Numbers that no calibration writes are named, in the file as well.
    """
    with pytest.raises(ConfigError) as excinfo:
        attrs.evolve(CALIBRATION, **change)

    assert f"{message} @ calibration of tiny" == str(excinfo.value)


def test_contradictory_file(tmp_path):
    """
    A file with such numbers is named, with them.
    """
    content = json.loads(CALIBRATION.dumps()) | {"format": 2}
    path = written(tmp_path, json.dumps(content))

    with pytest.raises(ConfigError) as excinfo:
        Calibration.load(path)

    assert f"{path} must be a file written by calibrate: " in str(excinfo.value)
    assert "'format' must be 1: 2" in str(excinfo.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"format": 1}',
        json.dumps(json.loads(CALIBRATION.dumps()) | {"colour": "red"}),
        json.dumps(json.loads(CALIBRATION.dumps()) | {"passes": 7}),
        json.dumps(json.loads(CALIBRATION.dumps()) | {"prepare": "long"}),
    ],
)
def test_foreign_file(tmp_path, text):
    """
    A file that is broken or something else is one error, which names it.
    """
    path = written(tmp_path, text)

    with pytest.raises(ConfigError) as excinfo:
        Calibration.load(path)

    assert str(excinfo.value).startswith(f"{path} must be a file written by calibrate: ")
    assert "\n" not in str(excinfo.value)


def test_absent_file(tmp_path):
    """
    So is a file that is not there, or no text.
    """
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")

    for path in (tmp_path / "absent.json", binary):
        with pytest.raises(ConfigError, match="must be a file written by calibrate"):
            Calibration.load(path)
