"""The model runner that lets our dispatcher decide."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.forward_context import get_forward_context
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.workspace import lock_workspace

from aclgraph_dispatch import Batch, CapturePlan, Dispatcher, StepPlan
from aclgraph_dispatch.agreement import Vote, agree
from aclgraph_dispatch.batch import Classifier
from aclgraph_dispatch.pool import Backend, GraphPool
from aclgraph_dispatch.records import StepRecords

from .acl_graph import ACLGraphWrapper, register_pool
from .dispatcher import (
    VLLM_MODE,
    DispatchCudagraphDispatcher,
    backend_traits,
    query_lens,
    stateless_batch,
    vllm_descriptor,
)
from .draft_padding import DraftPadding
from .drafter import DraftDispatcher
from .ranks import exchange, padded_tokens
from .report import log_plan, report

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object

_EAGER = Dispatcher(CapturePlan(), policy="eager", max_num_seqs=1)
"""What runs until it is known which graphs there are."""


class DispatchMixin(Runner):
    """
    Put before a V1 model runner: classifies every batch, asks our dispatcher, and captures what it plans.
    """

    uniform_decode_query_len: int
    query_start_loc: CpuGpuBuffer
    optimistic_seq_lens_cpu: torch.Tensor

    def install_dispatcher(self, vllm_config: "VllmConfig", backend: Backend) -> None:
        """
        Replace vLLM's dispatcher; call it after the runner's own construction.
        """
        self.graphs = GraphPool(backend)
        register_pool(vllm_config, self.graphs)
        self.cudagraph_dispatcher = DispatchCudagraphDispatcher(vllm_config)
        self.records = StepRecords()
        self.step_plan: StepPlan | None = None
        """Of the step that is being run; None in a dummy run."""
        self.capture_seconds = 0.0
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._is_serving = False
        lengths = query_lens(vllm_config)
        self._classifiers = {
            query_len: Classifier(max_num_seqs=max_num_seqs, query_len=query_len, max_model_len=self.max_model_len)
            for query_len in lengths
        }
        # Index: tokens of the longest request; the shortest query length that holds them.
        self._query_lens = [min(q for q in lengths if q >= n) for n in range(lengths[-1] + 1)]
        # With the scheduled tokens, all drafts among them, as `_prepare_inputs` leaves it.
        self._seq_lens = self.optimistic_seq_lens_cpu.numpy()
        self._draft_padding = DraftPadding(query_len=lengths[-1], max_num_seqs=max_num_seqs, device=self.device)
        self._drafts: DraftDispatcher | None = None
        if hasattr(getattr(self, "drafter", None), "cudagraph_dispatcher"):
            self._drafts = self.drafter.cudagraph_dispatcher = DraftDispatcher(vllm_config)
        self._num_drafts = np.zeros(max_num_seqs, dtype=np.int32)
        self._total_drafts = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model: Any = ACLGraphWrapper(self.model, self.vllm_config, CUDAGraphMode.FULL)

    def get_model(self) -> Any:
        model: Any = self.model
        return model.unwrap() if isinstance(model, ACLGraphWrapper) else model

    def _check_and_update_cudagraph_mode(
        self, attention_backends: Any, kv_cache_groups: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.cudagraph_dispatcher.traits = backend_traits(
            self.vllm_config,
            (
                backend.get_builder_cls().get_cudagraph_support(self.vllm_config, group.kv_cache_spec)
                for backends, group in zip(attention_backends, kv_cache_groups, strict=True)
                for backend in backends
            ),
        )
        # vLLM would round these to whole requests, or give up where it cannot; ours are planned.
        sizes, self.compilation_config.cudagraph_capture_sizes = (
            self.compilation_config.cudagraph_capture_sizes,
            [],
        )
        super()._check_and_update_cudagraph_mode(attention_backends, kv_cache_groups, *args, **kwargs)
        self.compilation_config.cudagraph_capture_sizes = sizes
        for classifier in self._classifiers.values():
            classifier.extend_equals_decode = self.cudagraph_dispatcher.traits.extend_equals_decode

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args, **kwargs)
        self._total_drafts = 0
        if scheduler_output.scheduled_spec_decode_tokens:
            # Of a request that computes more than one token and its drafts vLLM says -1; it is no decode.
            num_reqs = self.input_batch.num_reqs
            drafts = self._num_drafts[:num_reqs]
            np.maximum(self.num_decode_draft_tokens.np[:num_reqs], 0, drafts)
            self._total_drafts = int(drafts.sum(dtype=np.int32))
        return prepared

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        use_cascade_attn: bool = False,
        allow_microbatching: bool = True,
        force_eager: bool = False,
        force_uniform_decode: bool | None = None,
        force_has_lora: bool | None = None,
        force_num_active_loras: int | None = None,
        num_encoder_reqs: int = 0,
    ) -> Any:
        num_active_loras = force_num_active_loras
        if num_active_loras is None:
            num_active_loras = len(self.input_batch.lora_id_to_lora_request)
        is_dummy = force_uniform_decode is not None
        if is_dummy:
            # A dummy run says itself what it is: its requests have no state.
            query_len = self.uniform_decode_query_len
            batch = stateless_batch(num_tokens, query_len, bool(force_uniform_decode), num_active_loras)
        else:
            query_len = self._query_lens[min(max_num_scheduled_tokens, self.uniform_decode_query_len)]
            batch = self._classify(query_len, num_tokens, num_reqs, num_scheduled_tokens_np, num_active_loras)

        cores = self.cudagraph_dispatcher.cores
        core = cores[query_len] if cores else _EAGER
        step_plan = core.dispatch(batch, frozenset() if force_eager else None)
        num_tokens_across_ranks = None
        if self.parallel_config.data_parallel_size > 1:
            is_idle = is_dummy and self._is_serving
            vote = Vote.idle(num_tokens) if is_idle else core.vote(batch, step_plan)
            votes = exchange(vote)
            step_plan = core.settle(batch, step_plan, agree(votes, self.parallel_config.data_parallel_size))
            num_tokens_across_ranks = padded_tokens(step_plan, votes)
            if is_idle:
                self.records.observe_idle(step_plan)
        self.step_plan = None if is_dummy else step_plan
        if not is_dummy:
            self.records.observe(step_plan)

        [part] = step_plan.parts
        statistics = None
        if self.vllm_config.observability_config.cudagraph_metrics:
            statistics = CUDAGraphStat(
                num_unpadded_tokens=num_tokens,
                num_padded_tokens=part.num_padded_tokens,
                num_paddings=part.num_paddings,
                runtime_mode=str(VLLM_MODE[part.mode]),
            )
        # Never in micro-batches: they are refused at start-up.
        return VLLM_MODE[part.mode], vllm_descriptor(part.descriptor), False, num_tokens_across_ranks, statistics

    def _classify(
        self, query_len: int, num_tokens: int, num_reqs: int, num_scheduled: np.ndarray, num_active_loras: int
    ) -> Batch:
        requests = self.input_batch
        return self._classifiers[query_len].classify(
            num_scheduled,
            self._seq_lens[:num_reqs],
            requests.num_tokens_no_spec[:num_reqs],
            self._num_drafts[:num_reqs] if self._total_drafts else None,
            requests.num_prompt_tokens[:num_reqs],
            num_tokens=num_tokens,
            total_drafts=self._total_drafts,
            num_active_loras=num_active_loras,
        )

    def _build_attention_metadata(self, **kwargs: Any) -> Any:
        part = self.step_plan.parts[0] if self.step_plan else None
        if part is None or not part.pads_drafts:
            return super()._build_attention_metadata(**kwargs)
        num_reqs = kwargs["num_reqs"]
        padding = self._draft_padding
        longest = int(self._seq_lens[:num_reqs].max())
        padding.begin(
            self.num_scheduled_tokens.np[:num_reqs],
            num_reqs_padded=kwargs["num_reqs_padded"],
            num_tokens_padded=part.num_padded_tokens,
        )
        padding.lay_out_starts(self.query_start_loc.gpu)
        padding.lay_out_lengths(self.seq_lens)
        for slots in kwargs["slot_mappings"].values():
            padding.lay_out_tokens(slots, pad=-1)
        if self.lora_config:
            # Which adapter a token wants was told for the ragged tokens. Of decodes all are sampled.
            num_scheduled = self.num_scheduled_tokens.np[:num_reqs]
            self.set_active_loras(self.input_batch, np.full_like(num_scheduled, padding.query_len), num_scheduled)
        starts, lengths = self.query_start_loc, self.optimistic_seq_lens_cpu
        self.query_start_loc = padding.stand_in_for_starts(starts)
        self.optimistic_seq_lens_cpu = padding.stand_in_for_lengths(lengths)
        try:
            metadata, for_drafter = super()._build_attention_metadata(
                **kwargs | {"max_query_len": padding.query_len}
            )
        finally:
            self.query_start_loc, self.optimistic_seq_lens_cpu = starts, lengths
        if for_drafter is not None:
            # Its views of the device are restored after the forward pass; of the host it gets what vLLM gives.
            for_drafter.query_start_loc_cpu = starts.cpu[: num_reqs + 1]
            for_drafter.seq_lens_cpu_upper_bound = lengths[:num_reqs]
            for_drafter.max_query_len = kwargs["max_query_len"]
            for_drafter.max_seq_len = longest
        return metadata, for_drafter

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        padding = self._draft_padding
        if padding.is_begun:
            for tokens in (input_ids, inputs_embeds):
                if tokens is not None:
                    padding.lay_out_tokens(tokens)
            padding.lay_out_tokens(positions, dim=-1)
            padding.lay_out_tokens(get_forward_context().is_padding, pad=True)
        output = self.run_forward(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            **model_kwargs,
        )
        if padding.is_begun:
            output = padding.gather(output)
            padding.restore()
        elif self._drafts and self.num_prompt_logprobs:
            # vLLM computes these only after the drafter, whose graphs share the memory of the target's.
            output = tree_map_only(torch.Tensor, torch.clone, output)
        return output

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """
        Run the model on buffers that are laid out for it; for subclasses to extend.
        """
        return super()._model_forward(*args, **kwargs)

    def capture_model(self) -> int:
        """
        Capture every graph of the plan; return the bytes they take, unknown on an emulated device.
        """
        start = time.perf_counter()
        longest = self.uniform_decode_query_len
        set_cudagraph_capturing_enabled(True)
        try:
            with self._freeze_gc():
                for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                    progress = tqdm(
                        descriptors,
                        desc=f"Capturing ACL graphs ({mode.name})",
                        disable=not (is_global_first_rank() and self.load_config.use_tqdm_on_load),
                    )
                    for descriptor in progress:
                        if descriptor.uniform:
                            # Dummy requests have as many tokens as this says.
                            self.uniform_decode_query_len = descriptor.num_tokens // descriptor.num_reqs
                        self._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)
                    # The captures leave their dummy adapters to one another.
                    self.maybe_remove_all_loras(self.lora_config)
        finally:
            self.uniform_decode_query_len = longest
            # From here on a capture is a mistake, and vLLM raises for it.
            set_cudagraph_capturing_enabled(False)
        lock_workspace()
        self._is_serving = True
        if self._drafts:
            self._drafts.passes.clear()
        self.capture_seconds = time.perf_counter() - start
        log_plan(self.cudagraph_dispatcher, self.graphs, self.capture_seconds, self.max_num_tokens)
        return 0

    def shutdown(self) -> None:
        # vLLM's compiler keeps the wrappers, and graphs hold the KV cache.
        self.graphs.clear()
        super().shutdown()

    def dispatch_report(self) -> dict[str, Any]:
        """
        What is captured and which routes were taken, as plain values (`report`).
        """
        return report(self.cudagraph_dispatcher, self.graphs, self.records) | {
            "draft_passes": dict(self._drafts.passes) if self._drafts else {},
            "capture_seconds": self.capture_seconds,
        }
