"""
A small decoder on the emulated device, run as a server on Ascend runs a large one, and drawn by a seed.

Theory of operation
-------------------
An engine has a target and perhaps a drafter: layers of a projection, a KV write, attention and an MLP, in a FULL
graph for every padded batch size and LoRA case. A step writes the persistent input buffers on the compute stream,
replays through `AttentionParams`, samples on the device, and hands the sampled tokens to the next step on the
device. The host knows lengths in advance, as under asynchronous scheduling, and waits for nothing before the end.

`reference` computes the same steps without graphs, streams, padding or buffers. Projections work row by row and
attention request by request, so every bit must be equal, whatever a row is batched with.

What neither the device nor a comparison can name is named by the referee, who looks at what each replay was given.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.emulated import operators
from aclgraph_dispatch.backends.npu import NpuBackend
from aclgraph_dispatch.params import AttentionParams
from aclgraph_dispatch.pool import GraphKey, GraphPool, PooledGraph

ROLES = ("target", "drafter")
HIDDEN, HEADS, DIM, ROPE, VOCABULARY = 8, 2, 4, 2, 16
MAX_REQS, BLOCK_SIZE, BLOCKS_PER_REQ = 4, 4, 4
NUM_BLOCKS = 1 + MAX_REQS * BLOCKS_PER_REQ
"""Block 0 is nobody's: rows without a request name it."""
CAPACITY = BLOCK_SIZE * BLOCKS_PER_REQ


class RefereeError(AssertionError):
    """
    A replay was given what it must not be given.
    """


class MismatchError(AssertionError):
    """
    A run computed something else than the reference.
    """


@attrs.frozen
class Batch:
    """
    One token of each request; `lengths` count it, and `slots` say where its keys go.

    Args:
        num_rows: Rows of the graph; None to compute without one.
    """

    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    num_rows: int | None
    num_loras: int

    @property
    def num_pads(self) -> int:
        """
        Rows without a request.
        """
        return 0 if self.num_rows is None else self.num_rows - len(self.requests)

    def descriptor(self, role: str) -> BatchDescriptor:
        """
        The graph that it meets.
        """
        return BatchDescriptor(RuntimeMode.FULL, self.num_rows, self.num_rows, 1, self.num_loras, role)


@attrs.frozen
class Scenario:
    """
    A run.

    Args:
        is_latent: MLA-like: a latent head with a rotary part, `npu_fused_infer_attention_score`. Else GQA-like.
        has_side_stream: A part of the MLP runs beside attention, on a stream of its own.
        update_first: Of `AttentionParams`.
        auto_reset: Of the device's external events.
        drafter: None, or the pool of its graphs: "shared" with the target, or its "own" on the same backend.
    """

    seed: int
    num_layers: int
    is_latent: bool
    has_side_stream: bool
    update_first: bool
    auto_reset: bool
    drafter: str | None
    batches: tuple[Batch, ...]

    @classmethod
    def draw(cls, seed: int) -> "Scenario":
        """
        The scenario of *seed*.
        """
        rng = random.Random(seed)
        sizes = rng.choice([(4,), (2, 4), (1, 4), (1, 2, 4)])
        with_loras = rng.random() < 0.5
        blocks = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
        tables = [tuple(blocks[r::MAX_REQS]) for r in range(MAX_REQS)]
        lengths = [rng.randrange(8) for _ in range(MAX_REQS)]
        batches = []
        for _ in range(rng.randint(2, 6)):
            requests = rng.sample(range(MAX_REQS), rng.randint(1, sizes[-1]))
            for r in requests:
                lengths[r] += 1
            places = [divmod(lengths[r] - 1, BLOCK_SIZE) for r in requests]
            batches.append(
                Batch(
                    requests=tuple(requests),
                    lengths=tuple(lengths[r] for r in requests),
                    slots=tuple(
                        tables[r][block] * BLOCK_SIZE + offset
                        for r, (block, offset) in zip(requests, places, strict=True)
                    ),
                    blocks=tuple(tables[r] for r in requests),
                    num_rows=None if rng.random() < 0.1 else min(n for n in sizes if n >= len(requests)),
                    num_loras=rng.randrange(2) if with_loras else 0,
                )
            )
        return cls(
            seed=seed,
            num_layers=rng.randint(1, 4),
            is_latent=rng.random() < 0.5,
            has_side_stream=rng.random() < 0.3,
            update_first=rng.random() < 0.3,
            auto_reset=rng.random() < 0.5,
            drafter=rng.choice([None, "shared", "own"]),
            batches=tuple(batches),
        )


