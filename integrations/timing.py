"""
Times real steps of a model runner, shape by shape: what calibration is made of.

A step is what the runner makes of a scheduler's decision. Here the decision is made up: decodes of a given
context, whose keys and values are random numbers, with or without a prefill beside them. So the shapes are those
that are asked for, while everything else is as in serving: states, inputs, attention metadata, the pass in the
wanted mode, logits and greedy sampling.

The host is timed by its clock, the pass on a device by events before and after it; the device is idle when a step
begins. On a CPU host and device are one, and the pass takes as long on either.
"""

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from aclgraph_dispatch import CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.calibration import BatchShape
from aclgraph_dispatch.errors import ConfigError

from .model_runner import DispatchMixin

POLICY = {RuntimeMode.NONE: "eager", RuntimeMode.PIECEWISE: "piecewise", RuntimeMode.FULL: "full_decode_only"}
"""The policy that runs whatever it can in a mode."""


@attrs.frozen
class StepSample:
    """
    One step: how it ran, and how long its parts took.

    Args:
        mode: Its mode.
        num_tokens: Its tokens after padding.
        prepare_seconds: From the beginning to the pass.
        host_seconds: What the host did for the pass.
        device_seconds: From the beginning of the pass to its end on the device.
        sample_seconds: From then to the sampled tokens on the host.
    """

    mode: RuntimeMode
    num_tokens: int
    prepare_seconds: float
    host_seconds: float
    device_seconds: float
    sample_seconds: float


