"""What the dispatcher did: steps counted by route and reason."""

from collections import Counter

import attrs

from .step_plan import Reason, RuntimeMode, StepPlan


@attrs.frozen
class RouteCount:
    """
    How often parts took one route for one reason, and how many tokens that were.
    """

    mode: RuntimeMode
    reason: Reason
    num_parts: int
    num_tokens: int
    num_paddings: int


class StepRecords:
    """
    Counts in bounded memory: there are only so many routes and reasons.
    """

    def __init__(self) -> None:
        self._parts: Counter[tuple[RuntimeMode, Reason]] = Counter()
        self._tokens: Counter[tuple[RuntimeMode, Reason]] = Counter()
        self._paddings: Counter[tuple[RuntimeMode, Reason]] = Counter()

    def observe(self, step_plan: StepPlan) -> None:
        """
        Count one step.
        """
        for part in step_plan.parts:
            key = part.mode, part.reason
            self._parts[key] += 1
            self._tokens[key] += part.num_tokens
            self._paddings[key] += part.num_paddings

    def counts(self) -> tuple[RouteCount, ...]:
        """
        One row a route and reason, the most frequent first.
        """
        return tuple(
            RouteCount(*key, num_parts=n, num_tokens=self._tokens[key], num_paddings=self._paddings[key])
            for key, n in self._parts.most_common()
        )
