"""The worker for the emulated NPU: `--worker-cls aclgraph_dispatch.integrations.cpu.DispatchWorker`."""

from typing import Any
from unittest.mock import patch

import torch
from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.workspace import init_workspace_manager

from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.errors import ConfigError

from .attention import trace_attention_operators
from .compat import refuse_unsupported
from .model_runner import DispatchMixin
from .platform import EmulatedNpuPlatform
from .plugin import EMULATE


class DispatchModelRunner(DispatchMixin, CPUModelRunner):
    """
    vLLM's CPU model runner, dispatching onto graphs of the emulated NPU.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        trace_attention_operators()
        self.install_dispatcher(vllm_config, NpuBackend(emulated, emulated.weak_ref_tensor))

    def dispatch_report(self) -> dict[str, Any]:
        return super().dispatch_report() | {"streams_held": emulated.device.streams_held}


class DispatchWorker(cpu_worker.CPUWorker):
    """
    vLLM's CPU worker with our model runner; under `enforce_eager`, vLLM's own.
    """

    def init_device(self) -> None:
        if self.model_config.enforce_eager:
            super().init_device()
            return
        if not isinstance(current_platform, EmulatedNpuPlatform):
            raise ConfigError(f"DispatchWorker runs on the emulated NPU: set {EMULATE}=1")
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
