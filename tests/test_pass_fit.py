"""How long the passes of one mode take, as a sum of terms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.cost_model import StepLoad
from aclgraph_dispatch.pass_fit import correction, host_terms, load_terms, token_terms, weighted

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