class StepTimer:
    """
    Runs made-up steps on an engine's model runner, which must have no requests, and has none afterwards.

    Args:
        runner: A V1 model runner with our dispatcher, its graphs captured.
        seed: Of tokens, keys and values.

    Raises:
        ConfigError: The runner is none of ours, or its batches are not of the kind that is timed here.
    """

    def __init__(self, runner: Any, *, seed: int = 0) -> None:
        if not isinstance(runner, DispatchMixin) or runner.cudagraph_dispatcher.core is None:
            raise ConfigError(
                "steps are only timed on a worker of this package: set worker_cls, not enforce_eager"
            )
        if list(runner.cudagraph_dispatcher.cores) != [1] or runner.parallel_config.data_parallel_size > 1:
            raise ConfigError("steps are only timed without speculation and data parallelism: turn them off")
        self._runner: Any = runner
        core = runner.cudagraph_dispatcher.core
        self.plan: CapturePlan = core.plan
        """The graphs that exist."""
        accelerator = torch.accelerator.current_accelerator()
        self.host_is_device = accelerator is None or accelerator.type == "cpu"
        """Whether there is one clock."""
        self._forced = {
            mode: Dispatcher(self.plan, policy=policy, max_num_seqs=core.max_num_seqs, traits=core.traits)
            for mode, policy in POLICY.items()
        }
        self._rng = np.random.default_rng(seed)
        self._vocab_size = runner.model_config.get_vocab_size()
        self._block_sizes = [g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups]
        self._next_block = 1  # the first one is for padding
        self._num_requests = 0
        self._finished: set[str] = set()
        generator = torch.Generator(device=runner.device).manual_seed(seed)
        for cache in runner.kv_caches:
            # Pages that nobody wrote are one page, and always in the processor's cache.
            if cache.is_floating_point() and cache.element_size() > 1:
                cache.normal_(generator=generator)

    @property
    def max_model_len(self) -> int:
        """
        The most tokens of a sequence.
        """
        return int(self._runner.max_model_len)

    @property
    def backend(self) -> str:
        """
        The platform that runs the steps.
        """
        return f"{type(current_platform).__name__} ({current_platform.device_type})"

    @property
    def device(self) -> str:
        """
        The device's own name; a processor's says nothing, so how many there are.
        """
        name = str(current_platform.get_device_name())
        return f"{name} ({platform.machine()}, {os.cpu_count()} processors)" if self.host_is_device else name

    def refusal(self, shape: BatchShape) -> str:
        """
        Why the runner or its KV cache has no room for such a batch; empty if it has.
        """
        scheduler, prompt = self._runner.scheduler_config, shape.tokens_before + shape.chunk_tokens
        num_blocks = sum(
            shape.num_decodes * -(-shape.context_tokens // size) + -(-prompt // size) for size in self._block_sizes
        )
        limits = {
            f"more than max_num_seqs = {scheduler.max_num_seqs} requests": (
                shape.num_decodes + (shape.chunk_tokens > 0) > scheduler.max_num_seqs
            ),
            f"more than max_num_batched_tokens = {scheduler.max_num_batched_tokens} tokens": (
                shape.num_decodes + shape.chunk_tokens > scheduler.max_num_batched_tokens
            ),
            f"not shorter than max_model_len = {self._runner.max_model_len} tokens": (
                max(shape.context_tokens, prompt) >= self._runner.max_model_len
            ),
            f"not fewer than the KV cache's {self._runner.kv_cache_config.num_blocks} blocks": (
                num_blocks >= self._runner.kv_cache_config.num_blocks
            ),
            "prompts are not computed in chunks here": (
                shape.tokens_before > 0 and not scheduler.enable_chunked_prefill
            ),
        }
        return next((why for why, is_broken in limits.items() if is_broken), "")

    @torch.inference_mode()
    def samples(self, shape: BatchShape, modes: Sequence[RuntimeMode], num_rounds: int) -> list[StepSample]:
        """
        Run the same batch in those *modes* that it can run in, by turns, and return all steps but warming ones.

        Args:
            shape: The batch; the runner must hold it.
            modes: The modes to try; where the batch meets no graph of one, that is left out.
            num_rounds: How often each is timed.
        """
        dispatcher = self._runner.cudagraph_dispatcher
        cores = dispatcher.cores
        samples, possible = [], list(modes)
        decodes = [self._request(shape.context_tokens - 1, 1) for _ in range(shape.num_decodes)]
        try:
            if decodes:
                # Their first token is sampled; from then on they decode the second, again and again.
                self._run(decodes, [])
            for index in range(num_rounds + 1):
                for mode in possible[index % len(possible) :] + possible[: index % len(possible)]:
                    dispatcher.cores = {1: self._forced[mode]}
                    first_block = self._next_block
                    chunk = [
                        self._request(shape.tokens_before + shape.chunk_tokens, shape.chunk_tokens)
                        for _ in range(shape.chunk_tokens > 0)
                    ]
                    sample = self._run(chunk, decodes)
                    self._finished.update(request.req_id for request in chunk)
                    self._next_block = first_block
                    if sample.mode is not mode:
                        possible = [m for m in possible if m is not mode]
                    elif index:
                        samples.append(sample)
        finally:
            dispatcher.cores = cores
            self._finished.update(request.req_id for request in decodes)
            self._next_block = 1
            self._runner.execute_model(self._decision([], []))
        return samples

    def _request(self, prompt_tokens: int, scheduled_tokens: int) -> NewRequestData:
        """
        A request that computes the last *scheduled_tokens* of its prompt.
        """
        block_ids: tuple[list[int], ...] = ()
        for size in self._block_sizes:
            after = self._next_block - (-(prompt_tokens + 1) // size)
            block_ids += (list(range(self._next_block, after)),)
            self._next_block = after
        self._num_requests += 1
        return NewRequestData(
            req_id=f"timed-{self._num_requests}",
            prompt_token_ids=self._rng.integers(self._vocab_size, size=prompt_tokens).tolist(),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
            pooling_params=None,
            block_ids=block_ids,
            num_computed_tokens=prompt_tokens - scheduled_tokens,
            lora_request=None,
        )

    def _decision(self, new: Sequence[NewRequestData], decodes: Sequence[NewRequestData]) -> SchedulerOutput:
        """
        What a scheduler would say: *new* requests compute the rest of their prompt, *decodes* their second token.
        """
        scheduled = {request.req_id: 1 for request in decodes}
        scheduled |= {request.req_id: request.prompt_len - request.num_computed_tokens for request in new}
        finished, self._finished = self._finished, set()
        cached = CachedRequestData(
            req_ids=[request.req_id for request in decodes],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(decodes),
            num_computed_tokens=[request.prompt_len for request in decodes],
            # What the same step sampled before is forgotten.
            num_output_tokens=[1] * len(decodes),
        )
        return SchedulerOutput(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    def _run(self, new: Sequence[NewRequestData], decodes: Sequence[NewRequestData]) -> StepSample:
        runner, decision = self._runner, self._decision(new, decodes)
        marks: list[float] = []
        events = [] if self.host_is_device else [torch.Event(enable_timing=True) for _ in range(2)]
        forward = runner._model_forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            marks.append(time.perf_counter())
            for event in events[:1]:
                event.record()
            output = forward(*args, **kwargs)
            for event in events[1:]:
                event.record()
            marks.append(time.perf_counter())
            return output

        torch.accelerator.synchronize()
        runner._model_forward = timed
        try:
            start = time.perf_counter()
            runner.execute_model(decision)
            output = runner.sample_tokens(None)
            if hasattr(output, "get_output"):
                output.get_output()  # of async scheduling
            end = time.perf_counter()
        finally:
            del runner._model_forward
        begun, done = marks
        device_seconds = host_seconds = done - begun
        if events:
            torch.accelerator.synchronize()
            device_seconds = events[0].elapsed_time(events[1]) / 1e3
        [part] = runner.step_plan.parts
        return StepSample(
            part.mode,
            part.num_padded_tokens,
            begun - start,
            host_seconds,
            device_seconds,
            max(end - begun - device_seconds, 0.0),
        )