@attrs.frozen
class Layer:
    """
    Weights, each (in, out).
    """

    states: torch.Tensor
    lora_in: torch.Tensor
    lora_out: torch.Tensor
    attention: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    beside: torch.Tensor


@attrs.frozen
class Model:
    """
    Weights of all layers, of the embedding and of the head.
    """

    embedding: torch.Tensor
    layers: list[Layer]
    head: torch.Tensor


@attrs.frozen
class Cache:
    """
    Keys and values, or latent keys and their rotary parts, each (blocks, block size, 1, dim).
    """

    keys: torch.Tensor
    values: torch.Tensor

    def clone(self) -> "Cache":
        """
        A copy.
        """
        return Cache(self.keys.clone(), self.values.clone())


class Paged:
    """
    Attention as GQA has it.
    """

    width = (HEADS + 2) * DIM
    value_dim = DIM

    @staticmethod
    def split(states: torch.Tensor) -> tuple[Any, ...]:
        """
        Query, and what goes to the cache.
        """
        query, key, value = states.split([HEADS * DIM, DIM, DIM], dim=1)
        return query.view(-1, HEADS, DIM), key.view(-1, 1, DIM), value.view(-1, 1, DIM)

    @staticmethod
    def outputs(num_rows: int) -> list[torch.Tensor]:
        """
        Room for the results.
        """
        return [torch.empty(num_rows, HEADS, DIM)]

    @staticmethod
    def call(
        query: torch.Tensor,
        cache: Cache,
        block_table: torch.Tensor,
        lengths: Sequence[int],
        out: list[torch.Tensor],
        workspace: torch.Tensor | None = None,
    ) -> None:
        """
        Issue the operator.
        """
        operators._npu_paged_attention(
            query, cache.keys, cache.values, 1, HEADS, 0.5, block_table, lengths, out[0], workspace
        )

    @staticmethod
    def workspace_bytes(num_rows: int, lengths: Sequence[int]) -> int:
        """
        Bytes that *lengths* need, one of them in each row.
        """
        query = torch.zeros(num_rows, HEADS, DIM)
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, DIM)
        table = torch.zeros(num_rows, BLOCKS_PER_REQ, dtype=torch.int32)
        return max(
            operators._npu_paged_attention_get_workspace(
                query, cache, cache, 1, HEADS, 0.5, table, [length] * num_rows, query
            ).numel()
            for length in lengths
        )

    @staticmethod
    @functools.cache
    def max_workspace_bytes(num_rows: int) -> int:
        """
        Bytes that any lengths need.
        """
        return Paged.workspace_bytes(num_rows, range(1, CAPACITY + 1))


