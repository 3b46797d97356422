"""How long a simulated step takes by a cost model; see `simulate.StepTimer`."""

import attrs

from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.cost_model import Cost, CostModel, StepLoad, StepTime
from aclgraph_dispatch.step_plan import Part, RuntimeMode

from .scheduling import ScheduledStep


def step_load(step: ScheduledStep) -> StepLoad:
    """
    What a cost model wants to know of a step besides its number of tokens.

    A decode with drafts reads its context once for all its tokens. A prompt's last token is a chunk of one.
    """
    num_reqs = len(step.requests)
    if not num_reqs:
        return StepLoad()
    is_decode = (step.num_computed >= step.num_prompt) & (step.num_scheduled - step.num_drafts == 1)
    num_decodes = int(is_decode.sum())
    if num_decodes == num_reqs:
        context = int(step.num_computed.sum()) + int(step.num_scheduled.sum())
        return StepLoad(num_decodes, context, num_sampled=num_reqs)
    context = int(step.num_computed[is_decode].sum()) + int(step.num_scheduled[is_decode].sum())
    chunks = step.num_scheduled[~is_decode].astype(float)
    pairs = float((chunks * (step.num_computed[~is_decode] + (chunks + 1) / 2)).sum())
    return StepLoad(num_decodes, context, int(chunks.sum()), pairs, num_reqs)


@attrs.frozen
class CostTimer:
    """
    Times from a cost model.

    Args:
        cost: The model.
    """

    cost: Cost

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        return self.cost.times(part.mode, part.num_padded_tokens, step_load(step))


@attrs.define
class CalibratedTimer:
    """
    Times from what was measured on a machine, and how many of them were beyond it.

    Args:
        cost: The calibration.
        num_steps: Steps timed so far.
        num_extrapolated: Those beyond what was measured.
    """

    cost: Calibration
    num_steps: int = 0
    num_extrapolated: int = 0

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        load = step_load(step)
        self.num_steps += 1
        self.num_extrapolated += not self.cost.covers(part.mode, part.num_padded_tokens, load)
        return self.cost.times(part.mode, part.num_padded_tokens, load)


@attrs.frozen
class OracleTimer:
    """
    Times of a device that never waits for its host, without padding: no step can be faster.

    Args:
        cost: The model, or what was measured.
    """

    cost: CostModel | Calibration

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        load, num_tokens = step_load(step), part.num_tokens or 1
        time = self.cost.times(RuntimeMode.NONE, num_tokens, load)
        device = time.device_seconds
        if isinstance(self.cost, Calibration):
            # What was measured of an eager pass may hold the host's launches.
            device = self.cost.least_device_seconds(num_tokens, load)
        return StepTime(0.0, 0.0, 0.0, 0.0, device, time.sample_seconds)
