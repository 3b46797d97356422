"""How long a step takes, as far as it decides between graphs."""

from bisect import bisect_left
from collections.abc import Mapping
from math import inf

import attrs

from .errors import ConfigError
from .step_plan import RuntimeMode


def _points(
    measured: Mapping[RuntimeMode, Mapping[int, float]],
) -> Mapping[RuntimeMode, tuple[tuple[int, float], ...]]:
    return {mode: tuple(sorted(points.items())) for mode, points in measured.items()}


@attrs.frozen
class StepCost:
    """
    Seconds of a forward pass by mode and number of tokens, from measured points.

    Between two points the time is interpolated; outside them it is that of the nearest one, for nothing was
    measured there.

    Args:
        measured: Seconds by tokens after padding, for every mode; time need not grow with the tokens.

    Raises:
        ConfigError: A mode has no points, or a point is not positive.
    """

    measured: Mapping[RuntimeMode, tuple[tuple[int, float], ...]] = attrs.field(converter=_points)

    @measured.validator
    def _complete(self, _attribute: object, measured: Mapping[RuntimeMode, tuple[tuple[int, float], ...]]) -> None:
        for mode in RuntimeMode:
            if not measured.get(mode):
                raise ConfigError(
                    f"'measured' must hold points for {mode.name}: {sorted(m.name for m in measured)}"
                )
            for num_tokens, seconds in measured[mode]:
                if num_tokens < 1 or not 0 < seconds < inf:
                    raise ConfigError(
                        f"'measured' must map tokens >= 1 to seconds > 0: {mode.name} {num_tokens}: {seconds}"
                    )

    def seconds(self, mode: RuntimeMode, num_tokens: int) -> float:
        """
        Predicted seconds of a pass of *num_tokens* after padding.
        """
        points = self.measured[mode]
        i = bisect_left(points, (num_tokens, 0.0))
        if i == 0:
            return points[0][1]
        if i == len(points):
            return points[-1][1]
        (low, before), (high, after) = points[i - 1], points[i]
        return before + (after - before) * (num_tokens - low) / (high - low)
