"""Routing policies."""

import pytest

from aclgraph_dispatch import POLICIES, BatchKind, Reason, RuntimeMode
from aclgraph_dispatch.policy import KIND_OBSTACLES, modes_used

NONE, PIECEWISE, FULL = RuntimeMode


@pytest.mark.parametrize(
    ("policy", "modes"),
    [
        ("eager", set()),
        ("piecewise", {PIECEWISE}),
        ("full_decode_only", {FULL}),
        ("full_and_piecewise", {FULL, PIECEWISE}),
    ],
)
def test_modes_used(policy, modes):
    """
    A policy needs the graphs of the modes in its name, and no others.
    """
    assert modes == modes_used(POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_legal_policies(policy):
    """
    Eager is never listed, an empty batch has no mode, and a FULL graph is for decodes only.
    """
    for kind, modes in POLICIES[policy].items():
        assert kind is not BatchKind.EMPTY
        assert NONE not in modes
        assert len(set(modes)) == len(modes)
        assert kind in (BatchKind.UNIFORM_DECODE, BatchKind.RAGGED_DECODE) or FULL not in modes


@pytest.mark.parametrize("policy", POLICIES)
def test_ragged_like_uniform(policy):
    """
    Ragged decodes are wanted where uniform ones are: what bars them is the backend's or the batch's.
    """
    assert POLICIES[policy].get(BatchKind.UNIFORM_DECODE) == POLICIES[policy].get(BatchKind.RAGGED_DECODE)


def test_full_is_best():
    """
    Where a FULL graph may be used, it comes before PIECEWISE.
    """
    assert POLICIES["full_and_piecewise"][BatchKind.UNIFORM_DECODE] == (FULL, PIECEWISE)


def test_obstacles():
    """
    Each kind of batch that holds more than decodes is an obstacle of its own name.
    """
    kinds = {"MIXED": "MIXED", "PREFILL": "PREFILL"}

    assert {BatchKind[kind]: Reason[reason] for kind, reason in kinds.items()} == KIND_OBSTACLES


def test_policies_are_constants():
    """
    Nobody changes a policy under a running engine.
    """
    with pytest.raises(TypeError):
        POLICIES["mine"] = {}
    with pytest.raises(TypeError):
        POLICIES["eager"][BatchKind.MIXED] = (FULL,)
    with pytest.raises(TypeError):
        KIND_OBSTACLES[BatchKind.MIXED] = Reason.DISABLED
