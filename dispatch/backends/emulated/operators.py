"""
The operators of torch_npu that attention in a graph needs, on the CPU.

They are torch operators, so a capture sees each as one task. Lengths are host parameters (`int[]`): a capture
keeps their values, and only a task update replaces them. Block tables, slots and caches are tensors and are read
at every replay. Nothing is allocated that outlives the call: results, caches and workspace are the caller's.

A request is computed by itself, on copies whose shapes depend on its own lengths only, so that its result is the
same bit for bit in any batch. Its result passes through the workspace and overwrites all that is needed of it:
whoever else has that memory, because it was freed too early, finds his data spoiled.

Workspace
---------
A request of `length` keys takes as many partial results as `length` has ones in binary, as if equal parts were
merged in pairs: 7 keys need three, 8 need one, none need nothing. A partial result is a float32 per head and value
element for each of its query tokens. So a shorter sequence may need more than a longer one, as on the device, and
the most that up to n keys can need is `(n + 1).bit_length() - 1` partial results.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import attrs
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .device import hardware

MAX_ROPE_QUERIES = 16
"""Most query tokens of a request where queries and keys come with a rotary part (torch_npu's documentation)."""
MASK_SIDE = 2048
"""Side of the fixed mask that sparse mode 3 wants; what it masks is known without reading it."""

_PAGED = "_npu_paged_attention: PagedAttentionOperation setup failed!"
_FUSED = (
    "npu_fused_infer_attention_score: NPU function error: "
    "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002"
)
_CACHE = "_npu_reshape_and_cache: ReshapeAndCacheOperation setup failed!"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)

# The parameters of npu_fused_infer_attention_score in torch_npu 2.13, in its order: updates address them by index.
_FUSED_PARAMETERS = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "int[]? actual_seq_lengths=None, int[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "int[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False"
)

_library = torch.library.Library("aclgraph_emulated", "DEF")
_library.define(
    "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
    "float scale_value, Tensor block_table, int[] context_lens, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()"
)
_library.define(
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_indices) -> ()"
)
_library.define(
    f"npu_fused_infer_attention_score.out({_FUSED_PARAMETERS}, Tensor(a!)? workspace=None, "
    "Tensor(b!) attention_out, Tensor(c!) softmax_lse) -> ()"
)


def _refuse(failure: str, fault: str) -> NoReturn:
    raise RuntimeError(f"{failure}: {fault}")


