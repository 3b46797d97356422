"""What a kind of device takes for its work, and the host before it."""

from collections.abc import Mapping
from typing import Any

import attrs

from .constants import ZERO, Constant, constants, entry, require_numbers
from .errors import ConfigError


@attrs.frozen(kw_only=True)
class LayerCost:
    """
    What one layer of a kind of model takes besides its weights and its tokens.

    Args:
        name: The kind, `ModelShape.kind`.
        kernels: Kernels that are launched for it, eagerly.
        launch_seconds: Host time of one of them.
        device_seconds: Device time of all of them that does not depend on weights, tokens or context.
        piecewise_seconds: Host time of its graph and its eager attention, PIECEWISE.
        update_seconds: Host time of updating its attention in a FULL graph; 0 where nothing is updated.
    """

    name: str
    kernels: float
    launch_seconds: float
    device_seconds: float
    piecewise_seconds: float
    update_seconds: float = attrs.field(metadata=ZERO)

    def __attrs_post_init__(self) -> None:
        require_numbers(self)


@attrs.frozen(kw_only=True)
class Device:
    """
    A device and its host, as far as they decide how long a step takes.

    Args:
        name: Its name.
        memory_bytes: Memory of one device.
        bytes_per_second: What is really read of it.
        flops_per_second: What matrix products with 16-bit weights really reach.
        flops_factor_8bit: How much more they reach with 8-bit weights.
        attention_efficiency: The share of `flops_per_second` that attention reaches.
        roofline_exponent: Reading and computing overlap: (read^r + compute^r)^(1/r).
        full_attention_factor: Decode attention in a FULL graph, by eager.
        mixed_attention_factor: Decode attention beside a prefill, by decodes alone.
        collective_seconds: Time of a collective operation of no bytes.
        link_bytes_per_second: What a rank sends meanwhile.
        graph_launch_seconds: Host time to launch a graph, once a step.
        sync_seconds: Host time to synchronise before a step.
        async_prepare_seconds: Time between steps that nothing hides, with async scheduling.
        sync_prepare_seconds: The same without.
        sample_seconds: Time to sample by temperature, top-k and top-p.
        greedy_seconds: Time to sample greedily.
        full_capture_seconds: Time to capture a FULL graph.
        piecewise_capture_seconds: Time to capture the PIECEWISE graphs of one size.
        graph_bytes: Memory of the graphs of one size.
        layers: What a layer takes, by kind of model.
    """

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: float
    flops_factor_8bit: float
    attention_efficiency: float
    roofline_exponent: float = attrs.field(metadata={"least": 1})
    full_attention_factor: float
    mixed_attention_factor: float
    collective_seconds: float = attrs.field(metadata=ZERO)
    link_bytes_per_second: float
    graph_launch_seconds: float = attrs.field(metadata=ZERO)
    sync_seconds: float = attrs.field(metadata=ZERO)
    async_prepare_seconds: float = attrs.field(metadata=ZERO)
    sync_prepare_seconds: float = attrs.field(metadata=ZERO)
    sample_seconds: float = attrs.field(metadata=ZERO)
    greedy_seconds: float = attrs.field(metadata=ZERO)
    full_capture_seconds: float = attrs.field(metadata=ZERO)
    piecewise_capture_seconds: float = attrs.field(metadata=ZERO)
    graph_bytes: float = attrs.field(metadata=ZERO)
    layers: Mapping[str, LayerCost]

    def __attrs_post_init__(self) -> None:
        require_numbers(self)

    def layer(self, kind: str) -> LayerCost:
        """
        What a layer of *kind* takes.

        Raises:
            ConfigError: Nothing is known of this kind.
        """
        if kind not in self.layers:
            raise ConfigError(f"'kind' must be one of {', '.join(self.layers)} on {self.name}: {kind!r}")
        return self.layers[kind]

    @classmethod
    def named(cls, name: str) -> "Device":
        """
        A device of the catalogue.

        Raises:
            ConfigError: There is none of that name.
        """
        table = entry("devices", name)
        layers = {kind: LayerCost(name=kind, **_values(of_kind)) for kind, of_kind in table["layers"].items()}
        return cls(name=name, layers=layers, **_values(table))


def device_constants(name: str) -> dict[str, Constant]:
    """
    Every number of a device with its unit, source and mark, by the field's name; of layers, "layers.KIND.FIELD".

    Raises:
        ConfigError: There is none of that name.
    """
    return constants(entry("devices", name))


def _values(table: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: constant["value"]
        for key, constant in table.items()
        if isinstance(constant, Mapping) and "value" in constant
    }
