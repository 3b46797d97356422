"""Attention operators of the emulated device: exact, the same in any batch, and strict."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.emulated import operators

BLOCK_SIZE = 4
NUM_BLOCKS = 40
WIDTH = 5
CAPACITY = BLOCK_SIZE * WIDTH
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

lengths = st.lists(st.integers(0, CAPACITY), min_size=1, max_size=6)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
verifies = st.lists(st.tuples(st.integers(0, 4), st.integers(0, CAPACITY)), min_size=1, max_size=5)
seeds = st.integers(0, 2**32)
exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
few = settings(deadline=None, max_examples=30)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """
    Tensors this small take longer when threads share them.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def randoms(seed, dtype=torch.float32):
    """
    A function that makes random tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def tables(num_rows, seed):
    """
    A block table of blocks in any order, also shared.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NUM_BLOCKS, (num_rows, WIDTH), generator=generator, dtype=torch.int32)


def paged(context_lens, seed=0, shape=(2, 2, 8, 8), dtype=torch.float32):
    """
    Arguments of `_npu_paged_attention` but the workspace.
    """
    kv_heads, group, dim, value_dim = shape
    randn = randoms(seed, dtype)
    heads, num_rows = kv_heads * group, len(context_lens)
    return {
        "query": randn(num_rows, heads, dim),
        "key_cache": randn(NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim),
        "value_cache": randn(NUM_BLOCKS, BLOCK_SIZE, kv_heads, value_dim),
        "num_kv_heads": kv_heads,
        "num_heads": heads,
        "scale_value": dim**-0.5,
        "block_table": tables(num_rows, seed),
        "context_lens": context_lens,
        "out": torch.full((num_rows, heads, value_dim), float("nan"), dtype=dtype),
    }


def latent(requests, seed=0, heads=4, dtype=torch.float32, layout="TND"):
    """
    Arguments of `npu_fused_infer_attention_score` but workspace and output, for latent attention.

    Args:
        requests: Query tokens and keys of each request; in BNSD one query token each.
    """
    randn = randoms(seed, dtype)
    counts = [count for count, _ in requests]
    tokens = sum(counts)
    latents = randn(NUM_BLOCKS, 1, BLOCK_SIZE, 16)
    arguments = {
        "query": randn(tokens, heads, 16),
        "key": latents,
        "value": latents,
        "query_rope": randn(tokens, heads, 4),
        "key_rope": randn(NUM_BLOCKS, 1, BLOCK_SIZE, 4),
        "num_heads": heads,
        "num_key_value_heads": 1,
        "scale": 0.2,
        "input_layout": layout,
        "block_table": tables(len(requests), seed),
        "block_size": BLOCK_SIZE,
        "actual_seq_lengths": [sum(counts[: n + 1]) for n in range(len(counts))],
        "actual_seq_lengths_kv": [length for _, length in requests],
    }
    if layout == "BNSD":
        return arguments | {name: arguments[name].unsqueeze(2) for name in ("query", "query_rope")}
    return arguments | {"sparse_mode": 3, "atten_mask": MASK}


def outputs(arguments):
    """
    Where `npu_fused_infer_attention_score.out` may write.
    """
    query = arguments["query"]
    return [torch.full_like(query, float("nan")), torch.full((1,), float("nan"), dtype=query.dtype)]


def run_paged(arguments):
    """
    The result of `_npu_paged_attention` with a workspace of exactly the size it asks for.
    """
    workspace = operators._npu_paged_attention_get_workspace(**arguments)
    operators._npu_paged_attention(**arguments, workspace=workspace)
    return arguments["out"]


def run_fused(arguments):
    """
    The result of `npu_fused_infer_attention_score.out` with the workspace for any lengths.
    """
    workspace = operators._npu_fused_infer_attention_score_get_max_workspace(**arguments)
    out, _ = operators.npu_fused_infer_attention_score.out(
        **arguments, workspace=workspace, out=outputs(arguments)
    )
    return out.squeeze(2) if out.dim() == 4 else out


