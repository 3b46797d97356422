"""Seeded request traces, for machines that have no recorded ones."""

import numpy as np
import numpy.typing as npt

from .traces import TraceRequest

RATE = 5.5
"""Requests per second of the Azure LLM inference trace 2023 (conversation): 1644 in 300 s."""
PROMPT_MEAN, PROMPT_SIGMA = 876.0, 1.0
OUTPUT_MEAN, OUTPUT_SIGMA = 213.0, 0.8
"""Its mean lengths in tokens, and the standard deviations of their logarithms."""


def conversation(num_requests: int, *, seed: int = 0) -> tuple[TraceRequest, ...]:
    """
    Requests shaped like that trace: Poisson arrivals, lognormal lengths.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / RATE, num_requests))
    prompts = _lengths(rng, PROMPT_MEAN, PROMPT_SIGMA, num_requests)
    outputs = _lengths(rng, OUTPUT_MEAN, OUTPUT_SIGMA, num_requests)
    return tuple(
        TraceRequest(float(arrival), int(prompt), int(output))
        for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    )


def _lengths(rng: np.random.Generator, mean: float, sigma: float, count: int) -> npt.NDArray[np.int64]:
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    return np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).round()).astype(np.int64)
