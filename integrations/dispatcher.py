"""The dispatcher in the place of vLLM's."""

import functools
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import attrs
from vllm.config import CUDAGraphMode
from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG
from vllm.forward_context import BatchDescriptor as VllmBatchDescriptor
from vllm.lora.utils import get_captured_lora_counts
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from aclgraph_dispatch import (
    BackendTraits,
    Batch,
    BatchDescriptor,
    BatchKind,
    CapturePlan,
    Dispatcher,
    FullGraphs,
    RuntimeMode,
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

VLLM_MODE = {mode: CUDAGraphMode(mode.value) for mode in RuntimeMode}
"""vLLM's modes by ours."""
_MODE = {vllm_mode: mode for mode, vllm_mode in VLLM_MODE.items()}

_FULL_GRAPHS = {
    AttentionCGSupport.NEVER: FullGraphs.NEVER,
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: FullGraphs.SINGLE_TOKEN,
    AttentionCGSupport.UNIFORM_BATCH: FullGraphs.UNIFORM,
    AttentionCGSupport.ALWAYS: FullGraphs.RAGGED,
}


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


def default_cudagraph_mode(vllm_config: "VllmConfig") -> CUDAGraphMode:
    """
    The mode that vLLM will choose if nobody does.
    """
    mode: CUDAGraphMode = OPTIMIZATION_LEVEL_TO_CONFIG[vllm_config.optimization_level]["compilation_config"][
        "cudagraph_mode"
    ]
    return mode


def capture_plan(vllm_config: "VllmConfig", policy: str, *, is_chosen: bool = True) -> CapturePlan:
    """
    The graphs to capture for *vllm_config* under *policy*, by our configuration and vLLM's sizes.

    Args:
        vllm_config: Of the engine.
        policy: A name in `POLICIES`.
        is_chosen: Whether somebody chose vLLM's sizes.

    Raises:
        ConfigError: A configured size can never be filled.
    """
    config = DispatchConfig.load(vllm_config.additional_config)
    compilation = vllm_config.compilation_config
    return config.capture_plan(
        policy,
        compilation.cudagraph_capture_sizes or (),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        query_len=1 + vllm_config.num_speculative_tokens,
        lora_cases=lora_cases(vllm_config),
        is_chosen=is_chosen,
    )


def query_lens(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """
    Tokens of a uniform decode, ascending: 1 + k, and those that steps with fewer drafts commonly have.

    These are every k of a dynamic schedule, and none where drafts are looked up in the prompt, often in vain.
    Ranks that vote must have graphs of one length.
    """
    num_drafts = vllm_config.num_speculative_tokens
    speculative = vllm_config.speculative_config
    fewer: set[int] = set()
    if speculative is not None and vllm_config.parallel_config.data_parallel_size == 1:
        if speculative.method == "ngram":
            fewer = {0}
        if speculative.uses_dynamic_speculative_decoding():
            schedule = build_dynamic_sd_schedule_lookup(
                speculative.num_speculative_tokens_per_batch_size,
                vllm_config.scheduler_config.max_num_seqs,
                num_drafts,
            )
            fewer |= set(schedule[1:])
    return tuple(1 + k for k in sorted({*fewer, num_drafts}))


def lora_cases(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """
    The numbers of active adapters that vLLM captures graphs for.

    Without `cudagraph_specialize_lora` that is one case for all steps, those of the base model alone among them.
    """
    lora = vllm_config.lora_config
    if lora is None:
        return (0,)
    if not vllm_config.compilation_config.cudagraph_specialize_lora:
        return (lora.max_loras + 1,)
    return (0, *get_captured_lora_counts(lora.max_loras, lora.specialize_active_lora))


def backend_traits(vllm_config: "VllmConfig", support: Iterable[AttentionCGSupport]) -> BackendTraits:
    """
    What the attention backends of a model can do together, by the *support* for graphs that each declares.
    """
    return BackendTraits(
        full_graphs=_FULL_GRAPHS[min(support, key=lambda s: s.value, default=AttentionCGSupport.ALWAYS)],
        # A recurrent state is carried on differently when a prompt is extended.
        extend_equals_decode=not vllm_config.model_config.has_inner_state,
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
def descriptor_of(mode: RuntimeMode, descriptor: VllmBatchDescriptor, role: str = "target") -> BatchDescriptor:
    """
    Our descriptor for vLLM's, which does not say whose graphs are meant.
    """
    return BatchDescriptor(
        mode,
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.num_tokens // descriptor.num_reqs if descriptor.uniform and descriptor.num_reqs else None,
        descriptor.num_active_loras,
        role,
    )


class DispatchCudagraphDispatcher(CudagraphDispatcher):
    """
    Answers vLLM's questions from our table.

    The runner asks the `core` itself, with classified batches. Who asks through vLLM's method, a drafter for one,
    says whether the tokens are a uniform decode, and is believed: there is no request whose state could tell.

    Args:
        vllm_config: Of the engine.
        role: Whose graphs: "target", or "draft" for a drafter, whose mode vLLM chooses.
    """

    def __init__(self, vllm_config: "VllmConfig", role: str = "target") -> None:
        super().__init__(vllm_config)
        self.role = role
        self.traits = BackendTraits()
        """Of the attention backends; to be set before the keys are initialised."""
        self.cores: dict[int, Dispatcher] = {}
        """By the query length of their FULL graphs, the longest last; the same PIECEWISE graphs belong to all."""

    @property
    def core(self) -> Dispatcher | None:
        """
        The dispatcher of the longest query length; None before the keys are initialised.
        """
        return self.cores.get(max(self.cores, default=0))

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        self.cudagraph_mode = cudagraph_mode
        config = DispatchConfig.load(self.vllm_config.additional_config)
        policy = policy_of(cudagraph_mode, config if self.role == "target" else DispatchConfig())
        plan = capture_plan(self.vllm_config, policy)
        for query_len in query_lens(self.vllm_config) if self.role == "target" else (uniform_decode_query_len,):
            counts = {size // uniform_decode_query_len for size in plan.full_sizes}
            if self._most_requests(uniform_decode_query_len) in counts:
                # Shorter decodes are covered as well as the longest.
                counts.add(self._most_requests(query_len))
            plan_of_length = attrs.evolve(plan, full_sizes=[n * query_len for n in sorted(counts)])
            self.cores[query_len] = Dispatcher(
                plan_of_length,
                policy=policy,
                query_len=query_len,
                max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
                traits=self.traits,
                role=self.role,
            )
            for descriptor in plan_of_length.descriptors(query_len=query_len, role=self.role):
                self.add_cudagraph_key(VLLM_MODE[descriptor.mode], vllm_descriptor(descriptor))
        self.keys_initialized = True

    def _most_requests(self, query_len: int) -> int:
        scheduler = self.vllm_config.scheduler_config
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // query_len)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: AbstractSet[CUDAGraphMode] | None = None,
        invalid_modes: AbstractSet[CUDAGraphMode] | None = None,
    ) -> tuple[CUDAGraphMode, Any]:
        if self.core is None or num_tokens == 0:
            return CUDAGraphMode.NONE, VllmBatchDescriptor(num_tokens)
        allowed = None
        if valid_modes is not None or invalid_modes is not None:
            modes = (valid_modes or frozenset(_MODE)) - (invalid_modes or frozenset())
            allowed = frozenset(_MODE[mode] for mode in modes if mode in _MODE)

        batch = stateless_batch(num_tokens, self.core.query_len, uniform_decode, num_active_loras)
        [part] = self.core.dispatch(batch, allowed).parts
        return VLLM_MODE[part.mode], vllm_descriptor(part.descriptor)


def stateless_batch(num_tokens: int, query_len: int, uniform_decode: bool, num_active_loras: int = 0) -> Batch:
    """
    The batch of a dummy run or a drafter, by its shape; a last request may be short of tokens.
    """
    num_reqs = -(-num_tokens // query_len)
    kind = BatchKind.UNIFORM_DECODE if uniform_decode else BatchKind.PREFILL
    return Batch(kind, num_reqs, num_tokens, 0, query_len, num_active_loras)


@functools.lru_cache(maxsize=4096)
def vllm_descriptor(descriptor: BatchDescriptor) -> VllmBatchDescriptor:
    """
    vLLM's descriptor for ours; the role is not in it, for each model has its own wrappers.
    """
    return VllmBatchDescriptor(
        num_tokens=descriptor.num_tokens,
        num_reqs=descriptor.num_reqs,
        uniform=descriptor.query_len is not None,
        has_lora=descriptor.num_active_loras > 0,
        num_active_loras=descriptor.num_active_loras,
    )
