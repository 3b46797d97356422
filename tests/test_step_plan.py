"""The answer to one step."""

import attrs
import pytest

from aclgraph_dispatch import BatchDescriptor, Part, Reason, RuntimeMode

FULL_8 = BatchDescriptor(RuntimeMode.FULL, 8, 2, 4)


def test_modes_order():
    """
    The modes have vLLM's values, so the smallest is what ranks can agree on.
    """
    assert [(mode.name, mode.value) for mode in RuntimeMode] == [("NONE", 0), ("PIECEWISE", 1), ("FULL", 2)]


@pytest.mark.parametrize(
    "change",
    [
        {"mode": RuntimeMode.PIECEWISE},
        {"num_tokens": 12},
        {"num_reqs": 4},
        {"query_len": 2},
        {"num_active_loras": 1},
        {"role": "eagle"},
    ],
)
def test_descriptor_is_the_whole_key(change):
    """
    Descriptors that differ in any field key different graphs.
    """
    graphs = {FULL_8: "full 8"}

    assert graphs[attrs.evolve(FULL_8)] == "full 8"
    assert attrs.evolve(FULL_8, **change) not in graphs


def test_descriptor_defaults():
    """
    Unless told otherwise a graph takes any requests, without adapters, of the target model.
    """
    expected = BatchDescriptor(
        RuntimeMode.PIECEWISE, 8, num_reqs=None, query_len=None, num_active_loras=0, role="target"
    )

    assert expected == BatchDescriptor(RuntimeMode.PIECEWISE, 8)


def test_no_graph_of_nothing():
    """
    A graph has at least one token.
    """
    with pytest.raises(ValueError, match="'num_tokens' must be >= 1: 0"):
        BatchDescriptor(RuntimeMode.PIECEWISE, 0)


def test_part_measures():
    """
    Paddings are what the graph has beyond the part's own tokens, wherever the part begins.
    """
    part = Part(RuntimeMode.FULL, FULL_8, requests=(3, 4), tokens=(12, 16), reason=Reason.PADDED)

    assert (part.num_tokens, part.num_padded_tokens, part.num_paddings) == (4, 8, 4)


def test_part_defaults():
    """
    Unless told otherwise drafts stay as they are, and nobody predicted the time.
    """
    part = Part(RuntimeMode.FULL, FULL_8, (0, 2), (0, 8), Reason.EXACT)

    assert Part(RuntimeMode.FULL, FULL_8, (0, 2), (0, 8), Reason.EXACT, pads_drafts=False, seconds=None) == part
