"""
Attention operators captured as tasks that are issued anew, with other lengths, for every replay.

An operator takes its tensors as they were at capture, and lengths from the host. It owns the block table and its
workspace only: all else belongs to the graph, the model and the KV cache, which must not live on because of it
(vllm-ascend #3331, #3743).

A workspace is enough for all lengths that the block table has room for. That is not what the longest needs, as
shorter ones may need more (#3986, #3987). For MLA torch_npu makes such a workspace. For paged attention it makes
one for given lengths, so each length is tried, in all rows at once; that rows of different lengths never need more
than rows of the one length that needs most is nowhere promised.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import attrs
import torch

from ..params import AttentionParams
from ..step_plan import BatchDescriptor


@attrs.frozen(eq=False)
class PagedAttention:
    """
    Attention of one query token a row over blocks of the KV cache (GQA).

    Args:
        operators: `torch_npu`, or `aclgraph_dispatch.backends.emulated.operators`.
        query: (rows, heads, dim).
        key_cache: (blocks, block size, KV heads, dim).
        value_cache: As the keys.
        num_kv_heads: Heads of the caches.
        num_heads: Heads of the query.
        scale: What dot products are multiplied by.
        block_tables: (rows, blocks of a row), int32; a replay reads it from memory.
        seq_lens: Keys of each row, int32, on the host.
        output: (rows, heads, dim).
        workspace: Bytes on the device; None to let the operator allocate.
    """

    operators: Any
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    num_kv_heads: int
    num_heads: int
    scale: float
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    output: torch.Tensor
    workspace: torch.Tensor | None = None

    BORROWED: ClassVar = ("query", "key_cache", "value_cache", "output")

    @property
    def lengths(self) -> torch.Tensor:
        """
        What it is issued with at capture.
        """
        return self.seq_lens

    def issue(self, seq_lens: torch.Tensor) -> None:
        """
        Issue the operator.
        """
        self.operators._npu_paged_attention(**self._arguments(seq_lens), workspace=self.workspace)

    def max_workspace(self) -> torch.Tensor:
        """
        A workspace for all lengths.
        """
        num_rows, num_blocks = self.block_tables.shape
        workspaces = (
            self.operators._npu_paged_attention_get_workspace(
                **self._arguments(torch.tensor([length] * num_rows, dtype=torch.int32))
            )
            for length in range(num_blocks * self.key_cache.shape[1] + 1)
        )
        return max(workspaces, key=lambda workspace: workspace.nbytes)

    def _arguments(self, seq_lens: torch.Tensor) -> dict[str, Any]:
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "num_kv_heads": self.num_kv_heads,
            "num_heads": self.num_heads,
            "scale_value": self.scale,
            "block_table": self.block_tables,
            "context_lens": seq_lens,
            "out": self.output,
        }


@attrs.frozen
class LatentLengths:
    """
    What `LatentAttention` takes from the host.

    Args:
        keys: Keys of each request.
        query_ends: Where the query tokens of each request end; None for those of the capture.
    """

    keys: list[int]
    query_ends: list[int] | None = None


@attrs.frozen(eq=False)
class LatentAttention:
    """
    Attention of one or more query tokens a request over blocks of cached latents and rotary keys (MLA decode).

    Args:
        operators: As in `PagedAttention`.
        q_nope: Queries, (requests, heads, 1, latent dim) in BNSD, (tokens, heads, latent dim) in TND.
        k_nope: Latents, (blocks, KV heads, block size, latent dim).
        q_pe: Rotary parts of the queries.
        k_pe: Rotary parts of the keys.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of the caches.
        input_layout: "BNSD" for one query token a request, "TND" for several.
        mask: (2048, 2048) in sparse mode 3, else None.
        sparse_mode: 3 for several query tokens, else 0.
        scale: What dot products are multiplied by.
        block_table: (requests, blocks of a request), int32; a replay reads it from memory.
        block_size: Keys in a block.
        seq_lens_list: Keys of each request.
        actual_seq_lengths: Where the query tokens of each request end; None in BNSD.
        attn_output: As *q_nope*.
        softmax_lse: For a log-sum that nobody reads.
        workspace: As in `PagedAttention`.
    """

    operators: Any
    q_nope: torch.Tensor
    k_nope: torch.Tensor
    q_pe: torch.Tensor
    k_pe: torch.Tensor
    num_heads: int
    num_kv_heads: int
    input_layout: str
    mask: torch.Tensor | None
    sparse_mode: int
    scale: float
    block_table: torch.Tensor
    block_size: int
    seq_lens_list: list[int]
    actual_seq_lengths: list[int] | None
    attn_output: torch.Tensor
    softmax_lse: torch.Tensor
    workspace: torch.Tensor | None = None

    BORROWED: ClassVar = ("q_nope", "k_nope", "q_pe", "k_pe", "mask", "attn_output", "softmax_lse")

    @property
    def lengths(self) -> LatentLengths:
        """
        What it is issued with at capture.
        """
        return LatentLengths(self.seq_lens_list)

    def issue(self, lengths: LatentLengths) -> None:
        """
        Issue the operator.
        """
        self.operators.npu_fused_infer_attention_score.out(
            self.q_nope,
            self.k_nope,
            self.k_nope,
            **self._options(lengths),
            workspace=self.workspace,
            out=[self.attn_output, self.softmax_lse],
        )

    def max_workspace(self) -> torch.Tensor:
        """
        A workspace for all lengths.
        """
        return self.operators._npu_fused_infer_attention_score_get_max_workspace(
            self.q_nope, self.k_nope, self.k_nope, **self._options(self.lengths)
        )

    def _options(self, lengths: LatentLengths) -> dict[str, Any]:
        query_ends = self.actual_seq_lengths if lengths.query_ends is None else lengths.query_ends
        return {
            "query_rope": self.q_pe,
            "key_rope": self.k_pe,
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "input_layout": self.input_layout,
            "atten_mask": self.mask,
            "sparse_mode": self.sparse_mode,
            "scale": self.scale,
            "antiquant_mode": 0,
            "antiquant_scale": None,
            "block_table": self.block_table,
            "block_size": self.block_size,
            "actual_seq_lengths": query_ends,
            "actual_seq_lengths_kv": lengths.keys,
        }


def capture_attention(
    attention: PagedAttention | LatentAttention,
    params: AttentionParams,
    descriptor: BatchDescriptor,
    layer_name: str,
    weak_ref_tensor: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """
    Issue *attention* within the capture of *descriptor*'s graph, as the task of a layer.

    The workspace is one for all layers of the graph, and lives until `AttentionParams.forget`.

    Args:
        attention: The operator. What it wants to know of a replay is `seq_lens` or `LatentLengths`.
        params: Where it is recorded.
        descriptor: The graph being captured.
        layer_name: Whose metadata update it.
        weak_ref_tensor: Makes a tensor that does not own the memory of another one.
    """
    tensors = [value for value in attrs.astuple(attention, recurse=False) if isinstance(value, torch.Tensor)]
    shape: Hashable = (type(attention), *[(tensor.shape, tensor.dtype) for tensor in tensors])
    borrowed = {
        name: weak_ref_tensor(tensor)
        for name in attention.BORROWED
        if (tensor := getattr(attention, name)) is not None
    }
    workspace = params.workspace(descriptor, shape, attention.max_workspace)
    captured = attrs.evolve(attention, workspace=workspace, **borrowed)
    params.record(descriptor, layer_name, captured.issue, attention.lengths)
