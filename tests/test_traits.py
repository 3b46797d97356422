"""What an attention backend can do with graphs."""

import attrs
import pytest

from aclgraph_dispatch import BackendTraits, FullGraphs


def test_defaults():
    """
    Unless told otherwise FULL graphs hold decodes of one length, and the last of a prompt is no decode.
    """
    assert BackendTraits(full_graphs=FullGraphs.UNIFORM, extend_equals_decode=False) == BackendTraits()


def test_constant():
    """
    What a backend can do is asked once: nobody changes it under a dispatcher that was built for it.
    """
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        BackendTraits().extend_equals_decode = True


def test_kinds_of_graphs():
    """
    From nothing to everything, in the order of vLLM's `AttentionCGSupport`.
    """
    assert [kind.name for kind in FullGraphs] == ["NEVER", "SINGLE_TOKEN", "UNIFORM", "RAGGED"]
