"""Our whole decision, classification and dispatch, costs no more than vLLM's, whatever the batch."""

from statistics import median
from time import perf_counter
from typing import Any

import pytest

from .conftest import RATIOS
from .decisions import Decide, Step

ROUNDS = 51
DECISIONS = 200
"""In a round, which takes a millisecond: longer than a tick of the clock, shorter than what disturbs it."""

SIZES = (1, 8, 64, 256, 512)

OVERSIZED = "oversized"
LIMITS = {OVERSIZED: 4.0}
"""
The most that our time may be of vLLM's, if not 1. Of a step with more tokens than any graph has vLLM need not know
more. We say what it was, and whether its decodes could run apart; it takes many milliseconds.
"""


def steps(num_reqs: int) -> dict[str, Step]:
    """
    The kinds of step of *num_reqs* requests.
    """
    some = -(-num_reqs // 8)
    kinds = {
        "decodes": Step(num_reqs),
        "decodes, k = 3": Step(num_reqs, num_drafts=3),
        "ragged drafts, k = 3": Step(num_reqs, num_drafts=3, num_ragged=some),
        "decodes, 2 adapters": Step(num_reqs, num_adapters=2),
        "prefills": Step(num_reqs, num_chunks=num_reqs),
        OVERSIZED: Step(num_reqs, num_chunks=1, chunk=5000),
    }
    if num_reqs > 1:
        kinds["mixed"] = Step(num_reqs, num_chunks=some)
        kinds["mixed, k = 3"] = Step(num_reqs, num_drafts=3, num_chunks=some)
    return kinds


def seconds(decide: Decide) -> float:
    """
    The time that a round of decisions takes.
    """
    start = perf_counter()
    for _ in range(DECISIONS):
        decide()
    return perf_counter() - start


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param(kind, step, id=f"{kind}-{num_reqs}")
        for num_reqs in SIZES
        for kind, step in steps(num_reqs).items()
    ],
)
def test_costs_no_more(benchmark: Any, pytestconfig: pytest.Config, kind: str, step: Step) -> None:
    """
    The median ratio of rounds taken in pairs, one of vLLM's decision and then one of ours, is within its limit.
    """
    theirs, ours = step.decide_both()
    theirs(), ours()
    pairs: list[float] = []

    def round_of_theirs() -> None:
        pairs.append(seconds(theirs))

    benchmark.pedantic(seconds, args=(ours,), setup=round_of_theirs, rounds=ROUNDS, warmup_rounds=1)
    pairs = pairs[-ROUNDS:]
    own = benchmark.stats.stats.data
    ratio = median(mine / other for mine, other in zip(own, pairs, strict=True))

    microseconds = [1e6 * median(rounds) / DECISIONS for rounds in (pairs, own)]
    benchmark.extra_info.update(
        num_reqs=step.num_reqs, vllm_us=microseconds[0], ours_us=microseconds[1], ratio=ratio
    )
    pytestconfig.stash[RATIOS].append((kind, step.num_reqs, *microseconds, ratio))
    assert ratio <= LIMITS.get(kind, 1.0), f"ours takes {ratio:.2f} of vLLM's time"
