"""What vLLM finds through entry points; imports nothing heavy, and does nothing unless asked."""

import os

from aclgraph_dispatch.errors import ConfigError

EMULATE = "ACLGRAPH_DISPATCH_EMULATE"


def platform() -> str | None:
    """
    Offer the emulated NPU as vLLM's platform, if the environment asks for it.
    """
    value = os.environ.get(EMULATE, "0")
    if value not in ("0", "1"):
        # vLLM swallows what a platform plugin raises; our worker then refuses to start on the stock platform.
        raise ConfigError(f"{EMULATE} must be 0 or 1: {value!r}")
    return "aclgraph_dispatch.integrations.platform.EmulatedNpuPlatform" if value == "1" else None
