"""The dispatcher in the place of vLLM's."""

import functools
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor as VllmBatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from aclgraph_dispatch import (
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    Dispatcher,
    RuntimeMode,
    StepPlan,
)
from aclgraph_dispatch.config import DispatchConfig
from aclgraph_dispatch.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

POLICY_OF_MODE = {
    CUDAGraphMode.NONE: "eager",
    CUDAGraphMode.PIECEWISE: "piecewise",
    CUDAGraphMode.FULL_DECODE_ONLY: "full_decode_only",
    CUDAGraphMode.FULL_AND_PIECEWISE: "full_and_piecewise",
}
MODE_OF_POLICY = {policy: mode for mode, policy in POLICY_OF_MODE.items()}

_VLLM_MODE = {mode: CUDAGraphMode(mode.value) for mode in RuntimeMode}
_MODE = {vllm_mode: mode for mode, vllm_mode in _VLLM_MODE.items()}


def choose_cudagraph_mode(compilation: "CompilationConfig", config: DispatchConfig) -> None:
    """
    Set vLLM's `cudagraph_mode` to what the policy stands for.

    Raises:
        ConfigError: The user set both, and they differ.
    """
    if config.policy is None:
        return
    wanted = MODE_OF_POLICY[config.policy]
    if compilation.cudagraph_mode not in (None, wanted):
        msg = (
            f"'policy' and vLLM's 'cudagraph_mode' must agree: {config.policy!r} stands for {wanted.name}, "
            f"cudagraph_mode is {compilation.cudagraph_mode.name}; leave one of them out"
        )
        raise ConfigError(msg)
    compilation.cudagraph_mode = wanted


def capture_plan(vllm_config: "VllmConfig") -> CapturePlan:
    """
    The graphs to capture for *vllm_config*, by our configuration and vLLM's sizes.

    Raises:
        ConfigError: A configured size can never be filled, or vLLM cannot run the configured policy.
    """
    config = DispatchConfig.load(vllm_config.additional_config)
    compilation = vllm_config.compilation_config
    return config.capture_plan(
        policy_of(compilation.cudagraph_mode, config),
        compilation.cudagraph_capture_sizes or (),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        query_len=1 + vllm_config.num_speculative_tokens,
    )


def policy_of(mode: CUDAGraphMode, config: DispatchConfig) -> str:
    """
    The policy to run under vLLM's resolved *mode*.

    Raises:
        ConfigError: The user asked for a policy that vLLM, the model or its attention backend cannot run.
    """
    policy = POLICY_OF_MODE.get(mode)
    if policy is None:
        raise ConfigError(
            f"cudagraph_mode must be one of {', '.join(m.name for m in POLICY_OF_MODE)}: {mode.name}"
        )
    if config.policy not in (None, policy):
        msg = (
            f"'policy' {config.policy!r} cannot be run here: vLLM lowered cudagraph_mode to {mode.name} (its "
            f"log says why); use {policy!r}, or a backend or compilation mode that supports more"
        )
        raise ConfigError(msg)
    return policy


@functools.cache
def descriptor_of(mode: RuntimeMode, descriptor: VllmBatchDescriptor) -> BatchDescriptor:
    """
    Our descriptor for vLLM's.
    """
    return BatchDescriptor(
        mode,
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.num_tokens // descriptor.num_reqs if descriptor.uniform and descriptor.num_reqs else None,
        descriptor.num_active_loras,
    )


class DispatchCudagraphDispatcher(CudagraphDispatcher):
    """
    Answers vLLM's questions from our table.

    Of a real step the runner sets the classified `batch` beforehand. Without one (a dummy run, a capture) the
    caller's word on uniformity is taken: there is no request whose state could tell.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        super().__init__(vllm_config)
        self.batch: Batch | None = None
        self.step_plan: StepPlan | None = None
        """The last decision."""
        self.core: Dispatcher | None = None

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        self.cudagraph_mode = cudagraph_mode
        config = DispatchConfig.load(self.vllm_config.additional_config)
        plan = capture_plan(self.vllm_config)
        self.core = Dispatcher(
            plan,
            policy=policy_of(cudagraph_mode, config),
            query_len=uniform_decode_query_len,
            max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
        )
        for descriptor in plan.descriptors(query_len=uniform_decode_query_len):
            self.add_cudagraph_key(_VLLM_MODE[descriptor.mode], _vllm_descriptor(descriptor))
        self.keys_initialized = True

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: AbstractSet[CUDAGraphMode] | None = None,
        invalid_modes: AbstractSet[CUDAGraphMode] | None = None,
    ) -> tuple[CUDAGraphMode, Any]:
        if self.core is None:
            return CUDAGraphMode.NONE, VllmBatchDescriptor(num_tokens)
        batch = self.batch
        if batch is None:
            kind = BatchKind.UNIFORM_DECODE if uniform_decode else BatchKind.PREFILL
            batch = Batch(kind, num_tokens // self.core.query_len, num_tokens, 0, self.core.query_len)
        assert batch.num_tokens == num_tokens, (batch, num_tokens)
        allowed = None
        if valid_modes is not None or invalid_modes is not None:
            modes = (valid_modes or frozenset(_MODE)) - (invalid_modes or frozenset())
            allowed = frozenset(_MODE[mode] for mode in modes if mode in _MODE)

        self.step_plan = self.core.dispatch(batch, allowed)
        (part,) = self.step_plan.parts
        return _VLLM_MODE[part.mode], _vllm_descriptor(part.descriptor)


@functools.lru_cache(maxsize=4096)
def _vllm_descriptor(descriptor: BatchDescriptor) -> VllmBatchDescriptor:
    return VllmBatchDescriptor(
        num_tokens=descriptor.num_tokens,
        num_reqs=descriptor.num_reqs,
        uniform=descriptor.query_len is not None,
        has_lora=descriptor.num_active_loras > 0,
        num_active_loras=descriptor.num_active_loras,
    )
