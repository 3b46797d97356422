"""The same step, decided by vLLM and by us, from what a model runner has at hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from aclgraph_dispatch.batch import Classifier
from aclgraph_dispatch.integrations.dispatcher import DispatchCudagraphDispatcher

MAX_NUM_SEQS = 512
MAX_SIZE = 4096
"""Of the graphs, in tokens."""

Decide = Callable[[], object]


@attrs.frozen
class Step:
    """
    A step of requests that have 1000 tokens in the KV cache, behind prompts of 500.

    Args:
        num_reqs: Requests of the step.
        num_drafts: Drafts of each, the graphs' number.
        num_ragged: Of the requests, those that have one draft less.
        num_chunks: Of the requests, those that compute a chunk of a longer prompt instead.
        chunk: Tokens of a chunk.
        num_adapters: Active LoRA adapters.
    """

    num_reqs: int
    num_drafts: int = 0
    num_ragged: int = 0
    num_chunks: int = 0
    chunk: int = 8
    num_adapters: int = 0

    def decide_both(self) -> tuple[Decide, Decide]:
        """
        vLLM's decision and ours, each a function without arguments, to be called over and over.
        """
        n, k = self.num_reqs, self.num_drafts
        # Persistent buffers, longer than the batch, as the runner's; what the scheduler hands over is not.
        drafts = np.full(MAX_NUM_SEQS, k, np.int32)
        drafts[n - self.num_ragged : n] -= 1
        drafts[: self.num_chunks] = 0
        scheduled = 1 + drafts[:n]
        scheduled[: self.num_chunks] = self.chunk
        computed = np.full(MAX_NUM_SEQS, 1000, np.int32)
        known = computed + 1
        known[: self.num_chunks] = 9000
        prompts = np.full(MAX_NUM_SEQS, 500, np.int32)
        prompts[: self.num_chunks] = 9000
        seq_lens = computed.copy()
        seq_lens[:n] += scheduled
        num_tokens, longest = int(scheduled.sum()), int(scheduled.max())
        total_drafts = int(drafts[:n].sum())

        stock = _dispatcher(CudagraphDispatcher, k, self.num_adapters)
        core = _dispatcher(DispatchCudagraphDispatcher, k, self.num_adapters).core
        classify = Classifier(max_num_seqs=MAX_NUM_SEQS, query_len=1 + k, max_model_len=9000).classify
        is_uniform_decode = GPUModelRunner._is_uniform_decode
        adapters = self.num_adapters

        def theirs() -> object:
            is_uniform = is_uniform_decode(
                max_num_scheduled_tokens=longest, uniform_decode_query_len=1 + k, num_tokens=num_tokens, num_reqs=n
            )
            return stock.dispatch(
                num_tokens=num_tokens,
                has_lora=adapters > 0,
                uniform_decode=is_uniform,
                num_active_loras=adapters,
                valid_modes=None,
                invalid_modes=None,
            )

        def ours() -> object:
            batch = classify(
                scheduled,
                seq_lens[:n],
                known[:n],
                drafts[:n] if total_drafts else None,
                prompts[:n],
                num_tokens=num_tokens,
                total_drafts=total_drafts,
                num_active_loras=adapters,
            )
            return core.dispatch(batch, None)

        return theirs, ours


def _dispatcher(cls: type[CudagraphDispatcher], num_drafts: int, num_adapters: int) -> Any:
    # vLLM's own sizes, as far as they are wanted.
    query_len = 1 + num_drafts
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_SIZE + 1, 16)]
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, cudagraph_capture_sizes=sizes
    )
    compilation.max_cudagraph_capture_size = sizes[-1]
    compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    compilation.adjust_cudagraph_sizes_for_spec_decode(query_len)
    vllm_config: Any = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192),
        num_speculative_tokens=num_drafts,
        speculative_config=None,
        lora_config=SimpleNamespace(max_loras=4, specialize_active_lora=True) if num_adapters else None,
        additional_config=None,
    )
    dispatcher = cls(vllm_config)
    dispatcher.initialize_cudagraph_keys(mode, query_len)
    return dispatcher