def attend(query, key, value, scale, causal=False):
    """
    Attention of one request as torch computes it, (tokens, heads, dim).
    """
    mask = None
    if causal:
        mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).tril(key.shape[0] - query.shape[0])
    query, key, value = (tensor.float().transpose(0, 1)[None] for tensor in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[0].transpose(0, 1)


def close(actual, expected):
    """
    Assert that float32 results agree to 1e-5, and that rounded ones differ in no more than the last bit besides.
    """
    rtol = max(1e-5, torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=rtol, atol=1e-5)


def rows_of(cache, blocks, length):
    """
    The rows of a request in a cache of (blocks, block size, heads, dim), one at a time.
    """
    rows = [cache[blocks[n // BLOCK_SIZE], n % BLOCK_SIZE] for n in range(length)]
    return torch.stack(rows) if rows else cache.new_empty(0, *cache.shape[2:])


@few
@given(context_lens=lengths, shape=shapes, seed=seeds, dtype=st.sampled_from(DTYPES))
def test_paged_attention(context_lens, shape, seed, dtype):
    """
    Every request gets the attention of its one token over its keys, and none of them zeros.
    """
    arguments = paged(context_lens, seed, shape, dtype)
    caches = [arguments["key_cache"], arguments["value_cache"]]

    out = run_paged(arguments)

    for row, length in enumerate(context_lens):
        key, value = (rows_of(cache, arguments["block_table"][row], length) for cache in caches)
        query = arguments["query"][row : row + 1]
        expected = attend(query, key, value, arguments["scale_value"]) if length else torch.zeros(out[:1].shape)
        close(out[row : row + 1], expected)


@few
@given(requests=verifies, seed=seeds, dtype=st.sampled_from(DTYPES))
def test_fused_attention_of_verified_tokens(requests, seed, dtype):
    """
    In TND with sparse mode 3 the last token of a request sees all its keys, the one before it one less; a token
    that sees none gets zeros.
    """
    arguments = latent(requests, seed, dtype=dtype)
    query = torch.cat([arguments["query"], arguments["query_rope"]], dim=-1)
    latents, ropes = (arguments[name].transpose(1, 2) for name in ("key", "key_rope"))

    out = run_fused(arguments)

    token = 0
    for row, (count, length) in enumerate(requests):
        blind = max(0, count - length)
        value, rope = (rows_of(cache, arguments["block_table"][row], length) for cache in (latents, ropes))
        exactly(out[token : token + blind], torch.zeros(blind, *out.shape[1:], dtype=dtype))
        if count > blind:
            rows = slice(token + blind, token + count)
            expected = attend(query[rows], torch.cat([value, rope], dim=-1), value, 0.2, causal=True)
            close(out[rows], expected)
        token += count


@few
@given(context_lens=lengths, seed=seeds)
def test_fused_attention_of_decodes(context_lens, seed):
    """
    One token per request in BNSD is what a causal TND of single tokens is, bit for bit.
    """
    requests = [(1, length) for length in context_lens]

    exactly(run_fused(latent(requests, seed, layout="BNSD")), run_fused(latent(requests, seed)))


@few
@given(context_lens=lengths, seed=seeds)
def test_cache_layouts(context_lens, seed):
    """
    The fused operator reads caches with key heads before or within a block's rows, and agrees with the paged one.
    """
    arguments = paged(context_lens, seed, (2, 2, 8, 8))
    key, value = arguments["key_cache"], arguments["value_cache"]
    common = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": arguments["scale_value"],
        "input_layout": "TND",
        "block_table": arguments["block_table"],
        "block_size": BLOCK_SIZE,
        "actual_seq_lengths": range(1, len(context_lens) + 1),
        "actual_seq_lengths_kv": context_lens,
    }

    expected = run_paged(arguments)

    for caches in ([key.flatten(2), value.flatten(2)], [key.transpose(1, 2), value.transpose(1, 2).contiguous()]):
        fused = {"query": arguments["query"], "key": caches[0], "value": caches[1], **common}
        exactly(run_fused(fused), expected)


@few
@given(context_lens=lengths, shape=shapes, seed=seeds, dtype=st.sampled_from(DTYPES), padding=st.integers(0, 3))
def test_paged_attention_is_batch_invariant(context_lens, shape, seed, dtype, padding):
    """
    A request's result is bit for bit the one it has alone, whatever it is batched with, pad rows included.
    """
    arguments = paged([*context_lens, *[0] * padding], seed, shape, dtype)

    together = run_paged(arguments)

    for row, length in enumerate(context_lens):
        alone = {name: arguments[name][row : row + 1].clone() for name in ("query", "block_table", "out")}
        exactly(run_paged({**arguments, **alone, "context_lens": [length]}), together[row : row + 1])
    assert not together[len(context_lens) :].any()


@few
@given(requests=verifies, seed=seeds, dtype=st.sampled_from(DTYPES), padding=st.integers(0, 3))
def test_fused_attention_is_batch_invariant(requests, seed, dtype, padding):
    """
    A request's result is bit for bit the one it has alone, whatever it is batched with, pad rows included.
    """
    arguments = latent([*requests, *[(2, 0)] * padding], seed, dtype=dtype)

    together = run_fused(arguments)

    token = 0
    for row, (count, length) in enumerate(requests):
        rows = slice(token, token + count)
        alone = {name: arguments[name][rows].clone() for name in ("query", "query_rope")}
        alone |= {"actual_seq_lengths": [count], "actual_seq_lengths_kv": [length]}
        alone["block_table"] = arguments["block_table"][row : row + 1]
        exactly(run_fused({**arguments, **alone}), together[rows])
        token += count
    assert not together[token:].any()


@pytest.mark.parametrize("num_threads", [2, 1])
def test_batch_invariance_at_real_sizes(num_threads):
    """
    Matrix products large enough for other kernels, and queries within a larger tensor, change no bit either.
    """
    torch.set_num_threads(num_threads)
    randn = randoms(1)
    context_lens = [1000, 1, 129, 0, 1024, 517]
    cache = randn(64, 128, 2, 2, 64)
    key_cache, value_cache = cache.unbind(2)
    query = randn(6, 3, 16, 64)[:, 1]
    table = torch.arange(48, dtype=torch.int32).view(6, 8)

    def run(rows):
        out = torch.empty(rows.stop - rows.start, 16, 64)
        operators._npu_paged_attention(
            query[rows], key_cache, value_cache, 2, 16, 0.125, table[rows], context_lens[rows], out
        )
        return out

    exactly(torch.cat([run(slice(n, n + 1)) for n in range(6)]), run(slice(0, 6)))


@given(context_lens=lengths)
@few
def test_workspace_size(context_lens):
    """
    A request needs a float per head and value element for each one in the binary form of its length.
    """
    workspace = operators._npu_paged_attention_get_workspace(**paged(context_lens, shape=(2, 2, 8, 3)))

    assert workspace.dtype == torch.uint8
    assert workspace.numel() == 4 * 4 * 3 * sum(bin(length).count("1") for length in context_lens)


def test_a_shorter_sequence_can_need_more():
    """
    The workspace for the longest sequence is too small for shorter ones; the maximum is enough for any, and just.
    """
    needed = [
        operators._npu_paged_attention_get_workspace(**paged([length])).numel() for length in range(CAPACITY + 1)
    ]
    arguments = latent([(1, 0)], layout="BNSD")
    enough = operators._npu_fused_infer_attention_score_get_max_workspace(**arguments).numel()

    assert needed[16] < needed[15] > needed[7] > needed[8]
    assert needed[CAPACITY] < max(needed)
    assert enough * 32 == max(needed) * 64  # 4 heads with 16 value elements; the paged ones have 8


@few
@given(requests=verifies, others=st.lists(st.integers(0, CAPACITY), min_size=5, max_size=5))
def test_max_workspace(requests, others):
    """
    The maximum does not depend on the lengths it was asked with.
    """
    arguments = latent(requests)
    workspace = operators._npu_fused_infer_attention_score_get_max_workspace(**arguments)
    arguments["actual_seq_lengths_kv"] = others[: len(requests)]

    operators.npu_fused_infer_attention_score.out(**arguments, workspace=workspace, out=outputs(arguments))


@few
@given(context_lens=lengths, spare=st.integers(0, 9))
def test_workspace_is_written(context_lens, spare):
    """
    All that is needed of the workspace is written with results, and nothing beyond it.
    """
    arguments = paged(context_lens, dtype=torch.float32)
    needed = operators._npu_paged_attention_get_workspace(**arguments).numel()
    workspace = torch.full((needed + spare,), 255, dtype=torch.uint8)

    operators._npu_paged_attention(**arguments, workspace=workspace)

    assert workspace[:needed].view(torch.float32).isfinite().all()
    assert (workspace[needed:] == 255).all()


def test_workspace_too_small():
    """
    A workspace that lacks a byte is refused, with both sizes.
    """
    arguments = paged([7, 8])
    workspace = operators._npu_paged_attention_get_workspace(**arguments)[:-1]

    with pytest.raises(RuntimeError, match="workspace too small: needs 512 bytes, has 511"):
        operators._npu_paged_attention(**arguments, workspace=workspace)


class Seen(TorchDispatchMode):
    """
    Collects the operators that a capture would note, and runs none of them.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))


@pytest.mark.parametrize("form", ["paged", "fused"])
def test_missing_workspace(form):
    """
    Eagerly an operator makes its own workspace; captured without one, it would allocate at replay, and is refused.
    """
    if form == "paged":
        arguments = paged([3, 0])
        expected = run_paged(paged([3, 0]))
        run = functools.partial(operators._npu_paged_attention, **arguments)
    else:
        arguments = latent([(2, 3), (1, 4)])
        expected = run_fused(arguments)
        arguments["out"] = outputs(arguments)
        run = functools.partial(operators.npu_fused_infer_attention_score.out, **arguments)

    run()
    out = arguments["out"] if form == "paged" else arguments["out"][0]
    exactly(out, expected)
    with Seen() as seen:
        run()
    ((func, args, kwargs),) = seen.calls
    with pytest.raises(
        RuntimeError, match=r"no workspace was given: needs \d+ bytes, an allocation during replay"
    ):
        func(*args, **kwargs)


def test_lengths_are_host_parameters():
    """
    Lengths, from a tensor too, go into the operator by value, and reading them is no operator.
    """
    arguments = paged(torch.tensor([3, 0], dtype=torch.int32))
    workspace = torch.empty(1024, dtype=torch.uint8)
    with Seen() as seen:
        operators._npu_paged_attention(**arguments, workspace=workspace)
    arguments["context_lens"].zero_()

    ((_, args, _),) = seen.calls
    assert args[7] == [3, 0]
    assert args[6] is arguments["block_table"]


def test_schemas():
    """
    Operators say what they write, and updates find lengths where torch_npu has them.
    """
    fused = operators._fused_infer_out._schema
    paged_schema = operators._paged_attention._schema
    cache = operators._reshape_and_cache._schema
    written = [
        [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        for schema in (paged_schema, fused, cache)
    ]

    assert written == [
        ["out", "workspace"],
        ["workspace", "attention_out", "softmax_lse"],
        ["key_cache", "value_cache"],
    ]
    assert [paged_schema.arguments[7].name] == ["context_lens"]
    assert [fused.arguments[n].name for n in (5, 6)] == ["actual_seq_lengths", "actual_seq_lengths_kv"]


def test_default_form():
    """
    Called plainly, the fused operator returns what it writes in its out form; the log-sum not asked for is 0.
    """
    arguments = latent([(2, 9), (1, 1)])

    out, softmax_lse = operators.npu_fused_infer_attention_score(**arguments)

    exactly(out, run_fused(arguments))
    exactly(softmax_lse, torch.zeros(1))


def test_graph():
    """
    A captured operator keeps its lengths and reads its block table anew, until an update brings other lengths.
    """
    arguments = paged([3, 0])
    workspace = torch.empty(1024, dtype=torch.uint8)
    table, out = arguments["block_table"], arguments["out"]
    stream = npu.Stream()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        npu.graph_task_group_begin(npu.current_stream())
        operators._npu_paged_attention(**arguments, workspace=workspace)
        handle = npu.graph_task_group_end(npu.current_stream())

    table.copy_(tables(2, 5))
    graph.replay()
    npu.synchronize()
    exactly(out, run_paged({**arguments, "out": out.clone()}))
    npu.graph_task_update_begin(stream, handle)
    operators._npu_paged_attention(**{**arguments, "context_lens": [15, 16]}, workspace=workspace)
    npu.graph_task_update_end(stream)
    npu.synchronize()
    graph.replay()
    npu.synchronize()
    exactly(out, run_paged({**arguments, "context_lens": [15, 16], "out": out.clone()}))


ints = functools.partial(torch.tensor, dtype=torch.int32)

PAGED_FAULTS = {
    "lengths missing": ({"context_lens": [3]}, r"lengths shape size is 1, it should be equal to batch size\(2\)"),
    "length negative": ({"context_lens": [3, -1]}, "request 1: length -1 is negative"),
    "length beyond": ({"context_lens": [CAPACITY + 1, 1]}, "length 21 is beyond its 5 blocks of the block table"),
    "rows of table": (
        {"block_table": tables(3, 0)},
        r"must be int32 of \(2, blocks\), not torch.int32 of \(3, 5\)",
    ),
    "dtype of table": ({"block_table": tables(2, 0).long()}, r"must be int32 of \(2, blocks\), not torch.int64"),
    "no such block": ({"block_table": ints([[NUM_BLOCKS] * 5] * 2)}, r"\[40\] lies outside of the cache's 40"),
    "negative block": ({"block_table": ints([[-1] * 5] * 2)}, r"block of \[-1\] lies outside"),
    "num_heads": ({"num_heads": 8}, r"query must be \(tokens, 8, dim\)"),
    "num_kv_heads": ({"num_kv_heads": 4}, r"cache must be \(blocks, block size, 4, dim\)"),
    "dtype": ({"key_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 8).half()}, "must have one float dtype"),
    "integers": ({"query": torch.zeros(2, 4, 8, dtype=torch.int8)}, "must have one float dtype"),
    "key dim": ({"key_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 9)}, "do not fit each other"),
    "caches": ({"value_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE + 1, 2, 8)}, "caches differ in shape"),
    "out shape": ({"out": torch.zeros(2, 4, 9)}, "output must be"),
    "out dtype": ({"out": torch.zeros(2, 4, 8).half()}, "output must be"),
    "context_lens": ({"context_lens": torch.tensor([1, 2])}, "context_lens must be int32"),
    "workspace": ({"workspace": torch.zeros(999)}, "workspace must be contiguous uint8"),
}


@pytest.mark.parametrize(("change", "match"), PAGED_FAULTS.values(), ids=PAGED_FAULTS)
def test_paged_faults(change, match):
    """
    A call that a device would refuse or misread is refused, with the fault named, and writes nothing.
    """
    arguments = {**paged([3, 0]), "workspace": torch.zeros(999, dtype=torch.uint8), **change}

    with pytest.raises(RuntimeError, match=match):
        operators._npu_paged_attention(**arguments)
    assert change.get("out") is not None or arguments["out"].isnan().all()


FUSED_FAULTS = {
    "lengths missing": (
        {"actual_seq_lengths_kv": [3]},
        r"561002.* size is 1, it should be equal to batch size\(2\)",
    ),
    "no lengths": ({"actual_seq_lengths_kv": None}, "only page attention is emulated"),
    "no table": ({"block_table": None}, "only page attention is emulated"),
    "rows of table": ({"block_table": tables(3, 0)}, r"must be int32 of \(2, blocks\)"),
    "last not T": (
        {"actual_seq_lengths": [2, 4]},
        r"561002.*last of actual_seq_lengths \[2, 4\] must equal T\(3\)",
    ),
    "falling": ({"actual_seq_lengths": [4, 3]}, r"\[4, 3\] has a negative element or falls"),
    "no cumulative": ({"actual_seq_lengths": None}, "actual_seq_lengths must be given"),
    "length negative": ({"actual_seq_lengths_kv": [3, -1]}, "length -1 is negative"),
    "length beyond": ({"actual_seq_lengths_kv": [3, 21]}, "length 21 is beyond"),
    "no mask": ({"atten_mask": None}, "sparse_mode 3 without atten_mask"),
    "mask": ({"sparse_mode": 0}, "sparse_mode 0 with atten_mask"),
    "mask shape": ({"atten_mask": MASK[:3, :3]}, r"needs a mask of \(2048, 2048\)"),
    "layout": ({"input_layout": "BSND"}, "not BSND"),
    "half a rope": ({"key_rope": None}, "query_rope and key_rope must be given together"),
    "rope shape": ({"query_rope": torch.zeros(2, 4, 4)}, "must have 4 heads and agree"),
    "block_size": ({"block_size": 16}, "cache must be"),
    "quantized": ({"antiquant_scale": torch.ones(1)}, "antiquant_scale is not emulated"),
    "log-sum": ({"softmax_lse_flag": True}, "softmax_lse_flag is not emulated"),
    "output": ({"out": [torch.zeros(2, 4, 16), torch.zeros(1)]}, "attention_out and query differ in shape"),
    "workspace": (
        {"workspace": torch.zeros(4, dtype=torch.uint8)},
        "workspace too small: needs 1280 bytes, has 4",
    ),
}


@pytest.mark.parametrize(("change", "match"), FUSED_FAULTS.values(), ids=FUSED_FAULTS)
def test_fused_faults(change, match):
    """
    A call that a device would refuse or misread is refused, with the fault named.
    """
    arguments = latent([(2, 3), (1, 4)])
    out = outputs(arguments)
    workspace = torch.zeros(9999, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match=match):
        operators.npu_fused_infer_attention_score.out(
            **{**arguments, "workspace": workspace, "out": out, **change}
        )
    assert out[0].isnan().all()


def test_too_many_verified_tokens():
    """
    With a rotary part a request has up to 16 query tokens.
    """
    run_fused(latent([(16, 20)]))
    with pytest.raises(RuntimeError, match="16 query tokens, not 17"):
        run_fused(latent([(17, 20)]))


def test_options_that_change_nothing():
    """
    Options given with their defaults, and those without meaning here, are accepted; unknown ones are not.
    """
    arguments = latent([(2, 3), (1, 4)])
    expected = run_fused(arguments)

    exactly(run_fused({**arguments, "antiquant_mode": 0, "pse_shift": None, "inner_precise": 1}), expected)
    exactly(run_fused({**arguments, "pre_tokens": 1, "next_tokens": 0}), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'pretokens'"):
        run_fused({**arguments, "pretokens": 1})


@few
@given(slots=st.lists(st.integers(-1, 11), max_size=8), shape=st.sampled_from([(1, 5, 2), (2, 3, 3)]), seed=seeds)
def test_reshape_and_cache(slots, shape, seed):
    """
    Every token goes to its slot of both caches, also of a layer's part of a larger tensor: slot -1 is nowhere,
    of two tokens with one slot the last stays, and all else is as it was.
    """
    heads, key_dim, value_dim = shape
    randn = randoms(seed)
    key, value = randn(len(slots), heads, key_dim), randn(len(slots), heads, value_dim)
    caches = [randn(3, 2, 4, heads, dim)[:, 1] for dim in (key_dim, value_dim)]
    expected = [cache.clone() for cache in caches]
    for row, slot in enumerate(slots):
        if slot != -1:
            for cache, states in zip(expected, (key, value), strict=True):
                cache[slot // 4, slot % 4] = states[row]

    operators._npu_reshape_and_cache(key, value, *caches, ints(slots))

    exactly(caches, expected)


CACHE_FAULTS = {
    "beyond": ({"slot_indices": ints([0, 8])}, r"\[0, 8\] lies outside of the cache's 8"),
    "negative": ({"slot_indices": ints([0, -2])}, r"\[-2, 0\] lies outside"),
    "dtype of slots": ({"slot_indices": torch.tensor([0, 1])}, "slots must be int32"),
    "slots missing": ({"slot_indices": ints([0])}, "1 slots for 2 tokens"),
    "dtype": ({"value": torch.zeros(2, 1, 3).half()}, "do not fit each other"),
    "heads": ({"key": torch.zeros(2, 2, 3)}, "do not fit each other"),
    "caches": ({"value_cache": torch.zeros(3, 4, 1, 3)}, "caches differ in shape"),
}


@pytest.mark.parametrize(("change", "match"), CACHE_FAULTS.values(), ids=CACHE_FAULTS)
def test_reshape_and_cache_faults(change, match):
    """
    Slots that do not exist, or tensors that do not fit each other, are refused, and nothing is written.
    """
    arguments = {
        "key": torch.ones(2, 1, 3),
        "value": torch.ones(2, 1, 3),
        "key_cache": torch.zeros(2, 4, 1, 3),
        "value_cache": torch.zeros(2, 4, 1, 3),
        "slot_indices": ints([0, 1]),
        **change,
    }

    with pytest.raises(RuntimeError, match=match):
        operators._npu_reshape_and_cache(**arguments)
    assert not arguments["key_cache"].any()
    assert not arguments["value_cache"].any()