class Latent:
    """
    Attention as MLA has it.
    """

    width = HEADS * (DIM + ROPE) + DIM + ROPE
    value_dim = ROPE

    @staticmethod
    def split(states: torch.Tensor) -> tuple[Any, ...]:
        """
        Query, and what goes to the cache.
        """
        query, latent, rope = states.split([HEADS * (DIM + ROPE), DIM, ROPE], dim=1)
        return query.view(-1, HEADS, 1, DIM + ROPE), latent.view(-1, 1, DIM), rope.view(-1, 1, ROPE)

    @staticmethod
    def outputs(num_rows: int) -> list[torch.Tensor]:
        """
        Room for the results.
        """
        return [torch.empty(num_rows, HEADS, 1, DIM), torch.empty(1)]

    @staticmethod
    def options(query: torch.Tensor, cache: Cache, block_table: torch.Tensor) -> dict[str, Any]:
        """
        All but lengths, workspace and outputs.
        """
        keys = cache.keys.view(NUM_BLOCKS, 1, BLOCK_SIZE, DIM)
        return {
            "query": query[..., :DIM],
            "key": keys,
            "value": keys,
            "query_rope": query[..., DIM:],
            "key_rope": cache.values.view(NUM_BLOCKS, 1, BLOCK_SIZE, ROPE),
            "num_heads": HEADS,
            "num_key_value_heads": 1,
            "input_layout": "BNSD",
            "scale": 0.5,
            "block_table": block_table,
            "block_size": BLOCK_SIZE,
        }

    @staticmethod
    def call(
        query: torch.Tensor,
        cache: Cache,
        block_table: torch.Tensor,
        lengths: Sequence[int],
        out: list[torch.Tensor],
        workspace: torch.Tensor | None = None,
    ) -> None:
        """
        Issue the operator.
        """
        operators.npu_fused_infer_attention_score.out(
            **Latent.options(query, cache, block_table),
            actual_seq_lengths_kv=lengths,
            workspace=workspace,
            out=out,
        )

    @staticmethod
    @functools.cache
    def max_workspace_bytes(num_rows: int) -> int:
        """
        Bytes that any lengths need.
        """
        query = torch.zeros(num_rows, HEADS, 1, DIM + ROPE)
        cache = Cache(
            torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, DIM),
            torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, ROPE),
        )
        table = torch.zeros(num_rows, BLOCKS_PER_REQ, dtype=torch.int32)
        return operators._npu_fused_infer_attention_score_get_max_workspace(
            **Latent.options(query, cache, table), actual_seq_lengths_kv=[1] * num_rows
        ).numel()


@functools.cache
def model(role: str, num_layers: int, is_latent: bool) -> Model:
    """
    Weights that nobody writes to.
    """
    generator = torch.Generator().manual_seed(len(role) * 100 + num_layers * 10 + is_latent)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.7

    width = (Latent if is_latent else Paged).width
    layers = [
        Layer(
            states=weight(HIDDEN, width),
            lora_in=weight(HIDDEN, 2),
            lora_out=weight(2, width),
            attention=weight(HEADS * DIM, HIDDEN),
            up=weight(HIDDEN, 2 * HIDDEN),
            down=weight(2 * HIDDEN, HIDDEN),
            beside=weight(HIDDEN, HIDDEN),
        )
        for _ in range(num_layers)
    ]
    return Model(weight(VOCABULARY, HIDDEN), layers, weight(HIDDEN, VOCABULARY))


def initial_caches(scenario: Scenario, role: str) -> list[Cache]:
    """
    Caches as prefills have left them.
    """
    generator = torch.Generator().manual_seed(scenario.seed + len(role))
    value_dim = (Latent if scenario.is_latent else Paged).value_dim
    return [
        Cache(*(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 1, dim, generator=generator) for dim in (DIM, value_dim)))
        for _ in range(scenario.num_layers)
    ]


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """
    The product of each row by itself.
    """
    return torch.bmm(x.unsqueeze(1), weight.expand(x.shape[0], -1, -1)).squeeze(1)


def forward(
    model: Model,
    caches: list[Cache],
    slots: torch.Tensor,
    ids: torch.Tensor,
    hidden: torch.Tensor | None,
    *,
    kind: type[Paged | Latent],
    num_loras: int,
    attend: Callable[[int, torch.Tensor], torch.Tensor],
    beside: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]] = lambda run: run,
) -> torch.Tensor:
    """
    Hidden states of the tokens *ids*.

    Args:
        hidden: What a drafter gets of the target.
        attend: Computes attention of a layer from its query.
        beside: Starts what may run beside attention; returns what waits for it.
    """
    x = model.embedding.index_select(0, ids)
    if hidden is not None:
        x = x + hidden
    for i, layer in enumerate(model.layers):
        join = beside(partial(project, x, layer.beside))
        states = project(x, layer.states)
        if num_loras:
            states = states + project(project(x, layer.lora_in), layer.lora_out)
        query, key, value = kind.split(states)
        operators._npu_reshape_and_cache(key, value, caches[i].keys, caches[i].values, slots)
        x = x + project(attend(i, query).view(-1, HEADS * DIM), layer.attention)
        x = (x + project(project(x, layer.up).relu(), layer.down) + join()).clamp(-4, 4)
    return x


