"""
vLLM's own scheduler on a virtual clock: the reference that simulated steps are true to.

It is the very class that an engine uses (`vllm.v1.core.sched`), with the real block pool and prefix cache. What is
left out of the engine are the tokens' values: prompts are zeros, and the hash of a block is made from its number
(`SimulatedRequest.blocks`) instead of its content, so equal numbers share blocks as equal prefixes would.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .scheduling import Delivery, ScheduledStep, SchedulerSettings, SimulatedRequest

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 30,
    "vocab_size": 128,
    "torch_dtype": "float32",
}
"""Of a model that is never built: the scheduler only wants to know that it is an ordinary decoder."""

_SAMPLED = 1


class VllmScheduler:
    """
    The scheduler of vLLM, the asynchronous one where the settings say so; see `scheduling.Scheduler`.

    Drafts are an n-gram drafter's: they take no slots of a step and no blocks besides their own.

    Args:
        settings: Its settings.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.settings = settings
        config, kv_cache_config, structured_output_manager = _configs(settings)
        scheduler_cls = AsyncScheduler if settings.async_scheduling else Scheduler
        self._scheduler: Any = scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=structured_output_manager,
            block_size=settings.block_size,
            log_stats=False,
        )
        self._requests: dict[str, Any] = {}
        self._outputs: list[tuple[ScheduledStep, Any]] = []
        self.num_preemptions = 0

    def add(self, request: SimulatedRequest) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = str(request.index)
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0)
        added = Request(
            request_id=name,
            prompt_token_ids=[0] * request.prompt_tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=request.arrival_seconds,
            block_hasher=_BlockHasher(request, self.settings.block_size)
            if self.settings.enable_prefix_caching
            else None,
        )
        self._requests[name] = added
        self._scheduler.add_request(added)

    def schedule(self) -> ScheduledStep:
        scheduler = self._scheduler
        output = scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        rows = []
        for name, num_scheduled in scheduled.items():
            request = self._requests[name]
            num_drafts = len(drafts.get(name, ()))
            # vLLM has already counted the step as done.
            placeholders = request.num_output_placeholders
            if self.settings.async_scheduling and not request.is_prefill_chunk:
                placeholders -= _SAMPLED + num_drafts
            rows.append(
                (
                    num_scheduled,
                    request.num_computed_tokens - num_scheduled,
                    request.num_tokens + placeholders,
                    num_drafts,
                    request.num_prompt_tokens,
                )
            )
        columns = np.array(rows, dtype=np.int32).reshape(-1, 5).T
        step = ScheduledStep(tuple(map(int, scheduled)), *columns)
        self._outputs.append((step, output))
        return step

    def update(self, step: ScheduledStep, num_sampled: Sequence[int]) -> list[Delivery]:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        expected, output = self._outputs.pop(0)
        assert step is expected
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = [[0] * n for n in num_sampled]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        outputs = self._scheduler.update_from_output(output, result)
        deliveries = [
            Delivery(int(o.request_id), len(o.new_token_ids), o.finish_reason is not None)
            for of_client in outputs.values()
            for o in of_client.outputs
            if o.new_token_ids
        ]
        for delivery in deliveries:
            if delivery.is_finished:
                del self._requests[str(delivery.request)]
        if self.settings.num_spec_tokens and not self.settings.async_scheduling:
            drafted = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
            drafts = [[0] * self.settings.num_spec_tokens for _ in drafted]
            self._scheduler.update_draft_token_ids(DraftTokenIds(drafted, drafts))
        return deliveries

    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return int(self._scheduler.get_request_counts()[1])

    @property
    def num_free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


class _BlockHasher:
    """
    The hashes of a request's blocks that are full and not hashed yet, from their numbers.
    """

    def __init__(self, request: SimulatedRequest, block_size: int) -> None:
        self._blocks = request.blocks
        self._index = request.index
        self._block_size = block_size

    def __call__(self, request: Any) -> list[bytes]:
        full = request.num_tokens // self._block_size
        return [self._hash(number) for number in range(len(request.block_hashes), full)]

    def _hash(self, number: int) -> bytes:
        if number < len(self._blocks):
            shared, block = 1, self._blocks[number]
        else:
            shared, block = 0, (self._index << 32) + number
        return shared.to_bytes(1, "big") + block.to_bytes(16, "big", signed=True)


def _configs(settings: SchedulerSettings) -> tuple[Any, Any, Any]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = _vllm_config(settings.num_spec_tokens)
    # An engine's defaults depend on the machine; here the settings decide.
    config.scheduler_config.max_num_seqs = settings.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = settings.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.max_num_active_seqs = None
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.long_prefill_token_threshold = settings.long_prefill_token_threshold
    config.scheduler_config.long_prefill_token_threshold_adaptive = False
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.model_config.max_model_len = settings.max_model_len
    config.cache_config.enable_prefix_caching = settings.enable_prefix_caching
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.cache_config.block_size = settings.block_size
    spec = FullAttentionSpec(block_size=settings.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(settings.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return config, kv_cache_config, StructuredOutputManager(config)


@functools.cache
def _model_config() -> Any:
    from vllm.config import ModelConfig

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(_CONFIG))
        return ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=1 << 20)


def _vllm_config(num_spec_tokens: int) -> Any:
    import copy

    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

    model_config = copy.copy(_model_config())
    speculative = None
    if num_spec_tokens:
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=num_spec_tokens, prompt_lookup_max=4, prompt_lookup_min=2
        )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(
            max_model_len=model_config.max_model_len, is_encoder_decoder=False, async_scheduling=False
        ),
        device_config=DeviceConfig(device="cpu"),
        speculative_config=speculative,
    )
    return config
