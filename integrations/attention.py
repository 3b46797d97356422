"""
vLLM's CPU attention, with the graph semantics of an NPU's.

On an NPU the lengths of the sequences are host parameters: a graph has them baked in. So the metadata built
here holds its own copy of the lengths, which a graph captures by reference and keeps; what the CPU kernels
split their work by (`scheduler_metadata`) is a new tensor every step anyway. At a FULL capture each layer
leaves its operator with the pool, to be issued again with the metadata of the step before every replay.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from aclgraph_dispatch.backends import emulated

from .acl_graph import full_capture

_library = torch.library.Library("aclgraph_dispatch", "DEF")
_library.define("mla_kv_cache_update(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()")


def _mla_kv_cache_update(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    rows = kv_cache.view(-1, kv_cache.shape[-1])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    rows[slots] = torch.cat([kv_c[kept], k_pe[kept]], dim=-1).to(rows.dtype)


_library.impl("mla_kv_cache_update", _mla_kv_cache_update, "CPU")


def trace_attention_operators() -> None:
    """
    Let graphs capture what vLLM's attention operators do, not the operators: those are Python functions that
    look their metadata up in the forward context, and would look again at replay.
    """
    emulated.register_composite(
        torch.ops.vllm.unified_attention_with_output.default, attention.unified_attention_with_output
    )
    emulated.register_composite(torch.ops.vllm.unified_kv_cache_update.default, attention.unified_kv_cache_update)
    emulated.register_composite(
        torch.ops.vllm.unified_mla_attention_with_output.default,
        mla_attention.unified_mla_attention_with_output,
    )
    emulated.register_composite(
        torch.ops.vllm.unified_mla_kv_cache_update.default, mla_attention.unified_mla_kv_cache_update
    )


class GraphedCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """
    Builds metadata for FULL graphs of decodes, and sorts decodes to the front of a batch.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, *args: Any, **kwargs: Any) -> CPUAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        metadata.seq_lens = metadata.seq_lens.clone()
        return metadata


class GraphedCPUAttentionImpl(CPUAttentionBackendImpl):
    """
    Grouped-query attention whose operator can be refreshed.
    """

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        capture = full_capture()
        if capture is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        # (blocks, heads, block size, 2 * head size) holds keys and values in halves of the third dimension.
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        halves = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
        key_cache, value_cache = halves[:, :, :block_size], halves[:, :, block_size:]

        def issue(metadata: CPUAttentionMetadata) -> None:
            torch.ops._C.cpu_attention_with_kv_cache.default(
                query,
                key_cache,
                value_cache,
                output,
                metadata.query_start_loc,
                metadata.seq_lens,
                self.scale,
                metadata.causal,
                self.alibi_slopes,
                self.sliding_window,
                metadata.block_table,
                self.logits_soft_cap,
                metadata.scheduler_metadata,
                self.sinks,
                metadata.dynamic_causal,
                layer._k_scale_float,
                layer._v_scale_float,
                self.kv_cache_dtype,
            )

        capture.record_attention(layer.layer_name, issue, attn_metadata)
        return output


class GraphedCPUAttentionBackend(CPUAttentionBackend):
    """
    Grouped-query attention on the emulated NPU.
    """

    @staticmethod
    def get_impl_cls() -> type[GraphedCPUAttentionImpl]:
        return GraphedCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[GraphedCPUAttentionMetadataBuilder]:
        return GraphedCPUAttentionMetadataBuilder


class GraphedCPUMLAMetadataBuilder(mla_attention.MLACommonMetadataBuilder):
    """
    Builds metadata for FULL graphs of decodes.

    The CPU's decode kernel takes one token a request. Drafts are verified by the prefill path, as stock vLLM does
    it here, and that is not captured.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(*args, **kwargs)
        if metadata.decode is not None:
            metadata.decode = dataclasses.replace(metadata.decode, seq_lens=metadata.decode.seq_lens.clone())
        return metadata


class GraphedCPUMLAImpl(CPUMLAImpl):
    """
    Multi-head latent attention whose decode operator can be refreshed.
    """

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        capture = full_capture()
        if capture is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = (torch.cat(q, dim=-1) if isinstance(q, tuple) else q).contiguous()
        output = query.new_zeros(*query.shape[:2], self.kv_lora_rank)

        def issue(metadata: Any) -> None:
            torch.ops._C.mla_decode_kvcache.default(
                output,
                query,
                kv_c_and_k_pe_cache,
                self.scale,
                metadata.decode.block_table,
                metadata.decode.seq_lens,
            )

        capture.record_attention(layer.layer_name, issue, attn_metadata)
        return output, None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if full_capture() is None:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        elif kv_cache.numel():
            # Which slots are padding is decided by the operator, at replay; the stock code asks the host.
            torch.ops.aclgraph_dispatch.mla_kv_cache_update(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten()
            )


class GraphedCPUMLABackend(CPUMLABackend):
    """
    Multi-head latent attention on the emulated NPU.
    """

    # Keys are written by an operator of their own: the slots of a PIECEWISE step must be padded like its keys.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_impl_cls() -> type[GraphedCPUMLAImpl]:
        return GraphedCPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[GraphedCPUMLAMetadataBuilder]:
        return GraphedCPUMLAMetadataBuilder
