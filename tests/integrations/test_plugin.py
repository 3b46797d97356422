"""The entry point, which every process of every vLLM on the machine calls."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.plugin import EMULATE, platform

PLATFORM = "aclgraph_dispatch.integrations.platform.EmulatedNpuPlatform"

# As vLLM does it: load by group, call, take a name or None.
CALL = """
import json, sys
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.platform_plugins", name="aclgraph_dispatch_emulated")
answer = plugin.load()()
print(json.dumps([answer, sorted({"torch", "vllm", "cattrs"} & sys.modules.keys())]))
"""


def test_one_entry_point() -> None:
    """
    We offer vLLM one platform, and none of the plugins that it loads unasked.
    """
    ours = [point for point in distribution("aclgraph-dispatch").entry_points if point.group.startswith("vllm.")]

    assert [(p.group, p.name) for p in ours] == [("vllm.platform_plugins", "aclgraph_dispatch_emulated")]


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("0", None), ("1", PLATFORM)])
def test_inert_unless_asked(value: str | None, expected: str | None) -> None:
    """
    Without the variable no platform is offered; with or without, neither torch nor vLLM is imported.
    """
    environment = {name: text for name, text in os.environ.items() if name != EMULATE}
    if value is not None:
        environment[EMULATE] = value
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True
    )

    assert [expected, []] == json.loads(done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize("value", ["yes", "true", "", "2", " 1"])
def test_neither_yes_nor_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Any other value is an error that shows it.
    """
    monkeypatch.setenv(EMULATE, value)

    with pytest.raises(ConfigError) as caught:
        platform()

    assert f"ACLGRAPH_DISPATCH_EMULATE must be 0 or 1: {value!r}" == str(caught.value)
