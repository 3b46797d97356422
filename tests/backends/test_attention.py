"""Attention captured in graphs on the emulated device, updated by the seed systems' functions, equals eager."""

import gc
import random
import weakref
from types import SimpleNamespace

import attrs
import pytest
import torch

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.attention import LatentAttention, PagedAttention, capture_attention
from aclgraph_dispatch.backends.emulated import operators
from aclgraph_dispatch.backends.emulated.faults import StaleParameterError
from aclgraph_dispatch.backends.graph_params import (
    clear_attention_params,
    set_attention_params,
    update_attn_params,
    update_mla_attn_params,
)
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.errors import CaptureError, ReplayError
from aclgraph_dispatch.pool import GraphKey, GraphPool

ROWS, HEADS, DIM, ROPE = 4, 2, 4, 2
BLOCK_SIZE, WIDTH = 4, 4
CAPACITY = BLOCK_SIZE * WIDTH
NUM_BLOCKS = 24
LAYERS = ["layer.0", "layer.1", "layer.2"]
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
NUM_SEEDS = 100

KINDS = {"gqa": ("gqa", 0), "mla": ("mla", 0), "mla-mtp1": ("mla", 1), "mla-mtp3": ("mla", 3)}


@pytest.fixture(autouse=True)
def _inference_mode():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small take longer when threads share them
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)
    clear_attention_params()


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    """
    The operator, and the drafts of each request.
    """
    return request.param


class Spy:
    """
    `operators`, and what was asked of them.
    """

    def __init__(self):
        self.num_workspaces = 0
        self.num_calls_left = -1
        self.workspaces = []
        self.npu_fused_infer_attention_score = SimpleNamespace(out=self.fused)

    def call(self, workspace):
        """
        Note a call, or fail.
        """
        if self.num_calls_left == 0:
            raise RuntimeError("setup failed")
        self.num_calls_left -= 1
        self.workspaces.append(workspace.data_ptr())

    def _npu_paged_attention(self, **arguments):
        self.call(arguments["workspace"])
        operators._npu_paged_attention(**arguments)

    def fused(self, *arguments, **options):
        self.call(options["workspace"])
        operators.npu_fused_infer_attention_score.out(*arguments, **options)

    def _npu_paged_attention_get_workspace(self, **arguments):
        self.num_workspaces += 1
        return operators._npu_paged_attention_get_workspace(**arguments)

    def _npu_fused_infer_attention_score_get_max_workspace(self, *arguments, **options):
        self.num_workspaces += 1
        return operators._npu_fused_infer_attention_score_get_max_workspace(*arguments, **options)


