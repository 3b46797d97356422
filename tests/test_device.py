"""What a device takes for its work."""

import attrs
import pytest

from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.device import Device, LayerCost, device_constants
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import KINDS

ASCEND = Device.named("ascend-910b")


@pytest.mark.parametrize("name", catalogue("devices"))
def test_named(name):
    """
    A device of the catalogue is made of its constants, and knows every kind of layer.
    """
    device, found = Device.named(name), device_constants(name)
    numbers = {f: getattr(device, f) for f in attrs.fields_dict(Device) if f not in ("name", "layers")}
    for kind, layer in device.layers.items():
        numbers |= {f"layers.{kind}.{k}": v for k, v in attrs.asdict(layer).items() if k != "name"}

    assert numbers == {path: constant.value for path, constant in found.items()}
    assert set(KINDS) == set(device.layers)


def test_layers():
    """
    Of each kind of layer the device has its own costs.
    """
    assert ASCEND.layer("mla_moe").kernels == 47
    assert ASCEND.layer("dense").kernels == 17


def test_unknown_kind():
    """
    An unknown kind is answered with the known ones.
    """
    with pytest.raises(ConfigError) as excinfo:
        ASCEND.layer("mamba")

    assert f"'kind' must be one of {', '.join(KINDS)} on ascend-910b: 'mamba'" == str(excinfo.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_per_second": 0}, "'bytes_per_second' must be a finite number > 0: 0"),
        ({"sync_seconds": -1e-6}, "'sync_seconds' must be a finite number >= 0: -1e-06"),
        ({"roofline_exponent": 0.5}, "'roofline_exponent' must be a finite number >= 1: 0.5"),
    ],
)
def test_wrong_numbers(change, message):
    """
    Numbers that no device has are named.
    """
    with pytest.raises(ConfigError) as excinfo:
        attrs.evolve(ASCEND, **change)

    assert f"{message} @ Device 'ascend-910b'" == str(excinfo.value)


def test_wrong_layer():
    """
    So are those of layers.
    """
    with pytest.raises(ConfigError) as excinfo:
        LayerCost(
            name="dense", kernels=0, launch_seconds=1, device_seconds=1, piecewise_seconds=1, update_seconds=-1
        )

    assert str(excinfo.value) == (
        "'kernels' must be a finite number > 0: 0; 'update_seconds' must be a finite number >= 0: -1"
        " @ LayerCost 'dense'"
    )
