"""
LoRA on the emulated NPU: operators that read a step's adapters from where they lie, at replay.

vLLM's CPU wrapper hands its operators the mapping of tokens to adapters as host values: how many runs of equal
adapters there are, and whether there is any at all. A graph would keep those of its capture. Here the
operators take the adapter of every row instead, from a buffer that the runner fills before each step. Rows of
padding have no adapter.

There are two of each: `lora_shrink` and `lora_expand` are what the model calls and a compiler sees, the ones named
`..._kernel` do the work. A graph captured for no adapter at all holds none of them.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from aclgraph_dispatch.backends import emulated

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping

_NO_ADAPTER = -1


def _for_adapted_rows(
    compute: Callable[..., None],
    output: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    adapters: torch.Tensor,
    option: float | bool,
) -> None:
    """
    Let vLLM's operator change those rows of *output* that have an adapter.

    It computes all rows, as on the CPU it always does, so that the others change no bit; for -1 it takes the
    adapter in the last slot, as Python does, and so requests of the base model would get that adapter whenever
    another request of the step has one.
    """
    adapted = adapters != _NO_ADAPTER
    if adapted.any():
        result = output.clone()
        compute(rows, weights, result, adapters, option)
        torch.where(adapted.unsqueeze(1), result, output, out=output)


def _capture(kernel: Callable[..., None], *args: Any) -> None:
    descriptor = get_forward_context().batch_descriptor
    assert descriptor is not None
    if descriptor.num_active_loras:
        kernel(*args)


_library = torch.library.Library("aclgraph_dispatch", "FRAGMENT")
_operators = torch.ops.aclgraph_dispatch
for _name, _compute, _option in (
    ("lora_shrink", bgmv_shrink, "float scale"),
    ("lora_expand", bgmv_expand, "bool adds"),
):
    _schema = f"(Tensor(a!) output, Tensor rows, Tensor weights, Tensor adapters, {_option}) -> ()"
    for _variant in (_name, f"{_name}_kernel"):
        _library.define(_variant + _schema)
        _library.impl(_variant, partial(_for_adapted_rows, _compute), "CPU")
    # There is no result whose shape a compiler would want to know.
    _library.impl(_name, lambda *_: None, "Meta")
    emulated.register_composite(
        getattr(_operators, _name).default, partial(_capture, getattr(_operators, f"{_name}_kernel"))
    )


class GraphedPunicaWrapper(PunicaWrapperCPU):
    """
    vLLM's CPU wrapper with operators that a graph can hold, and requests without an adapter left alone.
    """

    def update_metadata(
        self,
        mapping: "LoRAMapping",
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        # The rest of the stock metadata are the host values that are not wanted.
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        num_tokens = len(mapping.index_mapping)
        self._token_lora_indices[num_tokens:] = _NO_ADAPTER
        self._embeddings_indices[num_tokens:] = 0

    def _adapters_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._token_lora_indices[: rows.shape[0]]

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        y = y.view(-1, y.shape[-1])
        _operators.lora_shrink(y, x, w_t_all, self._adapters_of(x), scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = y[:, y_offset : y_offset + y_slice_size]
        _operators.lora_expand(part, x, w_t_all, self._adapters_of(x), add_inputs)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        _operators.lora_expand(y, x, lora_b_stacked, self._adapters_of(x), add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        # Not part of a graph, but of the same mind about rows without an adapter.
        x = x.view(-1, x.shape[-1])
        if buffer is None:
            buffer = torch.zeros(x.shape[0], lora_b_stacked.shape[-1], dtype=torch.float32)
        adapters = self.sampler_indices
        _operators.lora_shrink(buffer, x, lora_a_stacked, adapters, scale)
        _operators.lora_expand(y.view(-1, y.shape[-1]), buffer, lora_b_stacked, adapters, True)
