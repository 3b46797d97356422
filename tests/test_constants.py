"""The catalogue: every number says what it is and where it comes from."""

import math

import attrs
import pytest

from aclgraph_dispatch.constants import MARKS, ZERO, Constant, catalogue, constants, entry, require_numbers
from aclgraph_dispatch.errors import ConfigError

EVERY = {
    (kind, name, path): constant
    for kind in ("models", "devices")
    for name in catalogue(kind)
    for path, constant in constants(entry(kind, name)).items()
}


@attrs.frozen
class Numbers:
    """
    Some of each kind.
    """

    name: str
    rate: float
    count: int
    share: float = attrs.field(default=0.0, metadata=ZERO)
    exponent: float = attrs.field(default=1.0, metadata={"least": 1})


@pytest.mark.parametrize("constant", EVERY.values(), ids=[".".join(path) for path in EVERY])
def test_every_constant(constant):
    """
    Each constant has a unit, a source and a mark.
    """
    assert constant.unit
    assert len(constant.source) > 3
    assert constant.mark in MARKS


@pytest.mark.parametrize("constant", EVERY.values(), ids=[".".join(path) for path in EVERY])
def test_nothing_is_no_measurement(constant):
    """
    What does not exist has no time, and nobody measured that.
    """
    assert constant.value or constant.mark != "measured"


def test_choices_are_guesses():
    """
    Where a source has a range, or says something else, the number is our choice: a guess.
    """
    chosen = {
        ("ascend-910b", "bytes_per_second"),
        ("ascend-910b", "full_attention_factor"),
        ("h200", "graph_launch_seconds"),
        ("h200", "layers.moe.launch_seconds"),
    }

    assert {"guessed"} == {EVERY["devices", *path].mark for path in chosen}


def test_nothing_unmarked():
    """
    No number of the catalogue stands outside of a constant, but for the configurations of models.
    """

    def bare(table, path=""):
        for key, value in table.items():
            if isinstance(value, dict) and key != "config" and "value" not in value:
                yield from bare(value, f"{path}{key}.")
            elif not isinstance(value, dict) and key != "base":
                yield f"{path}{key}"

    assert [] == [*bare(catalogue("models")), *bare(catalogue("devices"))]


def test_paths():
    """
    Constants are named by the way to them.
    """
    table = {
        "a": {"value": 1, "unit": "s", "source": "here", "mark": "guessed"},
        "b": {"c": 2, "d": {}},
        "base": "x",
    }

    assert {"a": Constant(1, "s", "here", "guessed")} == constants(table)
    assert {"b.a": Constant(1, "s", "here", "guessed")} == constants({"b": {"a": table["a"]}})


def test_base():
    """
    A device takes from its base what it does not say itself.
    """
    base, derived = entry("devices", "ascend-910b"), entry("devices", "ascend-910c")

    assert base["layers"] == derived["layers"]
    assert base["flops_per_second"] != derived["flops_per_second"]


def test_unknown_name():
    """
    An unknown name is answered with the known ones.
    """
    with pytest.raises(ConfigError) as excinfo:
        entry("devices", "a100")

    assert "'device' must be one of ascend-910b, ascend-910c, h200: 'a100'" == str(excinfo.value)


def test_numbers():
    """
    Positive numbers are accepted, zero where it may be.
    """
    require_numbers(Numbers("n", 0.1, 1))
    require_numbers(Numbers("n", 1, 1, share=0, exponent=1))


def test_wrong_numbers():
    """
    All numbers that break their rule are named at once.
    """
    with pytest.raises(ConfigError) as excinfo:
        require_numbers(Numbers("n", math.inf, True, share=-1, exponent=math.nan))

    assert str(excinfo.value) == (
        "'rate' must be a finite number > 0: inf; 'count' must be a finite number > 0: True; "
        "'share' must be a finite number >= 0: -1; 'exponent' must be a finite number >= 1: nan @ Numbers 'n'"
    )
