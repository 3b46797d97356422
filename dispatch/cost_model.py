"""
How long a step takes, from the sizes of a model and the rates of a device.

Theory of operation
-------------------
Host and device work at the same time, and the step ends when both are done (costs.md 4.1):

    seconds = prepare + sync + max(host, device) + sample

The host launches every kernel of an eager pass, every piece of a PIECEWISE one, and a FULL one at once; where
attention has to be updated inside a FULL graph, it does so layer by layer beside the replay. The device reads the
weights and computes on the tokens, overlapping the two (a soft roofline), reads the KV cache of decodes, attends
in prefills, and talks to other ranks. Padding counts as tokens do: it is computed, and it is routed to experts.

Two terms are not in that formula. Decode attention beside a prefill takes longer than alone
(`Device.mixed_attention_factor`), and MLA's decode attention can be bound by computing instead of reading.
"""

from collections.abc import Iterable
from typing import Protocol

import attrs

from .capture_plan import CapturePlan
from .cost import StepCost
from .device import Device
from .errors import ConfigError
from .model_shape import ModelShape
from .step_plan import RuntimeMode

_NONE, _PIECEWISE, _FULL = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL


@attrs.frozen
class StepLoad:
    """
    What a step has to do besides its number of tokens. Nothing is checked here, for one is built every step.

    Args:
        num_decodes: Requests that decode.
        decode_context: Tokens of the KV cache that they read, summed.
        num_prefill_tokens: Tokens of prefill chunks.
        prefill_pairs: Queries times keys of the chunks, summed: chunk * before + chunk * (chunk + 1) / 2.
        num_sampled: Requests whose logits are computed; vLLM does so for every request of a step.
    """

    num_decodes: int = 0
    decode_context: float = 0.0
    num_prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    num_sampled: int = 0

    @classmethod
    def decodes(cls, num_decodes: int, context_tokens: float) -> "StepLoad":
        """
        Decodes alone, each of which reads *context_tokens*.
        """
        return cls(num_decodes, num_decodes * context_tokens, num_sampled=num_decodes)

    def chunk(self, num_tokens: int, num_before: int = 0) -> "StepLoad":
        """
        The same with one more prefill chunk of *num_tokens*, after *num_before* computed ones.
        """
        return StepLoad(
            self.num_decodes,
            self.decode_context,
            self.num_prefill_tokens + num_tokens,
            self.prefill_pairs + num_tokens * num_before + num_tokens * (num_tokens + 1) / 2,
            self.num_sampled + 1,
        )


@attrs.frozen
class StepTime:
    """
    How long the parts of a step take.

    Args:
        prepare_seconds: The scheduler and the inputs, as far as nothing hides them.
        sync_seconds: The host waits for the device before the pass.
        host_seconds: The host launches the pass; updates of attention included.
        update_seconds: The share of it that updates attention inside a FULL graph, beside the replay.
        device_seconds: The device runs the pass.
        sample_seconds: Tokens are sampled.
    """

    prepare_seconds: float
    sync_seconds: float
    host_seconds: float
    update_seconds: float
    device_seconds: float
    sample_seconds: float

    @property
    def seconds(self) -> float:
        """
        The whole step; host and device overlap.
        """
        longest = max(self.host_seconds, self.device_seconds)
        return self.prepare_seconds + self.sync_seconds + longest + self.sample_seconds


class Cost(Protocol):
    """
    Whatever predicts the time of a step.
    """

    def times(self, mode: RuntimeMode, num_tokens: int, load: StepLoad) -> StepTime:
        """
        Predict a step of *num_tokens* after padding.
        """