def sample(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """
    The next tokens.
    """
    return project(hidden, model.head).argmax(dim=-1)


@attrs.frozen
class Results:
    """
    Everything a run computed: of every step what the roles returned, and the caches of all roles.
    """

    hidden: list[list[torch.Tensor]]
    caches: list[Cache]


def reference(scenario: Scenario) -> Results:
    """
    Compute *scenario* without graphs.
    """
    kind = Latent if scenario.is_latent else Paged
    roles = ROLES if scenario.drafter else ROLES[:1]
    models = [model(role, scenario.num_layers, scenario.is_latent) for role in roles]
    caches = [initial_caches(scenario, role) for role in roles]
    last = torch.arange(MAX_REQS)
    results = Results([], [cache for of_role in caches for cache in of_role])
    for batch in scenario.batches:
        index = torch.tensor(batch.requests)
        slots = torch.tensor(batch.slots, dtype=torch.int32)
        table = torch.tensor(batch.blocks, dtype=torch.int32)
        ids, hidden = last[index], None
        drafted = torch.zeros_like(ids)
        step: list[torch.Tensor] = []
        for weights, own_caches in zip(models, caches, strict=True):

            def attend(
                i: int, query: torch.Tensor, own_caches: Any = own_caches, table: Any = table, batch: Any = batch
            ) -> torch.Tensor:
                out = kind.outputs(len(batch.requests))
                kind.call(query, own_caches[i], table, batch.lengths, out)
                return out[0]

            hidden = forward(
                weights, own_caches, slots, ids, hidden, kind=kind, num_loras=batch.num_loras, attend=attend
            )
            step.append(hidden)
            ids = sample(weights, hidden)
            drafted = drafted * 3 + ids
        last[index] = drafted % VOCABULARY
        results.hidden.append(step)
    return results


class Inputs:
    """
    Persistent buffers, which all graphs read; a step writes them in place.
    """

    def __init__(self) -> None:
        self.slots = torch.full((MAX_REQS,), -1, dtype=torch.int32)
        self.block_table = torch.zeros(MAX_REQS, BLOCKS_PER_REQ, dtype=torch.int32)
        self.lengths = [0] * MAX_REQS
        """On the host: attention takes them from there."""

    def fill(self, batch: Batch) -> None:
        """
        Write the rows of *batch*; those without a request get slot -1, length 0 and block 0.
        """
        self.fill_slots([*batch.slots, *[-1] * batch.num_pads])
        self.fill_block_table([*batch.blocks, *[(0,) * BLOCKS_PER_REQ] * batch.num_pads])
        self.fill_lengths([*batch.lengths, *[0] * batch.num_pads])

    def fill_slots(self, slots: list[int]) -> None:
        """
        Write the first slots.
        """
        self.slots[: len(slots)].copy_(torch.tensor(slots, dtype=torch.int32))

    def fill_block_table(self, rows: list[tuple[int, ...]]) -> None:
        """
        Write the first rows of the block table.
        """
        self.block_table[: len(rows)].copy_(torch.tensor(rows, dtype=torch.int32))

    def fill_lengths(self, lengths: list[int]) -> None:
        """
        Write the first lengths.
        """
        self.lengths[: len(lengths)] = lengths


class Decoder:
    """
    The target or the drafter: its caches, buffers and graphs.
    """

    def __init__(self, scenario: Scenario, role: str, pool: GraphPool, inputs: Inputs) -> None:
        self.scenario = scenario
        self.role = role
        self.pool = pool
        self.inputs = inputs
        self.kind = Latent if scenario.is_latent else Paged
        self.model = model(role, scenario.num_layers, scenario.is_latent)
        self.caches = initial_caches(scenario, role)
        self.ids = torch.zeros(MAX_REQS, dtype=torch.int64)
        self.hidden = None if role == "target" else torch.zeros(MAX_REQS, HIDDEN)
        self.side_stream = npu.Stream() if scenario.has_side_stream else None
        self.graphs: dict[BatchDescriptor, PooledGraph] = {}

    def layer_name(self, i: int) -> str:
        """
        Whose metadata are whose.
        """
        return f"{self.role}.{i}"

    def addresses(self) -> list[int]:
        """
        Where the arguments of the model lie; block table and lengths are metadata.
        """
        return [t.data_ptr() for t in (self.ids, self.inputs.slots, self.hidden) if t is not None]

    def make_workspace(self, num_rows: int) -> torch.Tensor:
        """
        Room for what one attention operator needs at most.
        """
        return torch.empty(self.kind.max_workspace_bytes(num_rows), dtype=torch.uint8)

    def capture(self, descriptor: BatchDescriptor) -> None:
        """
        Capture the graph of *descriptor*.
        """
        self.graphs[descriptor], _ = self.pool.capture(
            GraphKey(descriptor), partial(self.record, descriptor), addresses=self.addresses(), release_output=True
        )

    def release(self, descriptor: BatchDescriptor) -> None:
        """
        Give the graph of *descriptor* back.
        """
        self.pool.release(descriptor)
        del self.graphs[descriptor]

    def record(self, descriptor: BatchDescriptor) -> torch.Tensor:
        """
        What a graph captures.
        """
        return self.forward(
            descriptor.num_tokens,
            num_loras=descriptor.num_active_loras,
            attend=partial(self.attend, descriptor),
            beside=self.beside if self.side_stream else lambda run: run,
        )

    def forward(self, num_rows: int, **options: Any) -> torch.Tensor:
        """
        Compute the first rows of the buffers.
        """
        return forward(
            self.model,
            self.caches,
            self.inputs.slots[:num_rows],
            self.ids[:num_rows],
            None if self.hidden is None else self.hidden[:num_rows],
            kind=self.kind,
            **options,
        )

    def attend(self, descriptor: BatchDescriptor, i: int, query: torch.Tensor) -> torch.Tensor:
        """
        Capture the attention of a layer; what is needed to issue it anew owns none of the memory.
        """
        num_rows = descriptor.num_tokens
        out = self.kind.outputs(num_rows)
        workspace = self.pool.params.workspace(descriptor, num_rows, partial(self.make_workspace, num_rows))
        weak = npu.weak_ref_tensor
        call = partial(
            self.kind.call,
            weak(query),
            Cache(weak(self.caches[i].keys), weak(self.caches[i].values)),
            weak(self.inputs.block_table[:num_rows]),
            out=[weak(tensor) for tensor in out],
            workspace=weak(workspace),
        )

        def issue(lengths: Any) -> None:
            if isinstance(lengths, Exception):
                raise lengths
            call(lengths=lengths)

        self.pool.params.record(descriptor, self.layer_name(i), issue, [1] * num_rows)
        return out[0]

    def beside(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """
        Start *run* on the side stream; return what rejoins it.
        """
        main, side = npu.current_stream(), self.side_stream
        side.wait_stream(main)
        with npu.stream(side):
            result = run()

        def join() -> torch.Tensor:
            self.rejoin(main)
            return result

        return join

    def rejoin(self, main: npu.Stream) -> None:
        """
        Let the compute stream wait for the side stream.
        """
        main.wait_stream(self.side_stream)

    def metadata(self, num_rows: int) -> dict[str, Any]:
        """
        What the attention of each layer is issued with.
        """
        lengths = self.inputs.lengths[:num_rows]
        return {self.layer_name(i): lengths for i in range(self.scenario.num_layers)}

    def run(self, batch: Batch, metadata: dict[str, Any]) -> torch.Tensor:
        """
        Compute *batch*, by its graph if it has one; the result is good until the next replay.
        """
        if batch.num_rows is None:
            return self.run_eagerly(batch)
        descriptor = batch.descriptor(self.role)
        graph = self.graphs[descriptor]
        hidden = self.pool.params.replay(descriptor, metadata, partial(graph.replay, self.addresses()))
        return hidden[: len(batch.requests)]

    def run_eagerly(self, batch: Batch) -> torch.Tensor:
        """
        Compute *batch* operator by operator.
        """
        num_reqs = len(batch.requests)

        def attend(i: int, query: torch.Tensor) -> torch.Tensor:
            out = self.kind.outputs(num_reqs)
            workspace = torch.empty(self.kind.max_workspace_bytes(num_reqs), dtype=torch.uint8)
            table = self.inputs.block_table[:num_reqs]
            self.kind.call(query, self.caches[i], table, batch.lengths, out, workspace)
            return out[0]

        return self.forward(num_reqs, num_loras=batch.num_loras, attend=attend)


@attrs.frozen
class Given:
    """
    What one replay was given: lengths from the host, slots from the device.
    """

    batch: Batch
    lengths: list[int]
    slots: torch.Tensor


class Engine:
    """
    A target, perhaps with a drafter. What a planted fault changes is an attribute or a method of its own.
    """

    backend_type: Callable[..., NpuBackend] = NpuBackend
    params_type: Callable[..., AttentionParams] = AttentionParams
    decoder_type: Callable[..., Decoder] = Decoder
    inputs_type: Callable[[], Inputs] = Inputs

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.inputs = self.inputs_type()
        self.backends = [self.backend_type(npu, npu.weak_ref_tensor)]
        self.pools = [self.pool(self.backends[0])]
        self.decoders = [self.decoder_type(scenario, "target", self.pools[0], self.inputs)]
        if scenario.drafter:
            self.pools += self.drafter_pools()
            self.decoders.append(self.decoder_type(scenario, "drafter", self.pools[-1], self.inputs))
        self.last = torch.arange(MAX_REQS)
        self.given: list[Given] = []
        self.hidden: list[list[torch.Tensor]] = []

    def pool(self, backend: NpuBackend) -> GraphPool:
        """
        A pool with parameters that are updated in the scenario's order.
        """
        pool = GraphPool(backend)
        pool.params = self.params_type(backend, update_first=self.scenario.update_first)
        return pool

    def drafter_pools(self) -> list[GraphPool]:
        """
        The drafter's pool; none if it is the target's.
        """
        return [self.pool(self.backends[0])] if self.scenario.drafter == "own" else []

    def capture(self) -> None:
        """
        Capture all graphs, the large ones first.
        """
        batches = [batch for batch in self.scenario.batches if batch.num_rows is not None]
        batches.sort(key=lambda batch: (-batch.num_rows, batch.num_loras))
        for decoder in self.decoders:
            for descriptor in dict.fromkeys(batch.descriptor(decoder.role) for batch in batches):
                decoder.capture(descriptor)

    def step(self, batch: Batch, change: Callable[[dict[str, Any]], None] = lambda metadata: None) -> None:
        """
        Submit one step.

        Args:
            batch: What to compute.
            change: Changes the metadata of a replay.
        """
        num_reqs = len(batch.requests)
        num_rows = num_reqs + batch.num_pads
        index = torch.tensor(batch.requests)
        self.inputs.fill(batch)
        self.given.append(Given(batch, self.inputs.lengths[:num_rows], self.inputs.slots[:num_rows].clone()))
        ids, hidden = self.last.index_select(0, index), None
        drafted = torch.zeros(num_reqs, dtype=torch.int64)
        step = []
        for decoder in self.decoders:
            decoder.ids[:num_reqs].copy_(ids)
            decoder.ids[num_reqs:].zero_()
            if decoder.hidden is not None and hidden is not None:
                decoder.hidden[:num_reqs].copy_(hidden)
                decoder.hidden[num_reqs:].zero_()
            metadata = decoder.metadata(num_rows)
            change(metadata)
            hidden = self.keep(decoder.run(batch, metadata))
            step.append(hidden)
            ids = sample(decoder.model, hidden)
            drafted = drafted * 3 + ids
        self.last.index_copy_(0, index, drafted % VOCABULARY)
        self.hidden.append(step)

    def run_dummy(self, decoder: Decoder, descriptor: BatchDescriptor) -> None:
        """
        Replay a graph with nothing but rows without a request.
        """
        batch = Batch((), (), (), (), descriptor.num_tokens, descriptor.num_active_loras)
        self.inputs.fill(batch)
        decoder.run(batch, decoder.metadata(descriptor.num_tokens))

    def keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        What stays of a replay's result.
        """
        return hidden.clone()

    def results(self) -> Results:
        """
        All that was computed, as far as the device has come.
        """
        hidden = [[tensor.clone() for tensor in step] for step in self.hidden]
        return Results(hidden, [cache for decoder in self.decoders for cache in decoder.caches])

    def close(self) -> None:
        """
        Give everything back.
        """
        for pool in self.pools:
            pool.clear()


def referee(given: list[Given]) -> None:
    """
    Name what rows without a request were given.

    Raises:
        RefereeError: A slot or a length.
    """
    for number, step in enumerate(given):
        for row in range(len(step.batch.requests), len(step.lengths)):
            slot, length = int(step.slots[row]), step.lengths[row]
            if slot != -1:
                raise RefereeError(f"step {number}: KV slot {slot} was written by pad row {row}")
            if length != 0:
                earlier = [i for i in range(number) if given[i].lengths[row : row + 1] == [length]]
                origin = f", left from step {earlier[-1]}" if earlier else ""
                raise RefereeError(f"step {number}: pad row {row} has length {length}{origin}")


def compare(results: Results, expected: Results) -> None:
    """
    Compare bit for bit.

    Raises:
        MismatchError: Something differs; the message says what.
    """
    for number, steps in enumerate(zip(results.hidden, expected.hidden, strict=True)):
        for role, found, wanted in zip(ROLES, *steps, strict=False):
            if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
                same = [i for i, step in enumerate(expected.hidden) if any(torch.equal(found, x) for x in step)]
                what = f"are those of step {same[0]}" if same else "differ from eager"
                raise MismatchError(f"step {number}: the hidden states of the {role} {what}")
    for i, (cache, wanted) in enumerate(zip(results.caches, expected.caches, strict=True)):
        for found, of_eager in ((cache.keys, wanted.keys), (cache.values, wanted.values)):
            if not torch.equal(found.view(torch.int32), of_eager.view(torch.int32)):
                raise MismatchError(f"cache {i} differs from eager")


@contextmanager
def serving(scenario: Scenario, engine_type: Callable[[Scenario], Engine] = Engine) -> Iterator[Engine]:
    """
    An engine with its graphs captured, behind which the device runs by the scenario's seed. At the end of the
    context, the one time that the host waits, everything is checked.

    Raises:
        RuntimeError: The device found a fault.
        AssertionError: The referee or the comparison did.
    """
    limits = npu.hardware.limits
    npu.hardware.limits = attrs.evolve(limits, auto_reset=scenario.auto_reset)
    engine = None
    try:
        with torch.inference_mode():
            expected = reference(scenario)
            engine = engine_type(scenario)
            engine.capture()
            with npu.explore(scenario.seed):
                yield engine
                results = engine.results()
            referee(engine.given)
            compare(results, expected)
    except Exception as exc:
        exc.add_note(f"by {scenario}")
        raise
    finally:
        if engine is not None:
            engine.close()
        npu.hardware.limits = limits


def run(scenario: Scenario, engine_type: Callable[[Scenario], Engine] = Engine) -> Engine:
    """
    Serve all of *scenario*; the host must not wait between steps.
    """
    with serving(scenario, engine_type) as engine:
        num_waits = npu.hardware.host_synchronizations
        for batch in scenario.batches:
            engine.step(batch)
        assert npu.hardware.host_synchronizations == num_waits
    return engine


def main() -> None:
    """
    Run the seeds from one number to another, given as arguments; `17 18` runs seed 17 again.
    """
    torch.set_num_threads(1)
    for seed in range(*map(int, sys.argv[1:])):
        run(Scenario.draw(seed))


if __name__ == "__main__":
    main()
