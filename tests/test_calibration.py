"""A measured cost: what it predicts, what it claims, and its file."""

import json

import attrs
import pytest

from aclgraph_dispatch import RuntimeMode
from aclgraph_dispatch.calibration import MODEL_FIELDS, BatchShape, Calibration, MeasuredStep
from aclgraph_dispatch.cost_model import StepLoad, step_cost
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape
from aclgraph_dispatch.pass_fit import PassFit

NONE, PIECEWISE, FULL = RuntimeMode

QWEN = ModelShape.named("qwen2.5-7b")
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
    format=2,
    model="tiny",
    **{name: getattr(QWEN, name) for name in MODEL_FIELDS},
    backend="CpuPlatform (cpu)",
    device="cpu",
    versions={"vllm": "0.32.0"},
    engine={"max_num_seqs": 16},
    host_is_device=True,
    num_shapes=2,
    left_out={"too many requests": 1},
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
        # Several tokens a decode; padding, though, is measured.
        (FULL, 8, StepLoad.decodes(4, 100), False),
        (FULL, 8, StepLoad.decodes(5, 100), True),
        (NONE, 16, StepLoad.decodes(4, 100), False),
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

    assert alone.covers(NONE, 8, StepLoad.decodes(8, 100))
    assert alone.covers(NONE, 8, StepLoad().chunk(8))
    assert not alone.covers(NONE, 8, StepLoad.decodes(4, 100).chunk(4))


def test_least_device_seconds():
    """
    The least time is that of the fastest mode that was measured with such work, padded or not.
    """
    decodes, mixed = StepLoad.decodes(4, 100), StepLoad.decodes(4, 100).chunk(4)
    eager = CALIBRATION.times(NONE, 4, decodes).device_seconds
    slow = attrs.evolve(
        CALIBRATION, passes={"NONE": EAGER, "FULL": attrs.evolve(GRAPHS, corrections={4: 3.0, 8: 0.5})}
    )

    assert CALIBRATION.least_device_seconds(4, decodes) == pytest.approx(0.5 * eager)
    assert CALIBRATION.least_device_seconds(8, mixed) == CALIBRATION.times(NONE, 8, mixed).device_seconds
    assert slow.least_device_seconds(4, decodes) == slow.times(FULL, 8, decodes).device_seconds
    assert slow.least_device_seconds(9, decodes) == slow.times(FULL, 9, decodes).device_seconds


def test_check_model():
    """
    The model that was measured is accepted under any name; another one is named with what differs.
    """
    CALIBRATION.check_model(attrs.evolve(QWEN, name="mine"))
    with pytest.raises(ConfigError) as excinfo:
        CALIBRATION.check_model(attrs.evolve(QWEN, name="other", num_layers=27, kv_bytes_per_token=1.5))

    assert str(excinfo.value) == (
        "'device' must be a calibration of the model that is compared, "
        "other (num_layers 27, kv_bytes_per_token 1.5): it is of tiny "
        "(num_layers 28, kv_bytes_per_token 57344); calibrate with that model"
    )


@pytest.mark.parametrize("field", MODEL_FIELDS)
def test_every_field_tells_models_apart(field):
    """
    One number that differs is enough.
    """
    experts = attrs.evolve(QWEN, num_experts=8, experts_per_token=2)
    calibration = attrs.evolve(CALIBRATION, num_experts=8, experts_per_token=2)
    calibration.check_model(experts)

    with pytest.raises(ConfigError, match=field):
        calibration.check_model(attrs.evolve(experts, **{field: getattr(experts, field) + 1}))


