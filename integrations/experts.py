"""Mixture-of-experts layers whose experts are spread over data-parallel ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from vllm.forward_context import DPMetadata, get_forward_context
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from aclgraph_dispatch.backends import emulated


def hide_experts_from_compiler(layers: Mapping[str, Any]) -> None:
    """
    Let the compiler see experts as one operator, and graphs as what it calls.

    On a CPU vLLM lets the compiler look into experts. Where ranks exchange tokens it must not: it would bake the
    numbers of tokens of the batch that it happens to trace. A graph bakes its own numbers, which hold whenever it
    is replayed, as all ranks are padded to its size.

    Args:
        layers: vLLM's layers by name (`static_forward_context`); those without experts are left alone.
    """
    operators = torch.ops.vllm
    emulated.register_composite(operators.moe_forward.default, _captured(moe_runner._moe_forward))
    emulated.register_composite(operators.moe_forward_shared.default, _captured(moe_runner._moe_forward_shared))
    for layer in layers.values():
        if isinstance(layer, moe_runner.MoERunner):
            is_shared = layer.shared_experts is not None
            layer._forward_entry = operators.moe_forward_shared if is_shared else operators.moe_forward


class _HostMetadata(DPMetadata):
    """
    Numbers of tokens whose arithmetic is the host's: on a device no graph sees it.
    """

    @contextmanager
    def sp_local_sizes(self, *args: Any, **kwargs: Any) -> Iterator[list[int]]:
        sizes = super().sp_local_sizes(*args, **kwargs)
        with _disable_current_modes():
            local = sizes.__enter__()
        try:
            yield local
        finally:
            sizes.__exit__(None, None, None)


def _captured(forward: Callable[..., Any]) -> Callable[..., Any]:
    def body(*args: Any) -> Any:
        context = get_forward_context()
        metadata = context.dp_metadata
        assert metadata is not None
        with patch.object(context, "dp_metadata", _HostMetadata(metadata.num_tokens_across_dp_cpu)):
            return forward(*args)

    return body
