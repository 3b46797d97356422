"""What the dispatcher did: steps counted by route and reason."""

from collections import Counter, deque

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
    Counts in bounded memory, for there are only so many routes and reasons, and the last decisions in order.

    Args:
        num_recent: How many of the last decisions to keep.
    """

    def __init__(self, num_recent: int = 1024) -> None:
        self._recent: deque[tuple[StepPlan, bool]] = deque(maxlen=num_recent)
        self._parts: Counter[tuple[RuntimeMode, Reason]] = Counter()
        self._tokens: Counter[tuple[RuntimeMode, Reason]] = Counter()
        self._paddings: Counter[tuple[RuntimeMode, Reason]] = Counter()

    def observe(self, step_plan: StepPlan) -> None:
        """
        Count one step.
        """
        self._recent.append((step_plan, False))
        for part in step_plan.parts:
            key = part.mode, part.reason
            self._parts[key] += 1
            self._tokens[key] += part.num_tokens
            self._paddings[key] += part.num_paddings

    def observe_idle(self, step_plan: StepPlan) -> None:
        """
        Keep a step that is run only because other ranks run it: it is no step of this engine, so it is not
        counted.
        """
        self._recent.append((step_plan, True))

    def recent(self) -> tuple[tuple[StepPlan, bool], ...]:
        """
        The last decisions, oldest first, and whether each was an idle one.
        """
        return tuple(self._recent)

    def counts(self) -> tuple[RouteCount, ...]:
        """
        One row a route and reason, the most frequent first.
        """
        return tuple(
            RouteCount(*key, num_parts=n, num_tokens=self._tokens[key], num_paddings=self._paddings[key])
            for key, n in self._parts.most_common()
        )