@attrs.frozen
class Model:
    """
    Layers of nothing but attention; with a LoRA adapter, or as a drafter, they compute something else.

    Args:
        kind: "gqa" or "mla".
        query_len: Query tokens of each request.
        caches: By layer, keys and values, or latents and rotary keys; each (blocks, block size, 1, dim).
    """

    kind: str
    query_len: int
    caches: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def random(cls, kind):
        """
        A model of *kind* with full caches.
        """
        name, num_drafts = kind
        generator = torch.Generator().manual_seed(0)
        dims = (DIM, DIM if name == "gqa" else ROPE)
        caches = [
            tuple(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 1, dim, generator=generator) for dim in dims) for _ in LAYERS
        ]
        return cls(name, num_drafts + 1, caches)

    def forward(self, descriptor, x, attend):
        """
        Compute *x*, (tokens, heads, dim + rotary dim); *attend* computes the attention of a layer.
        """
        factor = 1.5 + descriptor.num_active_loras + 3 * len(descriptor.role)
        for i in range(len(LAYERS)):
            out = attend(i, x * (factor / (i + 1)))
            x = torch.cat([(x[..., :DIM] + out).clamp(-3, 3), x[..., DIM:]], dim=-1)
        return x

    def eager(self, descriptor, x, table, lengths):
        """
        What the operators compute without graphs, padding and workspaces of ours.
        """

        def attend(i, query):
            keys, values = self.caches[i]
            if self.kind == "gqa":
                out = torch.empty(len(lengths), HEADS, DIM)
                seq_lens = torch.tensor(lengths, dtype=torch.int32)
                operators._npu_paged_attention(
                    query[..., :DIM].contiguous(), keys, values, 1, HEADS, 0.3, table, seq_lens, out
                )
                return out
            latents = keys.view(NUM_BLOCKS, 1, BLOCK_SIZE, DIM)
            out, _ = operators.npu_fused_infer_attention_score(
                self.laid_out(query[..., :DIM]),
                latents,
                latents,
                query_rope=self.laid_out(query[..., DIM:]),
                key_rope=values.view(NUM_BLOCKS, 1, BLOCK_SIZE, ROPE),
                num_heads=HEADS,
                num_key_value_heads=1,
                scale=0.3,
                block_table=table,
                block_size=BLOCK_SIZE,
                actual_seq_lengths=[self.query_len * (n + 1) for n in range(len(lengths))],
                actual_seq_lengths_kv=lengths,
                **self.options(),
            )
            return out.view(-1, HEADS, DIM)

        return self.forward(descriptor, x, attend)

    def laid_out(self, query):
        """
        A part of the queries as the fused operator wants it.
        """
        return query.unsqueeze(2) if self.query_len == 1 else query

    def options(self):
        """
        What the fused operator is told about it.
        """
        if self.query_len == 1:
            return {"input_layout": "BNSD", "sparse_mode": 0, "atten_mask": None}
        return {"input_layout": "TND", "sparse_mode": 3, "atten_mask": MASK}

    def attention(self, namespace, i, query, table):
        """
        The operator of layer *i* as a value, with lengths of 1; and its result, (tokens, heads, dim).
        """
        keys, values = self.caches[i]
        num_rows = len(table)
        if self.kind == "gqa":
            query = query[..., :DIM].contiguous()
            seq_lens = torch.tensor([1] * num_rows, dtype=torch.int32)
            out = torch.empty_like(query)
            return PagedAttention(namespace, query, keys, values, 1, HEADS, 0.3, table, seq_lens, out), out
        q_nope, q_pe = self.laid_out(query[..., :DIM].contiguous()), self.laid_out(query[..., DIM:])
        out, softmax_lse = torch.empty_like(q_nope), torch.empty(len(query))
        options = self.options()
        attention = LatentAttention(
            namespace,
            q_nope,
            keys.view(NUM_BLOCKS, 1, BLOCK_SIZE, DIM),
            q_pe,
            values.view(NUM_BLOCKS, 1, BLOCK_SIZE, ROPE),
            num_heads=HEADS,
            num_kv_heads=1,
            input_layout=options["input_layout"],
            mask=options["atten_mask"],
            sparse_mode=options["sparse_mode"],
            scale=0.3,
            block_table=table,
            block_size=BLOCK_SIZE,
            seq_lens_list=[1] * num_rows,
            actual_seq_lengths=[self.query_len * (n + 1) for n in range(num_rows)] if self.query_len > 1 else None,
            attn_output=out,
            softmax_lse=softmax_lse,
        )
        return attention, out.view(-1, HEADS, DIM)


@attrs.frozen
class Step:
    """
    What the live rows of one step hold.
    """

    descriptor: BatchDescriptor
    x: torch.Tensor
    table: torch.Tensor
    lengths: list[int]

    @classmethod
    def random(cls, rng, descriptor, lengths):
        """
        A step with one live row for each of *lengths*.
        """
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        x = torch.randn(len(lengths) * descriptor.query_len, HEADS, DIM + ROPE, generator=generator)
        table = torch.randint(NUM_BLOCKS, (len(lengths), WIDTH), generator=generator, dtype=torch.int32)
        return cls(descriptor, x, table, lengths)


