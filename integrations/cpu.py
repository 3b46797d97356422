"""The worker for the emulated NPU: `--worker-cls aclgraph_dispatch.integrations.cpu.DispatchWorker`."""

import os
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.workspace import init_workspace_manager

from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.errors import ConfigError

from .attention import trace_attention_operators
from .compat import refuse_unsupported
from .experts import hide_experts_from_compiler
from .model_runner import DispatchMixin
from .platform import EmulatedNpuPlatform
from .plugin import EMULATE

EXPLORE = "ACLGRAPH_DISPATCH_EXPLORE"


def explore_seed() -> int | None:
    """
    The seed of `ACLGRAPH_DISPATCH_EXPLORE`: every forward pass from the first on gets the next one.

    Raises:
        ConfigError: It is no integer.
    """
    value = os.environ.get(EXPLORE, "")
    if not value:
        return None
    if not value.isdecimal():
        raise ConfigError(f"{EXPLORE} must be an integer >= 0, the seed to explore from: {value!r}")
    return int(value)


class DispatchModelRunner(DispatchMixin, CPUModelRunner):
    """
    vLLM's CPU model runner, dispatching onto graphs of the emulated NPU.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        trace_attention_operators()
        self._explore_seed = explore_seed()
        self._synchronizations_before = 0
        self.install_dispatcher(vllm_config, NpuBackend(emulated, emulated.weak_ref_tensor))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.parallel_config.data_parallel_size > 1:
            hide_experts_from_compiler(self.compilation_config.static_forward_context)

    def capture_model(self) -> int:
        num_bytes = super().capture_model()
        self._synchronizations_before = emulated.hardware.host_synchronizations
        return num_bytes

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.NONE:
            # Compiled code only exists here to be cut into pieces; it runs the same kernels, but slower.
            context.skip_compiled = True
        # What reads the output next is no device operator here: CPU tensors are read without asking anyone. So the
        # emulation runs everything to its end, where a device has a data dependency.
        if self._explore_seed is None:
            output = super().run_forward(*args, **kwargs)
            emulated.hardware.drain()
            return output
        self._explore_seed += 1
        with emulated.explore(self._explore_seed, eager_operators=False):
            return super().run_forward(*args, **kwargs)

    def dispatch_report(self) -> dict[str, Any]:
        free, total = emulated.mem_get_info()
        return super().dispatch_report() | {
            "streams_held": emulated.hardware.streams_held,
            "graph_bytes": total - free,
            "host_synchronizations": emulated.hardware.host_synchronizations - self._synchronizations_before,
        }


class DispatchWorker(cpu_worker.CPUWorker):
    """
    vLLM's CPU worker with our model runner; under `enforce_eager`, vLLM's own.
    """

    def init_device(self) -> None:
        if self.model_config.enforce_eager:
            super().init_device()
            return
        if not isinstance(current_platform, EmulatedNpuPlatform):
            msg = (
                f"DispatchWorker runs on the emulated NPU, not on {type(current_platform).__name__}: {EMULATE} "
                f"must be 1: {os.environ.get(EMULATE)!r}; VLLM_PLUGINS, where set, must list "
                "aclgraph_dispatch_emulated"
            )
            raise ConfigError(msg)
        refuse_unsupported(self.vllm_config)
        # The stock worker builds its runner in here, by this name.
        with patch.object(cpu_worker, "CPUModelRunner", DispatchModelRunner):
            super().init_device()
        init_workspace_manager(self.device)

    def compile_or_warm_up_model(self) -> Any:
        if isinstance(self.model_runner, DispatchModelRunner):
            self.model_runner.capture_model()
        return super().compile_or_warm_up_model()

    def dispatch_report(self) -> dict[str, Any]:
        """
        For `collective_rpc`: what is captured and which routes were taken; empty under `enforce_eager`.
        """
        if not isinstance(self.model_runner, DispatchModelRunner):
            return {}
        return self.model_runner.dispatch_report()