def _show(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{tensor.dtype} of {tuple(tensor.shape)}" for tensor in tensors)


@attrs.frozen(kw_only=True, eq=False)
class _Attention:
    """
    A call, checked: requests one after another, each with query tokens and with keys in blocks of a cache.

    Args:
        failure: How an error begins.
        queries: Parts of the queries, each (tokens, heads, dim); dot products of the parts add up.
        keys: Parts of the keys, each (blocks, block size, key heads, dim).
        values: As the keys.
        block_table: The blocks of each request.
        counts: Query tokens of each request.
        lengths: Keys of each request.
        causal: Whether the last query token sees all keys, the one before it one less, and so on.
    """

    failure: str
    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: torch.Tensor
    block_table: torch.Tensor
    counts: Sequence[int]
    lengths: Sequence[int]
    scale: float
    causal: bool = False

    def __attrs_post_init__(self) -> None:
        given = (*self.queries, *self.keys, self.values)
        for tensor in given:
            if tensor.dtype != given[0].dtype or tensor.dtype not in _DTYPES:
                _refuse(self.failure, f"queries, keys and values must have one float dtype: {_show(*given)}")
        for query, key in zip(self.queries, self.keys, strict=True):
            if key.shape[:3] != self.values.shape[:3]:
                _refuse(self.failure, f"the key and value caches differ in shape: {_show(key, self.values)}")
            if query.shape[2] != key.shape[3] or query.shape[1] % key.shape[2] != 0:
                _refuse(self.failure, f"queries and keys do not fit each other: {_show(query, key)}")
        table = self.block_table
        rows = len(self.counts)
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != rows:
            _refuse(self.failure, f"the block table must be int32 of ({rows}, blocks), not {_show(table)}")
        if len(self.lengths) != rows:
            _refuse(
                self.failure,
                f"the key/value's actual sequence lengths shape size is {len(self.lengths)}, "
                f"it should be equal to batch size({rows})",
            )
        capacity = self.capacity
        for row, length in enumerate(self.lengths):
            if not 0 <= length <= capacity:
                fault = "negative" if length < 0 else f"beyond its {table.shape[1]} blocks of the block table"
                _refuse(self.failure, f"request {row}: length {length} is {fault}")

    @property
    def capacity(self) -> int:
        """
        Most keys that a row of the block table holds.
        """
        return int(self.block_table.shape[1] * self.values.shape[1])

    @property
    def partial_bytes(self) -> int:
        """
        Bytes of a partial result for one query token.
        """
        return int(4 * self.queries[0].shape[1] * self.values.shape[3])

    def workspace_bytes(self) -> int:
        """
        Bytes that these lengths need.
        """
        partials = sum(n * length.bit_count() for n, length in zip(self.counts, self.lengths, strict=True))
        return partials * self.partial_bytes

    def max_workspace_bytes(self) -> int:
        """
        The most that any lengths within the block table need.
        """
        return self.queries[0].shape[0] * ((self.capacity + 1).bit_length() - 1) * self.partial_bytes

    def run(self, out: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """
        Compute into *out*, (tokens, heads, value dim).
        """
        tokens, heads, _ = self.queries[0].shape
        kv_heads, value_dim = self.values.shape[2:]
        expected = (tokens, heads, value_dim)
        if out.shape != expected or out.dtype != self.queries[0].dtype:
            _refuse(self.failure, f"the output must be {self.queries[0].dtype} of {expected}, not {_show(out)}")
        scratch = self._scratch(workspace)
        queries = _join([part.float() for part in self.queries])
        grouped = out.view(tokens, kv_heads, heads // kv_heads, value_dim)
        token = used = 0
        for blocks, count, length in zip(self.block_table.unbind(0), self.counts, self.lengths, strict=True):
            rows = grouped[token : token + count]
            if length == 0:
                rows.zero_()
            elif count:
                key = _join([self._gather(part, blocks, length) for part in self.keys])
                value = self._gather(self.values, blocks, length)
                result = _attend(queries[token : token + count], key, value, self.scale, causal=self.causal)
                partials = length.bit_count()
                region = scratch[used : used + partials * result.numel()].view(partials, *result.shape)
                region.copy_(result)
                rows.copy_(region[0])
                used += region.numel()
            token += count

    def _scratch(self, workspace: torch.Tensor | None) -> torch.Tensor:
        needed = self.workspace_bytes()
        if workspace is None:
            _refuse(self.failure, f"no workspace was given: needs {needed} bytes, an allocation during replay")
        if workspace.dtype != torch.uint8 or not workspace.is_contiguous():
            _refuse(self.failure, f"the workspace must be contiguous uint8, not {_show(workspace)}")
        if workspace.numel() < needed:
            _refuse(self.failure, f"workspace too small: needs {needed} bytes, has {workspace.numel()}")
        return workspace.view(-1)[:needed].view(torch.float32)

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """
        The first *length* rows of a request, (length, key heads, dim).
        """
        num_blocks, block_size, kv_heads, dim = cache.shape
        blocks = blocks[: -(-length // block_size)]
        try:
            return cache.index_select(0, blocks).view(-1, kv_heads, dim)[:length].float()
        except IndexError:
            _refuse(self.failure, f"a block of {blocks.tolist()} lies outside of the cache's {num_blocks}")


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> torch.Tensor:
    """
    Attention of one request, (tokens, key heads, heads per key head, value dim).

    Args:
        query: (tokens, heads, dim), of any alignment.
        key: (length, key heads, dim), fresh: matrix products may depend on how operands are aligned.
        value: As the key.
    """
    count, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    scaled = torch.empty(kv_heads, count, heads // kv_heads, dim)
    torch.mul(query.view(count, kv_heads, -1, dim).transpose(0, 1), scale, out=scaled)
    scores = torch.bmm(scaled.view(kv_heads, -1, dim), key.permute(1, 2, 0))
    if causal and count > 1:
        hidden = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
        scores.view(kv_heads, count, -1, length).masked_fill_(hidden[:, None], float("-inf"))
    weights = scores.softmax(dim=-1)
    if causal and count > length:
        # These tokens see no key at all.
        weights.view(kv_heads, count, -1, length)[:, : count - length] = 0.0
    result = torch.bmm(weights, value.transpose(0, 1))
    return result.view(kv_heads, count, heads // kv_heads, -1).transpose(0, 1)


def _paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: Sequence[int],
) -> _Attention:
    if query.dim() != 3 or query.shape[1] != num_heads:
        _refuse(_PAGED, f"the query must be (tokens, {num_heads}, dim), not {_show(query)}")
    for cache in (key_cache, value_cache):
        if cache.dim() != 4 or cache.shape[2] != num_kv_heads:
            _refuse(_PAGED, f"a cache must be (blocks, block size, {num_kv_heads}, dim), not {_show(cache)}")
    return _Attention(
        failure=_PAGED,
        queries=(query,),
        keys=(key_cache,),
        values=value_cache,
        block_table=block_table,
        counts=[1] * query.shape[0],
        lengths=context_lens,
        scale=scale_value,
    )


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 0,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    **others: Any,
) -> _Attention:
    """
    Check a call. `pre_tokens` and `next_tokens` mean nothing in these sparse modes, `inner_precise` on a CPU.
    """
    for name, option in others.items():
        if name not in _FUSED_NAMES:
            raise TypeError(f"npu_fused_infer_attention_score() got an unexpected keyword argument {name!r}")
        if isinstance(option, torch.Tensor) or option:
            _refuse(_FUSED, f"{name} is not emulated")
    if block_table is None or actual_seq_lengths_kv is None:
        _refuse(_FUSED, "only page attention is emulated: block_table and actual_seq_lengths_kv are needed")
    kv_heads = num_key_value_heads or num_heads
    if (query_rope is None) != (key_rope is None) or (query_rope is not None and kv_heads != 1):
        _refuse(_FUSED, "query_rope and key_rope must be given together, and with one key head")
    counts = _query_counts(query, input_layout, actual_seq_lengths)
    if query_rope is not None and max(counts, default=0) > MAX_ROPE_QUERIES:
        _refuse(_FUSED, f"with query_rope a request may have {MAX_ROPE_QUERIES} query tokens, not {max(counts)}")
    masked = atten_mask is not None
    if (sparse_mode, masked) not in ((0, False), (3, True)):
        _refuse(_FUSED, f"sparse_mode {sparse_mode} {'with' if masked else 'without'} atten_mask is not emulated")
    if atten_mask is not None and (
        atten_mask.dtype not in _MASK_DTYPES or atten_mask.shape[-2:] != (MASK_SIDE, MASK_SIDE)
    ):
        _refuse(_FUSED, f"sparse_mode 3 needs a mask of ({MASK_SIDE}, {MASK_SIDE}), not {_show(atten_mask)}")
    queries = [query] if query_rope is None else [query, query_rope]
    for part in queries:
        if part.shape[:-1] != query.shape[:-1] or part.shape[1] != num_heads:
            _refuse(_FUSED, f"the queries must have {num_heads} heads and agree, not {_show(*queries)}")
    caches = [key, value] if key_rope is None else [key, value, key_rope]
    key, value, *rope = (_blocks_first(cache, kv_heads, block_size) for cache in caches)
    return _Attention(
        failure=_FUSED,
        queries=tuple(part.squeeze(2) if part.dim() == 4 else part for part in queries),
        keys=(key, *rope),
        values=value,
        block_table=block_table,
        counts=counts,
        lengths=actual_seq_lengths_kv,
        scale=scale,
        causal=sparse_mode == 3,
    )


def _query_counts(query: torch.Tensor, layout: str, cumulative: Sequence[int] | None) -> list[int]:
    """
    Query tokens of each request. In BNSD with one token each, `actual_seq_lengths` means nothing.
    """
    if layout == "BNSD" and query.dim() == 4 and query.shape[2] == 1:
        return [1] * query.shape[0]
    if layout != "TND" or query.dim() != 3:
        _refuse(_FUSED, f"emulated are BNSD with one query token and TND, not {layout}: {_show(query)}")
    if cumulative is None:
        _refuse(_FUSED, "when layout is TND, actual_seq_lengths must be given")
    tokens = query.shape[0]
    if (cumulative[-1] if cumulative else 0) != tokens:
        _refuse(
            _FUSED, f"when layout is TND, the last of actual_seq_lengths {list(cumulative)} must equal T({tokens})"
        )
    counts = [end - start for start, end in zip((0, *cumulative), cumulative, strict=False)]
    if min(counts, default=0) < 0:
        _refuse(_FUSED, f"actual_seq_lengths {list(cumulative)} has a negative element or falls")
    return counts


def _blocks_first(cache: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """
    View a cache of (blocks, key heads, block size, dim) or (blocks, block size, key heads * dim) in the order of
    `_Attention`.
    """
    if cache.dim() == 4 and tuple(cache.shape[1:3]) == (num_kv_heads, block_size):
        return cache.transpose(1, 2)
    if cache.dim() == 3 and cache.shape[1] == block_size and cache.shape[2] % num_kv_heads == 0:
        return cache.unflatten(2, (num_kv_heads, -1))
    _refuse(
        _FUSED,
        f"a cache must be (blocks, {num_kv_heads}, {block_size}, dim) or (blocks, {block_size}, "
        f"{num_kv_heads} * dim), not {_show(cache)}",
    )


def _run_paged(*arguments: Any) -> None:
    workspace = arguments[9] if len(arguments) > 9 else None
    _paged(*arguments[:8]).run(arguments[8], workspace)


def _run_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    attention_out: torch.Tensor,
    softmax_lse: torch.Tensor,
    **options: Any,
) -> None:
    attention = _fused(query, key, value, **options)
    if attention_out.shape[:-1] != query.shape[:-1]:
        _refuse(_FUSED, f"attention_out and query differ in shape: {_show(attention_out, query)}")
    attention.run(attention_out.squeeze(2) if attention_out.dim() == 4 else attention_out, workspace)
    softmax_lse.zero_()


def _run_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    if slot_indices.dtype != torch.int32 or slot_indices.dim() != 1:
        _refuse(_CACHE, f"slots must be int32 of one dimension, not {_show(slot_indices)}")
    for states, cache in ((key, key_cache), (value, value_cache)):
        if states.dtype != cache.dtype or states.shape[1:] != cache.shape[2:]:
            _refuse(_CACHE, f"keys or values and their cache do not fit each other: {_show(states, cache)}")
        if states.shape[0] != slot_indices.shape[0]:
            _refuse(_CACHE, f"{slot_indices.shape[0]} slots for {states.shape[0]} tokens")
    if key_cache.shape[:2] != value_cache.shape[:2]:
        _refuse(_CACHE, f"the key and value caches differ in shape: {_show(key_cache, value_cache)}")
    row_of = {slot: row for row, slot in enumerate(slot_indices.tolist())}
    row_of.pop(-1, None)
    if not row_of:
        return
    num_blocks, block_size = key_cache.shape[:2]
    if min(row_of) < 0 or max(row_of) >= num_blocks * block_size:
        _refuse(_CACHE, f"a slot of {sorted(row_of)} lies outside of the cache's {num_blocks * block_size}")
    places = [divmod(slot, block_size) for slot in row_of]
    blocks, offsets, rows = torch.tensor(
        [(*place, row) for place, row in zip(places, row_of.values(), strict=True)]
    ).T
    for states, cache in ((key, key_cache), (value, value_cache)):
        cache.index_put_((blocks, offsets), states.index_select(0, rows))


_library.impl("_npu_paged_attention", _run_paged, "CPU")
_library.impl("_npu_reshape_and_cache", _run_reshape_and_cache, "CPU")
_library.impl("npu_fused_infer_attention_score.out", _run_fused, "CPU")

_operators = torch.ops.aclgraph_emulated
_paged_attention = _operators._npu_paged_attention.default
_reshape_and_cache = _operators._npu_reshape_and_cache.default
_fused_infer_out = _operators.npu_fused_infer_attention_score.out
_FUSED_NAMES = frozenset(argument.name for argument in _fused_infer_out._schema.arguments)


def _npu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor | Sequence[int],
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
) -> None:
    """
    Attention of one query token per request over its blocks of the cache.
    """
    lengths = _on_host(context_lens)
    arguments = (query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, lengths)
    if workspace is None and (_is_for_updates() or not is_in_torch_dispatch_mode()):
        workspace = _own_workspace(query, _paged(*arguments))
    _paged_attention(*arguments, out, workspace)


def _npu_paged_attention_get_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor | Sequence[int],
    out: torch.Tensor,
) -> torch.Tensor:
    """
    A workspace for these lengths; others may need more, shorter ones too.
    """
    lengths = _on_host(context_lens)
    attention = _paged(query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, lengths)
    return _empty(query, attention.workspace_bytes())


def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """
    Write a token's key and value to its slot of the caches: slot -1 is nowhere, and the last of several tokens
    with one slot stays.
    """
    _reshape_and_cache(key, value, key_cache, value_cache, slot_indices)


class _FusedInferAttentionScore:
    """
    Attention of one or more query tokens per request over its blocks of the cache, with separate rotary parts for
    latent attention. It takes all the parameters of torch_npu's and refuses what it does not emulate.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Allocate what `out` needs and run it.
        """
        attention = _fused(query, key, value, **options)
        workspace = _own_workspace(query, attention)
        out = [
            query.new_empty(*query.shape[:-1], attention.values.shape[3]),
            query.new_empty(1, dtype=torch.float32),
        ]
        return self.out(query, key, value, workspace=workspace, out=out, **options)

    def out(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
        out: Sequence[torch.Tensor],
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the attention to `out[0]`, and 0 to `out[1]`, which is for a log-sum that nobody asked for.
        """
        attention_out, softmax_lse = out
        if workspace is None and not is_in_torch_dispatch_mode():
            workspace = _empty(query, _fused(query, key, value, **options).workspace_bytes())
        _fused_infer_out(
            query, key, value, **options, workspace=workspace, attention_out=attention_out, softmax_lse=softmax_lse
        )
        return attention_out, softmax_lse


npu_fused_infer_attention_score = _FusedInferAttentionScore()


def _npu_fused_infer_attention_score_get_max_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """
    A workspace for any lengths that the block table has room for.
    """
    return _empty(query, _fused(query, key, value, **options).max_workspace_bytes())


def _on_host(lengths: torch.Tensor | Sequence[int]) -> Sequence[int]:
    """
    Read lengths as the host does that issues the operator: at once, and seen by no capture.
    """
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if lengths.dtype != torch.int32 or lengths.dim() != 1:
        _refuse(_PAGED, f"context_lens must be int32 of one dimension, not {_show(lengths)}")
    with torch._C._DisableTorchDispatch():
        values: list[int] = lengths.tolist()
    return values


def _is_for_updates() -> bool:
    """
    Whether a graph is being captured that will update the lengths by itself.
    """
    return hardware.capturing is not None and hardware.capturing.auto_dispatch_capture


def _own_workspace(query: torch.Tensor, attention: _Attention) -> torch.Tensor:
    """
    A workspace where the caller gives none: for any lengths if they will be updated.
    """
    return _empty(query, attention.max_workspace_bytes() if _is_for_updates() else attention.workspace_bytes())


def _empty(query: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return query.new_empty(num_bytes, dtype=torch.uint8)
