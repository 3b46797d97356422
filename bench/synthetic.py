"""
Seeded request traces, for machines that have no recorded ones and for loads that nobody recorded.

Gaps between arrivals are gamma distributed: with a coefficient of variation of 1 they are a Poisson process, above
it arrivals come in bursts. Lengths are lognormal, optionally with a heavy tail: a share of them is Pareto
distributed from some length on. All are drawn independently, and no two prompts share a prefix.

The presets are fitted to the five-minute samples of public traces that the project's tests compare them with:

- rate: requests per second of the sample;
- burstiness: the square root of the index of dispersion of counts in windows of 15 s, which for gamma gaps tends
  to their coefficient of variation (Cox and Lewis, "The Statistical Analysis of Series of Events", 1966), and is
  blind to the 3 s steps of Mooncake's clock; 1 where it is below;
- lengths: sigma from the logarithms of lengths; where there is a tail, it starts at the ninetieth percentile, with
  alpha by maximum likelihood, and sigma is of those below; the longest is the sample's; the median such that the
  mean is the sample's.

A lognormal has one mode. The samples have more (chats beside programs), so shapes differ: the largest distance
between the distribution functions of preset and sample is 0.05 to 0.24 for prompts and 0.05 to 0.30 for outputs.
"""

import attrs
import numpy as np
import numpy.typing as npt

from .traces import TraceRequest

_positive = attrs.validators.gt(0.0)


@attrs.frozen
class Lengths:
    """
    A distribution of lengths in tokens.

    Args:
        median: Of the lognormal body.
        sigma: Standard deviation of its logarithms.
        longest: Longer ones are cut to this.
        tail_share: Share of lengths drawn from the tail instead.
        tail_start: Where the tail starts.
        tail_alpha: Its exponent; the chance to exceed x falls as x^-alpha, up to the longest.
    """

    median: float = attrs.field(validator=attrs.validators.ge(1.0))
    sigma: float = attrs.field(validator=attrs.validators.ge(0.0))
    longest: int = attrs.field(validator=attrs.validators.ge(1))
    tail_share: float = attrs.field(default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    tail_start: float = attrs.field(default=1.0, validator=attrs.validators.ge(1.0))
    tail_alpha: float = attrs.field(default=1.0, validator=_positive)

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """
        Draw *count* lengths, each at least 1.
        """
        lengths = rng.lognormal(np.log(self.median), self.sigma, count)
        if self.tail_share:
            is_tail = rng.random(count) < self.tail_share
            # The inverse of the distribution function of a Pareto law that ends at the longest length.
            beyond = (self.tail_start / self.longest) ** self.tail_alpha
            quantiles = rng.random(count)
            tail = self.tail_start * (1 - quantiles * (1 - beyond)) ** (-1 / self.tail_alpha)
            lengths = np.where(is_tail, tail, lengths)
        return np.clip(lengths.round(), 1, self.longest).astype(np.int64)


@attrs.frozen
class Preset:
    """
    A load.

    Args:
        source: Whose moments these are.
        rate: Requests per second.
        burstiness: Coefficient of variation of the gaps between arrivals; 1 is a Poisson process.
        prompts: Lengths of prompts.
        outputs: Lengths of what is generated.
    """

    source: str
    rate: float = attrs.field(validator=_positive)
    burstiness: float = attrs.field(validator=_positive)
    prompts: Lengths
    outputs: Lengths


PRESETS = {
    "azure-conv": Preset(
        "Azure LLM inference trace 2023, conversation (CC-BY-4.0)",
        rate=5.48,
        burstiness=1.0,
        prompts=Lengths(550, 0.987, 6122),
        outputs=Lengths(155.5, 0.814, 1000),
    ),
    "azure-code": Preset(
        "Azure LLM inference trace 2023, code (CC-BY-4.0)",
        rate=2.9,
        burstiness=8.9,
        prompts=Lengths(1159, 1.338, 7437),
        outputs=Lengths(13, 0.552, 1276, tail_share=0.1, tail_start=54, tail_alpha=1.29),
    ),
    "mooncake-conv": Preset(
        "Mooncake conversation trace, FAST 2025 (Apache-2.0), its cache hits left out",
        rate=3.06,
        burstiness=1.7,
        prompts=Lengths(6860, 1.205, 121_924),
        outputs=Lengths(168, 1.349, 2000),
    ),
    "servegen-r1": Preset(
        "ServeGen, DeepSeek-R1 (Apache-2.0)",
        rate=2.01,
        burstiness=1.4,
        prompts=Lengths(218, 1.145, 33_508, tail_share=0.1, tail_start=940, tail_alpha=0.62),
        outputs=Lengths(560, 0.541, 11_784, tail_share=0.1, tail_start=1498, tail_alpha=3.47),
    ),
    "sharegpt": Preset(
        "300 ShareGPT requests, lengths in Llama 3.1's tokens (MIT), at 10 requests per second",
        rate=10.0,
        burstiness=1.0,
        prompts=Lengths(737, 0.55, 3998),
        outputs=Lengths(645, 0.15, 1021),
    ),
}


def synthetic_requests(preset: Preset, num_requests: int, *, seed: int = 0) -> tuple[TraceRequest, ...]:
    """
    Requests of a load; the same seed gives the same ones.
    """
    rng = np.random.default_rng(seed)
    shape = preset.burstiness**-2
    arrivals = np.cumsum(rng.gamma(shape, 1 / (shape * preset.rate), num_requests))
    prompts = preset.prompts.draw(rng, num_requests)
    outputs = preset.outputs.draw(rng, num_requests)
    return tuple(map(TraceRequest, arrivals.tolist(), prompts.tolist(), outputs.tolist()))


def conversation(num_requests: int, *, seed: int = 0) -> tuple[TraceRequest, ...]:
    """
    Requests shaped like those of Azure's conversations.
    """
    return synthetic_requests(PRESETS["azure-conv"], num_requests, seed=seed)
