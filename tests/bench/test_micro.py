"""What the micro-benchmark compares: the same step decided twice."""

import pytest

from aclgraph_dispatch.bench.micro.decisions import MAX_NUM_SEQS, MAX_SIZE, Step


@pytest.mark.parametrize(
    ("step", "theirs", "ours"),
    [
        (Step(12), ("FULL", 16), ("FULL", 16)),
        (Step(MAX_NUM_SEQS), ("FULL", 512), ("FULL", 512)),
        (Step(12, num_drafts=3), ("FULL", 48), ("FULL", 48)),
        (Step(12, num_drafts=3, num_ragged=2), ("PIECEWISE", 48), ("FULL", 48)),
        (Step(12, num_adapters=2), ("FULL", 16), ("FULL", 16)),
        (Step(12, num_chunks=2), ("PIECEWISE", 32), ("PIECEWISE", 32)),
        (Step(12, num_drafts=3, num_chunks=2), ("PIECEWISE", 56), ("PIECEWISE", 56)),
        (Step(12, num_chunks=12), ("PIECEWISE", 96), ("PIECEWISE", 96)),
        (Step(12, num_chunks=1, chunk=MAX_SIZE), ("NONE", MAX_SIZE + 11), ("NONE", MAX_SIZE + 11)),
    ],
    ids=str,
)
def test_both_decide(step, theirs, ours):
    """
    Both look at the step that is meant, and answer as often as they are asked.
    """
    stock, own = step.decide_both()
    for _ in range(2):
        mode, descriptor = stock()
        [part] = own().parts

        assert theirs == (mode.name, descriptor.num_tokens)
        assert ours == (part.mode.name, part.num_padded_tokens)