class Engine:
    """
    A model with graphs, persistent buffers, and the seed systems' way to replay: replay, then update.
    """

    def __init__(self, kind):
        self.model = Model.random(kind)
        self.spy = Spy()
        self.backend = NpuBackend(npu, npu.weak_ref_tensor)
        self.pool = GraphPool(self.backend)
        self.x = torch.zeros(ROWS * self.model.query_len, HEADS, DIM + ROPE)
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.graphs = {}
        clear_attention_params()
        for role in ("target", "drafter"):
            set_attention_params(self.pool.params, role)

    def descriptor(self, num_rows=ROWS, num_loras=0, role="target"):
        """
        A graph's.
        """
        query_len = self.model.query_len
        return BatchDescriptor(RuntimeMode.FULL, num_rows * query_len, num_rows, query_len, num_loras, role)

    def capture(self, *descriptors):
        """
        Capture graphs.
        """
        for descriptor in descriptors:

            def attend(i, query, descriptor=descriptor):
                attention, out = self.model.attention(self.spy, i, query, self.table[: descriptor.num_reqs])
                capture_attention(attention, self.pool.params, descriptor, LAYERS[i], npu.weak_ref_tensor)
                return out

            def run(descriptor=descriptor, attend=attend):
                return self.model.forward(descriptor, self.x[: descriptor.num_tokens], attend)

            graph, _ = self.pool.capture(GraphKey(descriptor), run, addresses=[], release_output=True)
            self.graphs[descriptor] = graph

    def submit(self, step):
        """
        Submit *step* and return its result, which is known when the device has come that far. Rows without a
        request keep what they held.
        """
        self.x[: len(step.x)].copy_(step.x)
        self.table[: len(step.table)].copy_(step.table)
        self.pool.params.order_updates(step.descriptor)
        output = self.graphs[step.descriptor].replay([])
        self.update(step.descriptor, step.lengths)
        return output[: len(step.x)].clone()

    def update(self, descriptor, lengths):
        """
        Update the graph under replay.
        """
        own = SimpleNamespace(
            seq_lens=torch.tensor(lengths, dtype=torch.int32), decode=SimpleNamespace(seq_lens_list=lengths)
        )
        context = SimpleNamespace(batch_descriptor=descriptor, attn_metadata=dict.fromkeys(LAYERS, own))
        stream, query_len = self.backend.update_stream, self.model.query_len
        if self.model.kind == "gqa":
            update_attn_params(stream, context, descriptor.num_tokens)
        else:
            config = SimpleNamespace(method="deepseek_mtp", num_speculative_tokens=query_len - 1)
            update_mla_attn_params(stream, context, descriptor.num_tokens, config if query_len > 1 else None)

    def eager(self, step):
        """
        The result that *step* must have.
        """
        return self.model.eager(step.descriptor, step.x, step.table, step.lengths)


def exactly(found, expected):
    """
    Compare bit for bit.
    """
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def draw(rng, engine, *descriptors):
    """
    A few steps, with more live rows and with fewer.
    """
    steps = []
    for _ in range(rng.randint(3, 6)):
        descriptor = rng.choice(descriptors)
        lengths = [rng.randint(1, CAPACITY) for _ in range(rng.randint(1, descriptor.num_reqs))]
        steps.append(Step.random(rng, descriptor, lengths))
    return steps


def test_every_length(kind):
    """
    The workspace taken at capture is enough for all lengths, alone and mixed, and nothing else is ever used.
    """
    engine, rng = Engine(kind), random.Random(0)
    descriptor = engine.descriptor()
    engine.capture(descriptor)
    num_workspaces = engine.spy.num_workspaces
    batches = [[length] * ROWS for length in range(CAPACITY + 1)]
    batches += [[rng.randint(0, CAPACITY) for _ in range(rng.randint(1, ROWS))] for _ in range(20)]
    for lengths in batches:
        step = Step.random(rng, descriptor, lengths)
        exactly(engine.submit(step), engine.eager(step))

    assert len(set(engine.spy.workspaces)) == 1
    assert engine.spy.num_workspaces == num_workspaces