def test_step_cost():
    """
    A dispatcher can decide by it.
    """
    every = attrs.evolve(CALIBRATION, passes={mode.name: EAGER for mode in RuntimeMode})

    assert step_cost(every, [4, 8]).seconds(FULL, 4) == every.times(FULL, 4, StepLoad()).seconds


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
        ({"format": 3}, "'format' must be 2: 3; calibrate again"),
        ({"passes": {}, "points": ()}, "'passes' must hold NONE, and no mode but NONE, PIECEWISE, FULL: []"),
        (
            {"passes": {"NONE": EAGER, "FASTEST": EAGER}},
            "'passes' must hold NONE, and no mode but NONE, PIECEWISE, FULL: ['FASTEST']",
        ),
        ({"num_layers": 0}, "'num_layers' must be from 1 to 1e+15: 0"),
        ({"kv_bytes_per_token": float("nan")}, "'kv_bytes_per_token' must be from 1 to 1e+15: nan"),
        ({"num_experts": -1}, "'num_experts' must be from 0 to 1e+15: -1"),
        ({"experts_per_token": 2}, "'experts_per_token' must be from 0 to 0: 2"),
        ({"prepare": (1.0,)}, "'prepare' must be 4 numbers from 0 to 1e+15: [1.0]"),
        ({"sample": (1, -1, 0, 0)}, "'sample' must be 4 numbers from 0 to 1e+15: [1, -1, 0, 0]"),
        ({"left_out": {"why": -1}}, "'left_out' must be 2 numbers from 0 to 1e+15: [2, -1]"),
        ({"errors": {"pass": {"mean": 1.0}}}, "'errors.pass' must have max, mean, p95, points: ['mean']"),
        (
            {"errors": {"pass": {"points": 1, "mean": 1, "p95": float("nan"), "max": 2}}},
            "'errors.pass' must be 4 numbers from 0 to 1e+15: [1, 1, nan, 2]",
        ),
        (
            {"points": (attrs.evolve(POINT, mode="PIECEWISE"),)},
            "'points.0.mode' must be one of NONE, FULL: 'PIECEWISE'",
        ),
    ],
)
def test_contradictions(change, message):
    """
    Numbers that no calibration writes are named.
    """
    with pytest.raises(ConfigError) as excinfo:
        attrs.evolve(CALIBRATION, **change)

    assert f"{message} @ calibration of tiny" == str(excinfo.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"knots": ()},
            "'NONE.token_coefficients' must be 3 numbers from 0 to 1e+15: [0.001, 1e-05, 2e-05, 0.0]",
        ),
        ({"knots": (-8,)}, "'NONE.knots' must be ascending whole numbers > 0: [-8]"),
        ({"load_coefficients": ()}, "'NONE.load_coefficients' must be 6 numbers from 0 to 1e+15: []"),
        (
            {"host_coefficients": HOST},
            "'NONE.host_coefficients' must be 0 numbers from 0 to 1e+15: [0.0005, 1e-05, 0.0, 0.0]",
        ),
        ({"corrections": {4: 0.0}}, "'NONE.corrections' must be factors of 0.001 to 1000 by sizes > 0: {4: 0.0}"),
        ({"most": (1, 2)}, "'NONE.most' must be 6 numbers from 0 to 1e+15: [1, 2]"),
        (
            {"token_coefficients": (0.0,) * 4, "load_coefficients": (0.0,) * 6},
            "'NONE.token_coefficients' must give a pass of one token at least 1e-09 s: 0.0",
        ),
    ],
)
def test_contradictory_passes(change, message):
    """
    Fits that no measurement gives are named.
    """
    with pytest.raises(ConfigError) as excinfo:
        attrs.evolve(CALIBRATION, passes={"NONE": attrs.evolve(EAGER, **change)}, points=())

    assert f"{message} @ calibration of tiny" == str(excinfo.value)


def test_any_point():
    """
    A measurement that is no number is found wherever it stands.
    """
    for field in ("num_tokens", "num_steps", "prepare_seconds", "host_seconds", "sample_seconds", "spread"):
        with pytest.raises(ConfigError, match=r"'points\.0' must be 12 numbers from 0 to"):
            attrs.evolve(CALIBRATION, points=(attrs.evolve(POINT, **{field: float("nan")}),))


def altered(*path_and_value):
    """
    The file's text with another value at a path.
    """
    *path, last, value = path_and_value
    content = place = json.loads(CALIBRATION.dumps())
    for key in path:
        place = place[key]
    place[last] = value
    return json.dumps(content)


