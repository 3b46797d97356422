"""
Attention operators captured as tasks that are issued anew, with other lengths, for every replay.

An operator takes its tensors as they were at capture, and lengths from the host. It owns the block table and its
workspace only: all else belongs to the graph, the model and the KV cache, which must not live on because of it
(vllm-ascend #3331, #3743).

A workspace is enough for all lengths that the block table has room for. That is not what the longest needs, as
shorter ones may need more (#3986, #3987). For MLA torch_npu makes such a workspace. For paged attention it makes one
for given lengths, so each length is tried, in all rows at once; that rows of different lengths never need more than
rows of the one length that needs most is nowhere promised.

`update_attn_params` and `update_mla_attn_params` stand for vllm-ascend v0.11's functions of these names, for runners
that replay a graph first and update it then. Other callers use `AttentionParams.replay`.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import attrs
import torch

from ..errors import ReplayError
from ..lengths import pad_lengths, uniform_query_ends
from ..params import AttentionParams
from ..step_plan import BatchDescriptor

MTP_METHODS = ("deepseek_mtp", "mtp")
"""What vLLM calls the method in which every request has the same number of drafts; v0.11 has the first name."""


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


def update_attn_params(
    update_stream: Any, forward_context: Any, runtime_shape: int, kv_transfer_config: Any = None
) -> None:
    """
    Update the `PagedAttention` of all layers for a replay that was submitted.

    Args:
        update_stream: The backend's, which `AttentionParams.order_updates` made wait before the replay.
        forward_context: With `batch_descriptor`, ours or vLLM's, and `attn_metadata`: by layer name, what has
            `seq_lens`, the keys of each request as an int32 tensor on the host. Rows beyond have none.
        runtime_shape: Padded number of tokens.
        kv_transfer_config: Changes nothing: the stream is entered for each layer, as KV transfer wants it.

    Raises:
        ReplayError: The arguments do not fit each other or what was captured. Like any exception, it leaves the
            replay with worthless results and the graph unusable until its next capture.
    """

    def lengths(metadata: Any) -> torch.Tensor:
        return torch.tensor(pad_lengths(metadata.seq_lens.tolist(), runtime_shape), dtype=torch.int32)

    _update(update_stream, forward_context, runtime_shape, lengths)


def update_mla_attn_params(
    update_stream: Any, forward_context: Any, runtime_shape: int, speculative_config: Any
) -> None:
    """
    Update the `LatentAttention` of all layers for a replay that was submitted.

    Args:
        update_stream: As in `update_attn_params`.
        forward_context: As there, but `attn_metadata` have `decode.seq_lens_list`.
        runtime_shape: Padded number of tokens.
        speculative_config: With MTP, every row has `num_speculative_tokens` + 1 query tokens; else, or if it is
            None, a row is a token.

    Raises:
        ReplayError: As there.
    """
    is_mtp = speculative_config is not None and speculative_config.method in MTP_METHODS
    query_len = speculative_config.num_speculative_tokens + 1 if is_mtp else 1

    def lengths(metadata: Any) -> LatentLengths:
        ends = uniform_query_ends(runtime_shape, query_len)
        return LatentLengths(pad_lengths(metadata.decode.seq_lens_list, len(ends)), ends if is_mtp else None)

    _update(update_stream, forward_context, runtime_shape, lengths)


def _update(
    update_stream: Any, forward_context: Any, runtime_shape: int, lengths: Callable[[Any], Any]
) -> None:
    described, metadata = forward_context.batch_descriptor, forward_context.attn_metadata
    params = get_attention_params(_role(forward_context))
    replayed = [d for d in params.descriptors if d.role == _role(forward_context) and _describes(described, d)]
    fault = None
    if len(replayed) != 1:
        fault = f"{described} must describe one captured graph, not {len(replayed)}: {replayed}"
    elif replayed[0].num_tokens != runtime_shape:
        fault = f"runtime_shape must be the graph's number of tokens: {runtime_shape} for {replayed[0]}"
    elif update_stream != params.backend.update_stream:
        fault = (
            "updates must be submitted to the stream that waited before the replay: "
            f"{update_stream} is not the backend's {params.backend.update_stream}"
        )
    if fault:
        error = ReplayError(fault)
        for descriptor in replayed:  # one of them is being replayed
            params.abandon(descriptor, error)
        raise error

    known: dict[int, Any] = {}

    def lengths_of(layer_name: str) -> Any:
        if layer_name not in metadata:
            raise ReplayError(f"no attention metadata for {layer_name} in a replay of {replayed[0]}")
        own = metadata[layer_name]  # often one object for all layers
        if id(own) not in known:
            known[id(own)] = lengths(own)
        return known[id(own)]

    params.update(replayed[0], lengths_of)


def _role(forward_context: Any) -> str:
    if isinstance(forward_context.batch_descriptor, BatchDescriptor):
        return forward_context.batch_descriptor.role
    return "drafter" if getattr(forward_context, "is_draft_model", False) else "target"


def _describes(described: Any, descriptor: BatchDescriptor) -> bool:
    """
    Whether all that *described*, ours or vLLM's of any version, says holds for *descriptor*.
    """
    if isinstance(described, BatchDescriptor):
        return described == descriptor
    if getattr(described, "num_tokens", None) != descriptor.num_tokens:
        return False
    is_uniform = descriptor.query_len is not None
    facts = {
        "num_reqs": descriptor.num_reqs,
        "uniform": is_uniform,
        "uniform_decode": is_uniform,  # v0.11
        "has_lora": descriptor.num_active_loras > 0,
        "num_active_loras": descriptor.num_active_loras,
    }
    return all(getattr(described, name, None) in (None, fact) for name, fact in facts.items())


_params: dict[str, AttentionParams] = {}


def set_attention_params(params: AttentionParams, role: str = "target") -> None:
    """
    Let the update functions, which are told no engine, use *params* for the graphs of *role*.

    Raises:
        ValueError: The role has some already.
    """
    if role in _params:
        msg = f"attention parameters of {role!r} are set once: call clear_attention_params when their engine is gone"
        raise ValueError(msg)
    _params[role] = params


def get_attention_params(role: str = "target") -> AttentionParams:
    """
    The parameters of *role*.

    Raises:
        ReplayError: None were set.
    """
    if role not in _params:
        raise ReplayError(f"no attention parameters of {role!r}: call set_attention_params before graphs are captured")
    return _params[role]


def clear_attention_params(*roles: str) -> None:
    """
    Forget the parameters of *roles*, or of all; their engine is gone.
    """
    for role in roles or tuple(_params):
        _params.pop(role, None)
