"""How many drafts of a verification step are accepted."""

import numpy as np

MOST_DRAFTS = 16
"""Of a verification step."""


class Acceptance:
    """
    Each draft is accepted with the same probability, independently, up to the first that is not.

    It is the model of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023),
    section 3.1. What is drawn depends on the seed, the request and which of its verification steps it is, so that
    policies that are compared see the same luck.

    Args:
        rate: The probability, from 0 to 1.
        seed: Of the random numbers.
    """

    def __init__(self, rate: float, *, seed: int = 0) -> None:
        self.rate = rate
        self._seed = seed
        self._draws: dict[int, np.random.Generator] = {}

    def num_accepted(self, request: int, num_drafts: int) -> int:
        """
        Of *num_drafts* of the next verification step of *request*, those accepted.
        """
        if not num_drafts:
            return 0
        draws = self._draws.get(request)
        if draws is None:
            draws = self._draws[request] = np.random.default_rng((self._seed, request))
        # As many draws whatever the drafts, so that the next step's do not depend on this one's.
        rejected = np.flatnonzero(draws.random(MOST_DRAFTS)[:num_drafts] >= self.rate)
        return int(rejected[0]) if rejected.size else num_drafts
