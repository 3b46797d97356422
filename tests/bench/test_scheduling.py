import numpy as np

from aclgraph_dispatch.bench.scheduling import ScheduledStep


def step() -> ScheduledStep:
    """
    A decode, a decode with two drafts, a chunk in the middle of a prompt, and the last one of another.
    """
    rows = [(1, 300, 301, 0, 200), (3, 50, 51, 2, 50), (16, 32, 128, 0, 128), (8, 8, 16, 0, 16)]
    scheduled, computed, known, drafts, prompt = np.array(rows, dtype=np.int32).T
    return ScheduledStep((4, 7, 8, 9), scheduled, computed, known, drafts, prompt)


def test_who_samples():
    """
    Decodes and finished prompts sample one token, an unfinished prompt none; drafts are not counted.
    """
    assert [1, 1, 0, 1] == step().num_sampled()
    assert 28 == step().num_tokens


def test_part_of_a_step():
    """
    A part holds the requests of its range and nothing else.
    """
    part = step().of_part((1, 3))

    assert (7, 8) == part.requests
    assert [3, 16] == part.num_scheduled.tolist()
    assert [1, 0] == part.num_sampled()
