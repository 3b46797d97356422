"""The uniform layout of ragged drafts, on buffers as vLLM fills them, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from aclgraph_dispatch.integrations.draft_padding import DraftPadding
from aclgraph_dispatch.integrations.model_runner import DispatchMixin

MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 64


@st.composite
def ragged(draw):
    """
    q, the tokens and computed tokens of every request, and the requests of the graph.
    """
    query_len = draw(st.integers(2, 5))
    lengths = draw(
        st.lists(st.integers(1, query_len), min_size=1, max_size=MAX_NUM_SEQS).filter(
            lambda lengths: min(lengths) < query_len
        )
    )
    computed = [draw(st.integers(1, MAX_MODEL_LEN - query_len)) for _ in lengths]
    return query_len, lengths, computed, draw(st.integers(len(lengths), MAX_NUM_SEQS))


class Buffers:
    """
    What the runner keeps between steps, filled for a ragged step of a graph with *num_reqs_padded* requests.
    """

    def __init__(self, query_len: int, lengths: list[int], computed: list[int], num_reqs_padded: int) -> None:
        generator = torch.Generator().manual_seed(0)
        num_reqs, num_tokens, size = len(lengths), sum(lengths), MAX_NUM_SEQS * query_len + 3
        self.num_tokens, self.num_tokens_padded = num_tokens, num_reqs_padded * query_len
        self.input_ids = torch.randint(1, 1000, (size,), generator=generator, dtype=torch.int32)
        self.positions = torch.zeros(size, dtype=torch.int64)
        self.positions[:num_tokens] = torch.cat(
            [torch.arange(c, c + n) for c, n in zip(computed, lengths, strict=True)]
        )
        self.slots = torch.randint(0, 10_000, (size,), generator=generator)
        self.slots[num_tokens : self.num_tokens_padded] = -1
        # One column more than tokens, as vLLM has it.
        self.mrope_positions = self.positions.repeat(3, 1) * torch.tensor([[1], [2], [3]])
        self.embeds = torch.randn((size, 4), generator=generator)
        self.is_padding = torch.arange(size) >= num_tokens
        self.query_start_loc = torch.full((MAX_NUM_SEQS + 1,), num_tokens, dtype=torch.int32)
        self.query_start_loc[: num_reqs + 1] = torch.tensor([0, *np.cumsum(lengths)])
        self.seq_lens = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)
        self.seq_lens[:num_reqs] = torch.tensor(computed) + torch.tensor(lengths)

    def lay_out(self, padding: DraftPadding) -> None:
        """
        All of them, in the runner's way.
        """
        padding.lay_out_starts(self.query_start_loc)
        padding.lay_out_lengths(self.seq_lens)
        padding.lay_out_tokens(self.slots, pad=-1)
        padding.lay_out_tokens(self.input_ids[: self.num_tokens_padded])
        padding.lay_out_tokens(self.positions[: self.num_tokens_padded])
        padding.lay_out_tokens(self.mrope_positions[:, : self.num_tokens_padded], dim=-1)
        padding.lay_out_tokens(self.embeds)
        padding.lay_out_tokens(self.is_padding, pad=True)

    def copies(self) -> dict[str, torch.Tensor]:
        """
        Everything, as it is now.
        """
        return {name: value.clone() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def begun(query_len: int, lengths: list[int], num_reqs_padded: int) -> DraftPadding:
    """
    The layout of one step.
    """
    padding = DraftPadding(query_len=query_len, max_num_seqs=MAX_NUM_SEQS, device=torch.device("cpu"))
    padding.begin(
        np.array(lengths, dtype=np.int32),
        num_reqs_padded=num_reqs_padded,
        num_tokens_padded=num_reqs_padded * query_len,
    )
    return padding


@given(ragged())
def test_rows_of_a_request(case):
    """
    Every request has q rows: its tokens first, with what is kept for them, then pads that write nowhere.
    """
    query_len, lengths, computed, num_reqs_padded = case
    buffers = Buffers(*case)
    before = buffers.copies()
    buffers.lay_out(begun(query_len, lengths, num_reqs_padded))
    starts = buffers.query_start_loc.tolist()

    token = 0
    for i, (length, num_computed) in enumerate(zip(lengths, computed, strict=True)):
        assert starts[i : i + 2] == [i * query_len, (i + 1) * query_len]
        # The last q positions up to the length are the rows: the first of them is the first token's.
        assert num_computed == buffers.seq_lens[i] - query_len
        for offset in range(query_len):
            row = starts[i] + offset
            is_pad = offset >= length
            source = token + min(offset, length - 1)
            assert buffers.input_ids[row] == before["input_ids"][source]
            assert buffers.positions[row] == num_computed + min(offset, length - 1) < MAX_MODEL_LEN
            assert torch.equal(buffers.mrope_positions[:, row], before["mrope_positions"][:, source])
            assert torch.equal(buffers.embeds[row], before["embeds"][source])
            assert buffers.slots[row] == (-1 if is_pad else before["slots"][source])
            assert buffers.is_padding[row] == is_pad
        token += length


@given(ragged())
def test_rows_of_nobody(case):
    """
    Requests beyond the batch have no tokens and no length; rows beyond it are vLLM's padding.
    """
    query_len, lengths, _, num_reqs_padded = case
    buffers = Buffers(*case)
    buffers.lay_out(begun(query_len, lengths, num_reqs_padded))
    num_rows = len(lengths) * query_len

    assert {num_rows} == set(buffers.query_start_loc[len(lengths) : num_reqs_padded + 1].tolist())
    assert not buffers.seq_lens[len(lengths) :].any()
    tail = slice(num_rows, buffers.num_tokens_padded)
    assert (buffers.slots[tail] == -1).all()
    assert (buffers.positions[tail] == 0).all()
    assert buffers.is_padding[tail].all()


@given(ragged())
def test_round_trip(case):
    """
    What is spread and gathered is what it was, in outputs of any nesting; the rest is not touched.
    """
    query_len, lengths, _, num_reqs_padded = case
    buffers = Buffers(*case)
    before = buffers.copies()
    padding = begun(query_len, lengths, num_reqs_padded)
    buffers.lay_out(padding)
    hidden, (aux,) = padding.gather((buffers.embeds.clone(), [buffers.input_ids.clone()]))
    between_ranks = object()

    assert torch.equal(before["embeds"][: buffers.num_tokens], hidden)
    assert torch.equal(before["input_ids"][: buffers.num_tokens], aux)
    assert between_ranks is padding.gather(between_ranks)
    for name, rest in (("embeds", buffers.embeds), ("slots", buffers.slots), ("input_ids", buffers.input_ids)):
        assert torch.equal(before[name][buffers.num_tokens_padded :], rest[buffers.num_tokens_padded :])


@given(ragged())
def test_restore(case):
    """
    Afterwards every buffer holds, bit for bit and at the same address, what it held before.
    """
    query_len, lengths, _, num_reqs_padded = case
    buffers = Buffers(*case)
    before = buffers.copies()
    addresses = {name: getattr(buffers, name).data_ptr() for name in before}
    padding = begun(query_len, lengths, num_reqs_padded)
    buffers.lay_out(padding)
    is_begun = padding.is_begun
    padding.restore()

    assert is_begun
    assert not padding.is_begun
    for name, value in before.items():
        assert torch.equal(value, getattr(buffers, name)), name
        assert addresses[name] == getattr(buffers, name).data_ptr()


def test_steps_do_not_mix():
    """
    A step that is not restored cannot be followed by another.
    """
    padding = begun(2, [1, 2], 2)
    padding.lay_out_lengths(torch.ones(2, dtype=torch.int32))

    with pytest.raises(AssertionError):
        padding.begin(np.array([1, 2], dtype=np.int32), num_reqs_padded=2, num_tokens_padded=4)


def test_index_arrays_are_kept():
    """
    The arrays that tell the device what lies where are made once.
    """
    padding = begun(4, [1, 4, 2], 3)
    kept = [buffer.gpu.data_ptr() for buffer in (padding._sources, padding._rows, padding._is_pad)]
    padding.begin(np.array([3, 3], dtype=np.int32), num_reqs_padded=2, num_tokens_padded=8)

    assert kept == [buffer.gpu.data_ptr() for buffer in (padding._sources, padding._rows, padding._is_pad)]


def test_causal_attention_is_that_of_the_ragged_batch():
    """
    Causal attention of the laid-out rows, gathered, is bit for bit that of the ragged tokens.
    """
    query_len, lengths, computed = 4, [1, 4, 2, 3], [9, 5, 30, 17]
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn((len(lengths), MAX_MODEL_LEN, 8), generator=generator)

    def attend(queries: torch.Tensor, request: int, seq_len: int) -> torch.Tensor:
        # Row i of n is at position seq_len - n + i.
        positions = torch.arange(seq_len - len(queries), seq_len)
        rows = [
            torch.softmax(query @ cache[request, : position + 1].T, dim=0) @ cache[request, : position + 1]
            for query, position in zip(queries, positions, strict=True)
        ]
        return torch.stack(rows)

    buffers = Buffers(query_len, lengths, computed, 4)
    queries = torch.randn((sum(lengths), 8), generator=generator)
    expected = torch.cat(
        [attend(rows, i, int(buffers.seq_lens[i])) for i, rows in enumerate(torch.split(queries, lengths))]
    )
    laid_out = torch.cat([queries, torch.zeros(16 - sum(lengths), 8)])
    padding = begun(query_len, lengths, 4)
    buffers.lay_out(padding)
    padding.lay_out_tokens(laid_out)
    output = torch.cat(
        [attend(rows, i, int(buffers.seq_lens[i])) for i, rows in enumerate(torch.split(laid_out, query_len))]
    )

    assert torch.equal(expected, padding.gather(output))


class Dispatching(DispatchMixin, GPUModelRunner):
    """
    Our runner on any device.
    """


class LateCopies:
    """
    The one attention group of a runner; while it builds metadata, the device runs the copies that vLLM submitted.
    """

    layer_names = ("layer",)

    def __init__(self, *sources: torch.Tensor) -> None:
        self.sources = sources
        self.copied: list[torch.Tensor] = []

    def get_metadata_builder(self, ubid: int) -> Any:
        return SimpleNamespace(supports_update_block_table=False)

    def build_metadata(self, common: Any, ubid: int) -> dict[str, Any]:
        self.copied = [source.clone() for source in self.sources]
        return copied(common)


def copied(metadata: Any) -> dict[str, Any]:
    """
    What is told of a batch, as it is now.
    """
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(metadata).items()
    }


def with_inputs(
    runner_type: type[GPUModelRunner],
    query_len: int,
    lengths: list[int],
    computed: list[int],
    num_reqs_padded: int,
) -> Any:
    """
    A runner that has prepared the inputs of a ragged step; its buffers on host and device are apart.
    """
    buffers = Buffers(query_len, lengths, computed, num_reqs_padded)
    runner: Any = runner_type.__new__(runner_type)
    runner.query_start_loc = CpuGpuBuffer(MAX_NUM_SEQS + 1, dtype=torch.int32, device=torch.device("cpu"))
    for starts in (runner.query_start_loc.cpu, runner.query_start_loc.gpu):
        starts.copy_(buffers.query_start_loc)
    runner.seq_lens = buffers.seq_lens
    runner.optimistic_seq_lens_cpu = buffers.seq_lens.clone()
    runner.positions = buffers.positions
    table = torch.zeros((MAX_NUM_SEQS, 1), dtype=torch.int32)
    runner.input_batch = SimpleNamespace(
        block_table=[SimpleNamespace(get_device_tensor=lambda num_reqs: table[:num_reqs])],
        num_computed_tokens_cpu_tensor=torch.ones(MAX_NUM_SEQS, dtype=torch.int32),
        num_prompt_tokens_cpu_tensor=torch.ones(MAX_NUM_SEQS, dtype=torch.int32),
    )
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    runner.attn_groups = [[LateCopies(runner.query_start_loc.cpu, runner.optimistic_seq_lens_cpu)]]
    runner.model_config = SimpleNamespace(rswa_window=None)
    runner.cache_config = SimpleNamespace(use_replayssm=False, kv_sharing_fast_prefill=False)
    runner.is_mm_prefix_lm, runner.dcp_world_size, runner.lora_config = False, 1, None
    runner.speculative_config = runner.drafter = object()

    runner.num_scheduled_tokens = SimpleNamespace(np=np.array(lengths, dtype=np.int32))
    part = SimpleNamespace(pads_drafts=True, num_padded_tokens=buffers.num_tokens_padded)
    runner.step_plan = SimpleNamespace(parts=[part])
    runner._seq_lens = runner.optimistic_seq_lens_cpu.numpy()
    runner._draft_padding = DraftPadding(
        query_len=query_len, max_num_seqs=MAX_NUM_SEQS, device=torch.device("cpu")
    )
    return runner


def built(runner: Any, query_len: int, lengths: list[int], num_reqs_padded: int) -> tuple[dict[str, Any], Any]:
    """
    The metadata of the layers, and of the drafter.
    """
    metadata, for_drafter = runner._build_attention_metadata(
        num_tokens=sum(lengths),
        num_reqs=len(lengths),
        max_query_len=max(lengths),
        num_tokens_padded=num_reqs_padded * query_len,
        num_reqs_padded=num_reqs_padded,
        slot_mappings={0: torch.zeros(num_reqs_padded * query_len, dtype=torch.int64)},
    )
    return metadata["layer"], for_drafter


@given(ragged())
def test_host_buffers_are_left_alone(case):
    """
    A copy to the device that vLLM submitted, and that runs only when the step is laid out, copies what vLLM wrote.
    """
    query_len, lengths, _, num_reqs_padded = case
    runner = with_inputs(Dispatching, *case)
    host = runner.query_start_loc, runner.optimistic_seq_lens_cpu
    before = [source.clone() for source in runner.attn_groups[0][0].sources]
    built(runner, query_len, lengths, num_reqs_padded)

    for expected, value in zip(before, runner.attn_groups[0][0].copied, strict=True):
        assert torch.equal(expected, value)
    assert host[0] is runner.query_start_loc
    assert host[1] is runner.optimistic_seq_lens_cpu


@given(ragged())
def test_layers_and_drafter_are_told_different_things(case):
    """
    Of the uniform step, host and device tell the layers the same; what vLLM tells the drafter it is told too, once
    the device is restored.
    """
    query_len, lengths, computed, num_reqs_padded = case
    runner = with_inputs(Dispatching, *case)
    for_layers, for_drafter = built(runner, query_len, lengths, num_reqs_padded)
    runner._draft_padding.restore()
    _, expected = built(with_inputs(GPUModelRunner, *case), query_len, lengths, num_reqs_padded)

    assert query_len == for_layers["max_query_len"]
    assert max(computed) + query_len == for_layers["max_seq_len"]
    assert torch.equal(for_layers["query_start_loc"], for_layers["query_start_loc_cpu"])
    assert torch.equal(for_layers["seq_lens"], for_layers["seq_lens_cpu_upper_bound"])
    assert query_len == for_layers["query_start_loc"][1]
    for name, value in copied(expected).items():
        ours = getattr(for_drafter, name)
        assert torch.equal(value, ours) if isinstance(value, torch.Tensor) else value == ours, name
    assert runner.query_start_loc.cpu.data_ptr() == for_drafter.query_start_loc_cpu.data_ptr()
    assert runner.optimistic_seq_lens_cpu.data_ptr() == for_drafter.seq_lens_cpu_upper_bound.data_ptr()
