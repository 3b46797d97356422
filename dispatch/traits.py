"""What an attention backend can do with graphs."""

import enum

import attrs


class FullGraphs(enum.Enum):
    """
    Which decodes the backend's FULL graphs replay; vLLM's `AttentionCGSupport` says the same of its backends.
    """

    NEVER = "never"
    """None: attention cannot be captured."""
    SINGLE_TOKEN = "single_token"
    """Decodes of one token each: nothing is verified in a FULL graph."""
    UNIFORM = "uniform"
    """Decodes of one length: others are padded to it."""
    RAGGED = "ragged"
    """Decodes of any lengths: these are parameters of a replay."""


@attrs.frozen
class BackendTraits:
    """
    What decides about a batch besides the policy.

    Args:
        full_graphs: Which decodes FULL graphs replay.
        extend_equals_decode: Whether computing the last token of a prompt is the same to attention as a decode:
            true where the KV cache is all the state there is, false for recurrent and hybrid models.
    """

    full_graphs: FullGraphs = FullGraphs.UNIFORM
    extend_equals_decode: bool = False
