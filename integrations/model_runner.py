"""The model runner that lets our dispatcher decide."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.worker.workspace import lock_workspace

from aclgraph_dispatch import POLICIES, BatchKind, CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.batch import Classifier
from aclgraph_dispatch.policy import modes_used
from aclgraph_dispatch.pool import Backend, GraphPool
from aclgraph_dispatch.records import StepRecords

from .acl_graph import ACLGraphWrapper, register_pool
from .dispatcher import DispatchCudagraphDispatcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object

# vLLM drops INFO of loggers that are not its own.
logger = init_logger("vllm.aclgraph_dispatch")


class DispatchMixin(Runner):
    """
    Put before a V1 model runner: classifies every batch, asks our dispatcher, and captures what it plans.
    """

    def install_dispatcher(self, vllm_config: "VllmConfig", backend: Backend) -> None:
        """
        Replace vLLM's dispatcher; call it after the runner's own construction.
        """
        self.graphs = GraphPool(backend)
        register_pool(vllm_config, self.graphs)
        self.cudagraph_dispatcher = DispatchCudagraphDispatcher(vllm_config)
        self.records = StepRecords()
        self.capture_seconds = 0.0
        self._classifier = Classifier(
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            query_len=self.cudagraph_dispatcher.uniform_decode_query_len,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model: Any = ACLGraphWrapper(self.model, self.vllm_config, CUDAGraphMode.FULL)

    def get_model(self) -> Any:
        model: Any = self.model
        return model.unwrap() if isinstance(model, ACLGraphWrapper) else model

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        *args: Any,
        force_uniform_decode: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        dispatcher = self.cudagraph_dispatcher
        if force_uniform_decode is None:
            # A real step. A dummy run says itself what it is: its requests have no state.
            batch = dispatcher.batch = self._classifier.classify(
                num_scheduled_tokens_np,
                self.input_batch.num_computed_tokens_cpu[:num_reqs],
                self.input_batch.num_tokens_no_spec[:num_reqs],
                num_prompt=self.input_batch.num_prompt_tokens[:num_reqs],
            )
            force_uniform_decode = batch.kind is BatchKind.UNIFORM_DECODE
        try:
            decided = super()._determine_batch_execution_and_padding(
                num_tokens,
                num_reqs,
                num_scheduled_tokens_np,
                *args,
                force_uniform_decode=force_uniform_decode,
                **kwargs,
            )
            if dispatcher.batch is not None and dispatcher.step_plan is not None:
                self.records.observe(dispatcher.step_plan)
        finally:
            dispatcher.batch = None
        return decided

    def capture_model(self) -> int:
        """
        Capture every graph of the plan; return the bytes they take, unknown on an emulated device.
        """
        dispatcher = self.cudagraph_dispatcher.core
        assert dispatcher is not None
        start = time.perf_counter()
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
                        self._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)
        finally:
            # From here on a capture is a mistake, and vLLM raises for it.
            set_cudagraph_capturing_enabled(False)
        lock_workspace()
        self.capture_seconds = time.perf_counter() - start
        _log_plan(dispatcher, self.graphs, self.capture_seconds, self.max_num_tokens)
        return 0

    def shutdown(self) -> None:
        # vLLM's compiler keeps the wrappers, and graphs hold the KV cache.
        self.graphs.clear()
        super().shutdown()

    def dispatch_report(self) -> dict[str, Any]:
        """
        What is captured and which routes were taken, as plain values.
        """
        dispatcher = self.cudagraph_dispatcher.core
        plan = dispatcher.plan if dispatcher else CapturePlan()
        return {
            "policy": dispatcher.policy if dispatcher else "eager",
            "full_sizes": list(plan.full_sizes),
            "piecewise_sizes": list(plan.piecewise_sizes),
            "graphs": {mode.name: n for mode, n in self.graphs.num_graphs_by_mode().items()},
            "graphs_per_size": {
                f"{descriptor.mode.name}-{descriptor.num_tokens}": n
                for descriptor, n in self.graphs.num_graphs().items()
            },
            "capture_seconds": self.capture_seconds,
            "routes": [
                {
                    "mode": count.mode.name,
                    "reason": count.reason.name,
                    "steps": count.num_parts,
                    "tokens": count.num_tokens,
                    "paddings": count.num_paddings,
                }
                for count in self.records.counts()
            ],
        }


def _log_plan(
    dispatcher: Dispatcher, graphs: GraphPool, capture_seconds: float, max_num_batched_tokens: int
) -> None:
    counts = graphs.num_graphs_by_mode()
    logger.info(
        "policy %s; FULL %s: %d graphs; PIECEWISE %s: %d graphs; captured in %.1f s",
        dispatcher.policy,
        list(dispatcher.plan.full_sizes),
        counts.get(RuntimeMode.FULL, 0),
        list(dispatcher.plan.piecewise_sizes),
        counts.get(RuntimeMode.PIECEWISE, 0),
        capture_seconds,
    )
    modes = modes_used(POLICIES[dispatcher.policy])
    covered = max(dispatcher.plan.full_sizes, default=0) // dispatcher.query_len
    if RuntimeMode.FULL in modes and covered < dispatcher.max_num_seqs:
        logger.warning(
            "no FULL graph holds a decode batch of more than %d requests, up to %d can be scheduled: add %d to "
            "full_sizes",
            covered,
            dispatcher.max_num_seqs,
            dispatcher.max_num_seqs * dispatcher.query_len,
        )
    covered = max(dispatcher.plan.piecewise_sizes, default=0)
    if RuntimeMode.PIECEWISE in modes and covered < max_num_batched_tokens:
        logger.info(
            "no PIECEWISE graph holds a step of more than %d tokens, up to %d can be scheduled: those run eagerly",
            covered,
            max_num_batched_tokens,
        )