def test_growing_and_shrinking_batches(kind):
    """
    Rows without a request have no keys, whatever a fuller step left in them.
    """
    engine, rng = Engine(kind), random.Random(1)
    small, large = engine.descriptor(2), engine.descriptor()
    engine.capture(large, small)
    for num_live in (1, 4, 2, 3, 1, 2, 4):
        for descriptor in (small, large):
            step = Step.random(
                rng, descriptor, [rng.randint(1, CAPACITY) for _ in range(num_live)][: descriptor.num_reqs]
            )
            exactly(engine.submit(step), engine.eager(step))


def test_behind_the_host(kind):
    """
    Wherever the device is while the host runs ahead, every replay computes with its own lengths; graphs with equal
    numbers of tokens do not mix: with and without LoRA, of target and drafter.
    """
    engine = Engine(kind)
    graphs = [
        engine.descriptor(),
        engine.descriptor(2),
        engine.descriptor(num_loras=1),
        engine.descriptor(role="drafter"),
    ]
    engine.capture(*graphs)
    for seed in range(NUM_SEEDS):
        steps = draw(random.Random(seed), engine, *graphs)
        num_waits = npu.hardware.host_synchronizations
        with npu.explore(seed):
            results = [engine.submit(step) for step in steps]
            assert npu.hardware.host_synchronizations == num_waits
        for result, step in zip(results, steps, strict=True):
            exactly(result, engine.eager(step))


def test_a_workspace_lives_as_long_as_its_graph(kind):
    """
    Each graph has one, of its own size; it goes with the graph, and with a failed capture.
    """
    engine = Engine(kind)
    params, held = engine.pool.params, []
    take = params.workspace

    def workspace(*arguments):
        held.append(weakref.ref(taken := take(*arguments)))
        return taken

    params.workspace = workspace
    large, small = engine.descriptor(), engine.descriptor(2)
    engine.capture(large, small)
    gc.collect()
    assert len({ref() for ref in held[:3]}) == len({ref() for ref in held[3:]}) == 1
    assert held[0]().nbytes == 2 * held[3]().nbytes > 0

    engine.pool.release(large)
    gc.collect()
    assert [ref() is None for ref in held] == [True] * 3 + [False] * 3

    def fail(*arguments):
        raise RuntimeError("out of memory")

    params.record = fail
    with pytest.raises(CaptureError, match="out of memory"):
        engine.capture(large)
    gc.collect()
    assert len(held) == 7
    assert held[6]() is None


def test_what_a_captured_operator_owns(kind):
    """
    It keeps the block table and its workspace alive, and nothing else that it was captured with.
    """
    engine = Engine(kind)
    descriptor = engine.descriptor()
    attention, _ = engine.model.attention(engine.spy, 0, engine.x, engine.table)
    captured, borrowed = [], []

    def weak_ref_tensor(tensor):
        borrowed.append(npu.weak_ref_tensor(tensor))
        return borrowed[-1]

    engine.pool.params.record = lambda *arguments: captured.append(arguments[2].__self__)
    capture_attention(attention, engine.pool.params, descriptor, LAYERS[0], weak_ref_tensor)

    fields = attrs.asdict(captured[0], recurse=False)
    assert captured[0].workspace is engine.pool.params.workspace(descriptor, "", attention.max_workspace)
    del fields["workspace"]
    for name, value in attrs.asdict(attention, recurse=False).items():
        if isinstance(value, torch.Tensor):
            is_borrowed = any(fields[name] is tensor for tensor in borrowed)
            assert fields[name].data_ptr() == value.data_ptr()
            assert is_borrowed is (name not in {"block_tables", "block_table", "seq_lens"})
        elif name != "workspace":
            assert fields[name] is value


