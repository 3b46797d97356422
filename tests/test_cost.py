"""How long a step takes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch import RuntimeMode, StepCost
from aclgraph_dispatch.errors import ConfigError, DispatchError

from .strategies import MAX_SIZE, costs

NONE, PIECEWISE, FULL = RuntimeMode

ONE_POINT = {8: 1.0}


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [
        # As measured, whatever the order of the points.
        (2, 1.0),
        (4, 3.0),
        (12, 1.0),
        # In between, in proportion.
        (3, 2.0),
        (6, 2.5),
        (10, 1.5),
        # Outside, like the nearest.
        (1, 1.0),
        (13, 1.0),
        (8192, 1.0),
    ],
)
def test_seconds(num_tokens, seconds):
    """
    The time of a measured size is the measured one, of others that of their neighbours.
    """
    cost = StepCost({NONE: ONE_POINT, PIECEWISE: {12: 1.0, 2: 1.0, 4: 3.0}, FULL: ONE_POINT})

    assert seconds == cost.seconds(PIECEWISE, num_tokens)


def test_modes_are_apart():
    """
    Every mode has its own times.
    """
    cost = StepCost({NONE: {8: 3}, PIECEWISE: {8: 2}, FULL: {8: 1}})

    assert [cost.seconds(mode, 8) for mode in RuntimeMode] == [3, 2, 1]


@given(costs, st.sampled_from(RuntimeMode), st.integers(1, 2 * MAX_SIZE))
def test_within_the_measured(cost, mode, num_tokens):
    """
    No time is predicted that is shorter or longer than any measured.
    """
    measured = [seconds for _, seconds in cost.measured[mode]]

    assert min(measured) <= cost.seconds(mode, num_tokens) <= max(measured)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "'measured' must hold points for NONE: []"),
        ({NONE: ONE_POINT, PIECEWISE: ONE_POINT}, "'measured' must hold points for FULL: ['NONE', 'PIECEWISE']"),
        (
            {NONE: ONE_POINT, PIECEWISE: {}, FULL: ONE_POINT},
            "'measured' must hold points for PIECEWISE: ['FULL', 'NONE', 'PIECEWISE']",
        ),
        ({NONE: {0: 1.0}}, "'measured' must map tokens >= 1 to seconds > 0: NONE 0: 1.0"),
        ({NONE: {1: 1.0, 2: 0}}, "'measured' must map tokens >= 1 to seconds > 0: NONE 2: 0"),
        ({NONE: {1: -1.0}}, "'measured' must map tokens >= 1 to seconds > 0: NONE 1: -1.0"),
        ({NONE: {1: math.inf}}, "'measured' must map tokens >= 1 to seconds > 0: NONE 1: inf"),
        ({NONE: {1: math.nan}}, "'measured' must map tokens >= 1 to seconds > 0: NONE 1: nan"),
    ],
)
def test_wrong_points(measured, message):
    """
    A mode without times, and times that no pass can take, are named.
    """
    with pytest.raises(ConfigError) as excinfo:
        StepCost(measured)

    assert message == str(excinfo.value)
    assert isinstance(excinfo.value, DispatchError)


def test_equal_times():
    """
    Between equal times there is no other.
    """
    cost = StepCost({NONE: {1: 0.1, 50: 0.1}, PIECEWISE: ONE_POINT, FULL: ONE_POINT})

    assert {0.1} == {cost.seconds(NONE, num_tokens) for num_tokens in range(1, 52)}