class CostModel:
    """
    Predicts steps of one rank of a model on a device.

    Args:
        model: The model, as one rank has it.
        device: The device and its host.
        async_scheduling: Whether the next step is prepared while one runs.
        is_greedy: Whether all requests are sampled greedily.

    Raises:
        ConfigError: The device knows nothing of this kind of model.
    """

    def __init__(
        self, model: ModelShape, device: Device, *, async_scheduling: bool = True, is_greedy: bool = False
    ) -> None:
        self.model = model
        self.device = device
        layer = device.layer(model.kind)
        layers = model.num_layers
        self._prepare = device.async_prepare_seconds if async_scheduling else device.sync_prepare_seconds
        self._sample = device.greedy_seconds if is_greedy else device.sample_seconds
        self._update = layers * layer.update_seconds
        self._host = {
            _NONE: layers * layer.kernels * layer.launch_seconds,
            _PIECEWISE: device.graph_launch_seconds + layers * layer.piecewise_seconds,
            _FULL: device.graph_launch_seconds + self._update,
        }
        self._layers = layers * layer.device_seconds
        self._flops = device.flops_per_second * (device.flops_factor_8bit if model.weight_bytes == 1 else 1)
        attention_flops = device.flops_per_second * device.attention_efficiency
        self._decode = max(
            model.kv_bytes_per_token / device.bytes_per_second, model.decode_pair_flops / attention_flops
        )
        self._prefill = model.prefill_pair_flops / attention_flops
        self._head = model.head_bytes / device.bytes_per_second
        self._head_token = model.head_flops / device.flops_per_second
        # By tokens after padding; there are as many entries as sizes of steps.
        self._linear: dict[int, float] = {}

    def times(self, mode: RuntimeMode, num_tokens: int, load: StepLoad) -> StepTime:
        """
        Predict a step.

        Args:
            mode: How it runs.
            num_tokens: Tokens after padding.
            load: What they are.
        """
        linear = self._linear.get(num_tokens)
        if linear is None:
            linear = self._linear[num_tokens] = self._linear_seconds(num_tokens)
        decode = self._decode * load.decode_context
        if mode is _FULL:
            decode *= self.device.full_attention_factor
        if load.num_decodes and load.num_prefill_tokens:
            decode *= self.device.mixed_attention_factor
        device = linear + decode + self._prefill * load.prefill_pairs
        sample = 0.0
        if load.num_sampled:
            device += max(self._head, self._head_token * load.num_sampled)
            sample = self._sample
        update = self._update if mode is _FULL else 0.0
        return StepTime(self._prepare, self.device.sync_seconds, self._host[mode], update, device, sample)

    def capture_seconds(self, plan: CapturePlan) -> float:
        """
        Time to capture all graphs of *plan*.
        """
        device = self.device
        seconds = (
            len(plan.full_sizes) * device.full_capture_seconds
            + len(plan.piecewise_sizes) * device.piecewise_capture_seconds
        )
        return seconds * len(plan.lora_cases)

    def capture_bytes(self, plan: CapturePlan) -> float:
        """
        Device memory of all graphs of *plan*.
        """
        num_sizes = len(plan.full_sizes) + len(plan.piecewise_sizes)
        return num_sizes * len(plan.lora_cases) * self.device.graph_bytes

    def _linear_seconds(self, num_tokens: int) -> float:
        model, device, exponent = self.model, self.device, self.device.roofline_exponent
        read = model.dense_bytes + model.expert_bytes * model.activated_share(num_tokens)
        reading = read / device.bytes_per_second
        computing = model.token_flops * num_tokens / self._flops
        longest, other = max(reading, computing), min(reading, computing)
        # The larger one is taken out, so that no power is too large or too small for a float.
        linear = longest * (1.0 + (other / longest) ** exponent) ** (1.0 / exponent)
        communication = (
            model.num_collectives * device.collective_seconds
            + model.collective_bytes_per_token * num_tokens / device.link_bytes_per_second
        )
        return float(self._layers + linear + communication)


def step_cost(cost: Cost, sizes: Iterable[int]) -> StepCost:
    """
    What a dispatcher needs to know of a cost: seconds by mode and size, of the tokens alone.

    A dispatcher knows neither the requests of a step nor their contexts, and they take their time in every mode; a
    guess about them for the padded size would have padding pay for contexts that nobody reads.

    Args:
        cost: What predicts the steps.
        sizes: Tokens after padding, captured or not; in between a dispatcher interpolates.

    Raises:
        ConfigError: There is no size, or one is below 1.
    """
    ascending = sorted(set(sizes))
    if not ascending or ascending[0] < 1:
        raise ConfigError(f"'sizes' must hold one or more integers >= 1: {ascending}")
    load = StepLoad()
    return StepCost({mode: {n: cost.times(mode, n, load).seconds for n in ascending} for mode in RuntimeMode})