@pytest.mark.parametrize("heads", [(2, 4, 1), (4, 1, 2)])
def test_layers_that_differ_share_a_workspace(heads):
    """
    A layer that needs less takes what the graph has; one that needs more gets what later ones take, too.
    """
    spy, table = Spy(), torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    pool = GraphPool(NpuBackend(npu, npu.weak_ref_tensor))
    descriptor = BatchDescriptor(RuntimeMode.FULL, ROWS, ROWS, 1)
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 1, DIM)
    queries = [torch.randn(ROWS, n, DIM) for n in heads]
    outputs = [torch.empty(ROWS, n, DIM) for n in heads]
    lengths = torch.tensor([7, 0, 15, 16], dtype=torch.int32)

    def run():
        for layer, n, query, output in zip(LAYERS, heads, queries, outputs, strict=True):
            ones = torch.ones(ROWS, dtype=torch.int32)
            attention = PagedAttention(spy, query, cache, cache, 1, n, 0.3, table, ones, output)
            capture_attention(attention, pool.params, descriptor, layer, npu.weak_ref_tensor)

    graph, _ = pool.capture(GraphKey(descriptor), run, addresses=[])
    pool.params.replay(descriptor, dict.fromkeys(LAYERS, lengths), lambda: graph.replay([]))
    npu.synchronize()

    assert len(set(spy.workspaces)) == (2 if heads[0] == 2 else 1)
    assert spy.workspaces[:3] == spy.workspaces[3:]
    assert spy.workspaces[1] == spy.workspaces[2]
    for n, query, output in zip(heads, queries, outputs, strict=True):
        expected = torch.empty_like(output)
        operators._npu_paged_attention(query, cache, cache, 1, n, 0.3, table, lengths, expected)
        exactly(output, expected)


def test_an_update_that_fails(kind):
    """
    A step with a length too many neither hangs nor is repeated; other graphs go on, and so does this one, captured
    again.
    """
    engine, rng = Engine(kind), random.Random(2)
    broken, twin = engine.descriptor(), engine.descriptor(num_loras=1)
    engine.capture(broken, twin)

    def check(descriptor):
        step = Step.random(rng, descriptor, [9, 7, 5])
        exactly(engine.submit(step), engine.eager(step))

    check(broken)
    with pytest.raises(ReplayError, match="one length a row: 5 for 4 rows"):
        engine.submit(attrs.evolve(Step.random(rng, broken, [9, 7, 5]), lengths=[1] * 5))
    npu.synchronize()
    check(twin)
    with pytest.raises(ReplayError, match="must be captured again"):
        check(broken)

    engine.pool.release(broken)
    engine.capture(broken)
    check(broken)
    check(twin)


def test_an_operator_that_fails(kind, monkeypatch):
    """
    So if it is the operator that refuses, in the middle of the layers.
    """
    engine, rng = Engine(kind), random.Random(3)
    descriptor = engine.descriptor()
    engine.capture(descriptor)
    engine.submit(Step.random(rng, descriptor, [9, 7, 5]))
    monkeypatch.setattr(engine.spy, "num_calls_left", 1)

    with pytest.raises(RuntimeError):
        engine.submit(Step.random(rng, descriptor, [9, 7, 5]))
    npu.synchronize()
    with pytest.raises(ReplayError, match="must be captured again"):
        engine.submit(Step.random(rng, descriptor, [9, 7, 5]))


@pytest.mark.parametrize("seed", range(10))
def test_an_update_that_fails_behind_the_host(kind, seed):
    """
    Wherever the device is, the replay ends, with parameters that are not its own.
    """
    engine, rng = Engine(kind), random.Random(seed)
    descriptor = engine.descriptor()
    engine.capture(descriptor)

    def run():
        with npu.explore(seed):
            engine.submit(Step.random(rng, descriptor, [9, 7, 5]))
            with pytest.raises(ReplayError, match="must be >= 0"):
                engine.submit(Step.random(rng, descriptor, [9, -7, 5]))

    with pytest.raises(StaleParameterError, match="replay 2 of "):
        run()
