"""The emulated NPU as a vLLM platform: the CPU, with graphs."""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from aclgraph_dispatch.config import DispatchConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ATTENTION = "aclgraph_dispatch.integrations.attention."
_KEPT = (
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "mode",
    "cudagraph_mode",
    "splitting_ops",
    "backend",
    "ir_enable_torch_wrap",
)
"""What the CPU platform takes from the compilation configuration, having no graphs."""

_asked: dict[int, tuple[Any, bool]] = {}
"""
Of a compilation configuration that vLLM is completing, by its identity: the mode that was asked for, and whether
somebody chose sizes. Both are overwritten before we plan.
"""


class EmulatedNpuPlatform(CpuPlatform):
    """
    A CPU on which vLLM compiles piecewise, captures and replays as on a device.
    """

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "aclgraph_dispatch.integrations.acl_graph.ACLGraphWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "aclgraph_dispatch.integrations.communicator.EmulatedCommunicator"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        stock = super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        graphed = {
            "CPUAttentionBackend": _ATTENTION + "GraphedCPUAttentionBackend",
            "CPUMLABackend": _ATTENTION + "GraphedCPUMLABackend",
        }
        # Others (AMX MLA, say) declare no graph support: vLLM then lowers the mode and says so.
        return graphed.get(stock.rpartition(".")[2], stock)

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "aclgraph_dispatch.integrations.lora.GraphedPunicaWrapper"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        config = DispatchConfig.load(vllm_config.additional_config)
        compilation = vllm_config.compilation_config
        if vllm_config.model_config is None or vllm_config.model_config.enforce_eager:
            return
        # Before vLLM derives custom operators and IR settings from it, so that the same kernels run as eagerly.
        compilation.backend = "eager"
        # Nothing is compiled ahead of time for this backend, but vLLM would hash its whole configuration every
        # step to look for it, which takes several milliseconds.
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"
        # On by default with those operators; their classes are not imported on a CPU.
        compilation.pass_config.fuse_norm_quant = False
        compilation.pass_config.fuse_act_quant = False

        from .dispatcher import choose_cudagraph_mode, default_cudagraph_mode

        choose_cudagraph_mode(compilation, config)
        mode = compilation.cudagraph_mode
        if mode is None:
            mode = default_cudagraph_mode(vllm_config)
        is_chosen = bool(compilation.cudagraph_capture_sizes or compilation.max_cudagraph_capture_size)
        _asked[id(compilation)] = mode, is_chosen

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        from .compat import refuse_unsupported
        from .dispatcher import capture_plan, policy_of
        from .drafter import is_drafters

        compilation = vllm_config.compilation_config
        asked_mode, is_chosen = _asked.pop(id(compilation), (None, True))
        kept = {name: getattr(compilation, name) for name in _KEPT}
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is None or vllm_config.model_config.enforce_eager:
            return
        for name, value in kept.items():
            setattr(compilation, name, value)
        if is_drafters(vllm_config):
            # Made from the engine's, with the same compilation; that has been checked and planned.
            return
        refuse_unsupported(vllm_config)
        config = DispatchConfig.load(vllm_config.additional_config)
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.uses_dynamic_speculative_decoding():
            # vLLM takes FULL graphs away, for its have one number of drafts; of ours there are some for each.
            compilation.cudagraph_mode = asked_mode
        policy = policy_of(compilation.cudagraph_mode, config)
        plan = capture_plan(vllm_config, policy, is_chosen=is_chosen)
        sizes = sorted({*plan.full_sizes, *plan.piecewise_sizes})
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = sizes[-1] if sizes else 0
        # The worker plans again, from what it is sent: without this it would take one mode's sizes for the other.
        vllm_config.additional_config = DispatchConfig.pinned(vllm_config.additional_config, plan)
