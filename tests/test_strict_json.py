"""JSON taken for what it is; more of it where calibrations are read."""

import json
from collections.abc import Mapping

import attrs
import pytest

from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.strict_json import read_object, short, structured


@attrs.frozen
class Thing:
    """
    One of each.
    """

    name: str
    count: int
    share: float
    is_new: bool
    sizes: tuple[int, ...]
    factors: Mapping[int, float]


CONTENT = {"name": "a", "count": 3, "share": 1, "is_new": False, "sizes": [1, 2], "factors": {"4": 0.5}}


def test_right():
    """
    Values of the right kind are taken; whole numbers are numbers too, and keys are numbers in words.
    """
    assert Thing("a", 3, 1.0, False, (1, 2), {4: 0.5}) == structured(CONTENT, Thing)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("name", 1, "must be a string: 1"),
        ("count", True, "must be a whole number: True"),
        ("count", 3.0, "must be a whole number: 3.0"),
        ("count", (1 << 53) + 1, "must be a whole number: 9007199254740993"),
        ("share", "1", "must be a finite number: '1'"),
        ("share", float("inf"), "must be a finite number: inf"),
        ("is_new", 1, "must be true or false: 1"),
        ("sizes", {"1": 1}, "must be a list: {'1': 1}"),
        ("factors", [], "must be an object: []"),
        ("factors", {" 4": 1}, "must have whole numbers as keys: [' 4']"),
    ],
)
def test_wrong(field, value, rule):
    """
    Values of another kind are refused, never changed.
    """
    with pytest.raises(ConfigError) as excinfo:
        structured(CONTENT | {field: value}, Thing)

    assert f"{rule} @ $.{field}" == str(excinfo.value)


def test_all_at_once():
    """
    All that is wrong is said at once.
    """
    with pytest.raises(ConfigError) as excinfo:
        structured(CONTENT | {"name": None, "count": "3"}, Thing)

    assert "must be a string: None @ $.name; must be a whole number: '3' @ $.count" == str(excinfo.value)


def test_object(tmp_path):
    """
    An object is read; numbers in it must be finite.
    """
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(CONTENT))

    assert CONTENT == read_object(path)

    path.write_text('{"a": [-Infinity]}')
    with pytest.raises(ConfigError, match="numbers must be finite: -Infinity"):
        read_object(path)


def test_short():
    """
    A long value is cut.
    """
    assert "'a'" == short("a")
    assert 60 == len(short("a" * 1000))


@attrs.frozen
class Choosy:
    """
    A thing with a rule of its own.
    """

    count: int

    def __attrs_post_init__(self) -> None:
        if self.count > 3:
            raise ConfigError(f"'count' must be <= 3: {self.count}")


def test_rule_of_its_own():
    """
    A rule that the class itself has is told in its own words.
    """
    with pytest.raises(ConfigError, match="'count' must be <= 3: 4"):
        structured({"count": 4}, Choosy)
