"""How long the passes of one mode take, as a sum of terms."""

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.cost_model import StepLoad
from aclgraph_dispatch.pass_fit import PassFit, correction, host_terms, load_terms, token_terms, weighted

PASS = PassFit(
    knots=(8, 16),
    token_coefficients=(1e-3, 0.0, 0.0, 0.0, 0.0),
    load_coefficients=(0.0,) * 6,
    corrections={4: 1.0},
    host_coefficients=(),
    least=1,
    most=(64, 16, 16000, 63, 5000, 16),
    has_mixed=True,
)
FACTORS = {4: 1.0, 8: 2.0, 16: 0.5}


def test_token_terms():
    """
    A constant, the tokens, how far they exceed the knots, the experts' share.
    """
    assert [1.0, 24, 20, 8, 0, 0.5] == token_terms(24, (4, 16, 64), 0.5)


@pytest.mark.parametrize(
    ("load", "terms"),
    [
        (StepLoad(), (0, 0.0, 0, 0.0, 0, 0.0)),
        (StepLoad(3, 300, num_sampled=3), (3, 300, 0, 0.0, 0, 0.0)),
        (StepLoad(0, 0, 8, 36, 1), (0, 0, 0, 0, 8, 36)),
        (StepLoad(3, 300, 8, 36, 4), (3, 300, 3, 300, 8, 36)),
    ],
)
def test_load_terms(load, terms):
    """
    Decodes and what they read count once more beside a prefill.
    """
    assert terms == load_terms(load)


def test_host_terms():
    """
    The host works for requests, and more for a prefill.
    """
    assert (1.0, 3, 0.0, 0) == host_terms(StepLoad.decodes(3, 100))
    assert (1.0, 4, 1.0, 8) == host_terms(StepLoad.decodes(3, 100).chunk(8))


def test_weighted():
    """
    Terms are multiplied and summed.
    """
    assert 11 == weighted((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("num_tokens", "factor"), [(4, 1.0), (8, 2.0), (16, 0.5), (5, 1.25), (12, 1.25), (1, 1.0), (99, 0.5)]
)
def test_correction(num_tokens, factor):
    """
    At a size it is that of the size, between two in proportion, outside that of the nearest.
    """
    assert factor == correction(FACTORS, num_tokens)
    assert 1.0 == correction({}, num_tokens)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10), min_size=1), st.integers(1, 100))
def test_correction_is_bounded(factors, num_tokens):
    """
    No factor is beyond those that are given.
    """
    assert (
        min(factors.values()) * (1 - 1e-9) <= correction(factors, num_tokens) <= max(factors.values()) * (1 + 1e-9)
    )


@pytest.mark.parametrize("knots", [(0, 8), (16, 8), (8, 8), (-8, 8), (8.5, 16), (True, 8), (8, 1 << 60)])
def test_wrong_knots(knots):
    """
    Knots are whole numbers that ascend.
    """
    assert [] == PASS.errors("FULL", has_host=False)
    assert [f"'FULL.knots' must be ascending whole numbers > 0: {list(knots)}"] == attrs.evolve(
        PASS, knots=knots
    ).errors("FULL", has_host=False)


@pytest.mark.parametrize("corrections", [{4: 0.0}, {0: 1.0}, {4: -1.0}, {4: math.nan}, {4: 1e308}])
def test_wrong_corrections(corrections):
    """
    Corrections are factors that a measurement may give.
    """
    assert [f"'FULL.corrections' must be factors of 0.001 to 1000 by sizes > 0: {corrections}"] == attrs.evolve(
        PASS, corrections=corrections
    ).errors("FULL", has_host=False)


def test_wrong_host():
    """
    The host has its own terms where it is not the device, and only there.
    """
    assert ["'FULL.host_coefficients' must be 4 numbers from 0 to 1e+15: []"] == PASS.errors("FULL", has_host=True)


def test_wrong_least():
    """
    At least one token was measured.
    """
    assert ["'FULL.least' must be > 0 and <= 1e+15: 0"] == attrs.evolve(PASS, least=0).errors(
        "FULL", has_host=False
    )


@pytest.mark.parametrize(
    ("load", "most", "has_mixed", "is_known"),
    [
        (StepLoad.decodes(3, 9), (8, 8, 80, 0, 0, 8), False, True),
        (StepLoad().chunk(8), (8, 8, 80, 0, 0, 8), False, False),
        (StepLoad().chunk(8), (8, 0, 0, 8, 36, 1), False, True),
        (StepLoad.decodes(3, 9), (8, 0, 0, 8, 36, 1), False, False),
        (StepLoad.decodes(3, 9).chunk(8), (8, 8, 80, 8, 36, 8), False, False),
        (StepLoad.decodes(3, 9).chunk(8), (8, 8, 80, 8, 36, 8), True, True),
    ],
)
def test_known_work(load, most, has_mixed, is_known):
    """
    Work is known of the kinds that were measured.
    """
    assert is_known == attrs.evolve(PASS, most=most, has_mixed=has_mixed).knows(load)
