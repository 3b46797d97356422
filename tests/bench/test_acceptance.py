import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench.acceptance import Acceptance


@given(st.floats(0, 1), st.integers(0, 2**32), st.integers(0, 1000), st.integers(0, 16))
def test_accepted_are_some_of_the_drafts(rate, seed, request, num_drafts):
    """
    Between none and all drafts are accepted.
    """
    assert 0 <= Acceptance(rate, seed=seed).num_accepted(request, num_drafts) <= num_drafts


def test_certain_rates():
    """
    Rate 0 accepts nothing, rate 1 everything.
    """
    assert [0] * 20 == [Acceptance(0.0).num_accepted(0, 3) for _ in range(20)]
    assert [3] * 20 == [Acceptance(1.0).num_accepted(0, 3) for _ in range(20)]


def test_mean_is_the_formula():
    """
    The mean number of accepted drafts is that of a truncated geometric distribution.
    """
    acceptance = Acceptance(0.7, seed=3)
    mean = np.mean([acceptance.num_accepted(i % 50, 3) for i in range(20_000)])

    assert abs(0.7 + 0.7**2 + 0.7**3 - mean) < 0.03


def test_luck_does_not_depend_on_the_company():
    """
    What a request draws depends on how often it was asked about, not on the others.
    """
    alone, together = Acceptance(0.5, seed=1), Acceptance(0.5, seed=1)
    of_one = [alone.num_accepted(7, 4) for _ in range(30)]
    of_many = [[together.num_accepted(i, 4) for i in (3, 7, 9)][1] for _ in range(30)]

    assert of_one == of_many
    assert of_one != [Acceptance(0.5, seed=2).num_accepted(7, 4) for _ in range(30)]


def test_luck_does_not_depend_on_the_number_of_drafts():
    """
    A step with fewer drafts does not change what the next ones draw; each request has luck of its own.
    """
    full, cut = Acceptance(0.6, seed=1), Acceptance(0.6, seed=1)
    of_full = [full.num_accepted(0, 3) for _ in range(30)]
    of_cut = [cut.num_accepted(0, 1 if i == 4 else 3) for i in range(30)]

    assert of_full[:4] + of_full[5:] == of_cut[:4] + of_cut[5:]
    assert of_full != [Acceptance(0.6, seed=1).num_accepted(i, 3) for i in range(30)]
    other = Acceptance(0.6, seed=1)
    assert of_full != [other.num_accepted(1, 3) for _ in range(30)]