EAGER_AT = ("passes", "NONE")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "it must hold an object: []"),
        ("null", "it must hold an object: None"),
        ("[" * 100_000, "recursion"),
        ("{}", "'format' must be 2: None; calibrate again"),
        ('{"format": 1}', "'format' must be 2: 1; calibrate again"),
        ('{"format": 3, "colour": "red"}', "'format' must be 2: 3; calibrate again"),
        ('{"format": "2"}', "'format' must be 2: '2'; calibrate again"),
        ('{"format": 2.0}', "'format' must be 2: 2.0; calibrate again"),
        ('{"format": 2}', "'num_layers' is missing @ $"),
        (altered("colour", "red"), "colour @ $"),
        (altered("passes", 7), "must be an object: 7 @ $.passes"),
        (altered("prepare", "long"), "must be a list: 'long' @ $.prepare"),
        (altered("prepare", {}), "must be a list: {} @ $.prepare"),
        (altered("device", None), "must be a string: None @ $.device"),
        (altered("num_experts", "0"), "must be a whole number: '0' @ $.num_experts"),
        (altered("num_experts", False), "must be a whole number: False @ $.num_experts"),
        (altered("num_layers", 28.0), "must be a whole number: 28.0 @ $.num_layers"),
        (altered("host_is_device", "false"), "must be true or false: 'false' @ $.host_is_device"),
        (altered("host_is_device", 0), "must be true or false: 0 @ $.host_is_device"),
        (altered("prepare", [True, 0, 0, 0]), "must be a finite number: True @ $.prepare"),
        (altered("prepare", [1e308, 0, 0, 0]), "'prepare' must be 4 numbers from 0 to 1e+15: [1e+308,"),
        (altered("prepare", [10**400, 0, 0, 0]), "must be a finite number: 1000"),
        (altered("prepare", [float("nan"), 0, 0, 0]), "numbers must be finite: NaN"),
        (altered("errors", "pass", "mean", float("inf")), "numbers must be finite: Infinity"),
        (altered("points", 0, "device_seconds", float("nan")), "numbers must be finite: NaN"),
        (altered("points", 0, "device_seconds", -1.0), "'points.0' must be 12 numbers from 0 to 1e+15:"),
        (altered("points", 0, "load", "num_decodes", 1.5), "must be a whole number: 1.5 @ $.points"),
        (altered(*EAGER_AT, "knots", [8.5]), "must be a whole number: 8.5 @ $.passes"),
        (altered(*EAGER_AT, "knots", [0]), "'NONE.knots' must be ascending whole numbers > 0: [0]"),
        (
            altered("passes", "FULL", "corrections", {"4": 0.0}),
            "'FULL.corrections' must be factors of 0.001 to 1000 by sizes > 0: {4: 0.0}",
        ),
        (altered("passes", "FULL", "corrections", {"4.5": 1.0}), "must have whole numbers as keys: ['4.5']"),
        (altered(*EAGER_AT, "token_coefficients", [1e308] * 4), "'NONE.token_coefficients' must be 4 numbers"),
        (altered("passes", "NONE", None), "@ $.passes"),
    ],
)
def test_foreign_file(tmp_path, text, message):
    """
    A file that is broken or something else is one error, which names it, what is wrong and where.
    """
    path = written(tmp_path, text)

    with pytest.raises(ConfigError) as excinfo:
        Calibration.load(path)

    assert str(excinfo.value).startswith(f"{path} must be a file written by calibrate: ")
    assert message in str(excinfo.value)
    assert "\n" not in str(excinfo.value)


def test_whole_numbers_for_others(tmp_path):
    """
    A whole number is a number, where one is asked for.
    """
    read = Calibration.load(written(tmp_path, altered("prepare", [1, 0, 0, 0])))

    assert (1.0, 0.0, 0.0, 0.0) == read.prepare


def test_absent_file(tmp_path):
    """
    So is a file that is not there, or no text.
    """
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")

    for path in (tmp_path / "absent.json", binary):
        with pytest.raises(ConfigError, match="must be a file written by calibrate"):
            Calibration.load(path)
