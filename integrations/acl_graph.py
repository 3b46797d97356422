"""The wrapper that vLLM puts around what is to become a graph."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphOptions
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.params import Issue
from aclgraph_dispatch.pool import GraphKey, GraphPool, PooledGraph

from .dispatcher import descriptor_of
from .drafter import role_of
from .replay_check import check_requested, replay_checked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_pools: "weakref.WeakValueDictionary[int, GraphPool]" = weakref.WeakValueDictionary()
_num_pieces: "weakref.WeakKeyDictionary[GraphPool, Counter[str]]" = weakref.WeakKeyDictionary()


def register_pool(vllm_config: "VllmConfig", pool: GraphPool) -> None:
    """
    Make *pool* the one that wrappers of this engine capture into.

    vLLM builds wrappers deep in its compiler, where the only thing known of the engine is its configuration.
    """
    _pools[id(vllm_config.compilation_config)] = pool


@attrs.frozen
class FullCapture:
    """
    A FULL graph being captured: where attention leaves what must be refreshed later.
    """

    pool: GraphPool
    descriptor: BatchDescriptor

    def record_attention(self, layer_name: str, issue: Issue, metadata: Any) -> None:
        """
        Issue the one operator of a layer's attention, as a task whose arguments can be replaced.
        """
        self.pool.params.record(self.descriptor, layer_name, issue, metadata)


_full_capture: FullCapture | None = None


def full_capture() -> FullCapture | None:
    """
    The FULL capture going on, if any.
    """
    return _full_capture


class ACLGraphWrapper:
    """
    Captures *runnable* once per batch descriptor and replays it when the step's mode is its own.

    Args:
        runnable: The whole model, or one piece of it.
        vllm_config: Of the engine.
        runtime_mode: FULL or PIECEWISE: in steps of another mode, the runnable is just called.
        cudagraph_options: vLLM's; of these, `weak_ref_output` matters here.

    Raises:
        ConfigError: The engine runs without our worker.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: "VllmConfig",
        runtime_mode: CUDAGraphMode,
        cudagraph_options: CUDAGraphOptions | None = None,
    ) -> None:
        pool = _pools.get(id(vllm_config.compilation_config))
        if pool is None:
            msg = (
                "graphs of the emulated NPU need --worker-cls aclgraph_dispatch.integrations.cpu.DispatchWorker: "
                f"{vllm_config.parallel_config.worker_cls}"
            )
            raise ConfigError(msg)
        self.runnable = runnable
        self.runtime_mode = runtime_mode
        self.pool = pool
        self.role = role_of(runnable)
        self._mode = RuntimeMode(runtime_mode.value)
        self._release_output = (cudagraph_options or CUDAGraphOptions()).weak_ref_output
        self._is_checked = check_requested()
        self._graphs: dict[Any, PooledGraph] = {}
        self._piece = 0
        if self._mode is RuntimeMode.PIECEWISE:
            counts = _num_pieces.setdefault(pool, Counter())
            self._piece = counts[self.role]
            counts[self.role] += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def unwrap(self) -> Any:
        """
        What is wrapped.
        """
        return self.runnable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(*args, **kwargs)

        addresses = [value.data_ptr() for value in args if isinstance(value, torch.Tensor)]
        addresses += [value.data_ptr() for value in kwargs.values() if isinstance(value, torch.Tensor)]
        graph = self._graphs.get(context.batch_descriptor)
        if graph is None or graph.graph is None:
            return self._capture(context, addresses, args, kwargs)
        replay = partial(graph.replay, addresses)
        if self._mode is RuntimeMode.FULL:
            replay = partial(self.pool.params.replay, graph.key.descriptor, context.attn_metadata, replay)
        if self._is_checked:
            return self._replay_checked(context, graph, replay, args, kwargs)
        return replay()

    def _replay_checked(self, context: Any, graph: PooledGraph, replay: Any, args: Any, kwargs: Any) -> Any:
        def replay_to_its_end() -> Any:
            output = replay()
            self.pool.backend.synchronize()
            return output

        return replay_checked(
            str(graph.key),
            graph.output,
            replay_to_its_end,
            self.runnable,
            args,
            kwargs,
            context.is_padding,
            leaves_room=self._mode is RuntimeMode.PIECEWISE,
        )

    def _capture(self, context: Any, addresses: list[int], args: Any, kwargs: Any) -> Any:
        validate_cudagraph_capturing_enabled()
        descriptor = descriptor_of(self._mode, context.batch_descriptor, self.role)
        with self._full_capture(descriptor):
            graph, output = self.pool.capture(
                GraphKey(descriptor, self._piece),
                lambda: self.runnable(*args, **kwargs),
                addresses=addresses,
                release_output=self._release_output,
            )
        self._graphs[context.batch_descriptor] = graph
        compilation_counter.num_cudagraph_captured += 1
        return output

    @contextmanager
    def _full_capture(self, descriptor: BatchDescriptor) -> Iterator[None]:
        global _full_capture  # noqa: PLW0603 -- one device, one capture at a time
        if self._mode is RuntimeMode.FULL:
            _full_capture = FullCapture(self.pool, descriptor)
        try:
            yield
        finally:
            _full_capture = None
