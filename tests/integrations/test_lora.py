"""LoRA: a graph follows the adapters of its step, alone and in real vLLM, compared with stock vLLM."""

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import BatchDescriptor, override_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.bench.engine import EngineRun
from aclgraph_dispatch.integrations.lora import GraphedPunicaWrapper

from ..engines import adapters, churn, started

NUM_SLOTS, RANK, WIDTH = 3, 8, 96
SLICES = (64, 32)
"""Outputs of a layer of two merged parts, of other widths."""


class Layer:
    """
    Random adapters in *filled* slots of a layer, and one of vLLM's wrappers to apply them.
    """

    def __init__(self, wrapper: type[PunicaWrapperCPU], filled: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = [slot + 1 if slot < filled else None for slot in range(NUM_SLOTS)]
        self.wrapper = wrapper(64, 16, "cpu")
        used = (torch.arange(NUM_SLOTS) < filled).to(dtype).view(-1, 1, 1, 1)
        self.down = tuple(
            torch.randn(NUM_SLOTS, 1, RANK, WIDTH, generator=generator).to(dtype) * used for _ in SLICES
        )
        self.up = tuple(torch.randn(NUM_SLOTS, 1, n, RANK, generator=generator).to(dtype) * used for n in SLICES)
        self.rows = torch.randn(64, WIDTH, generator=generator).to(dtype)
        self.base = torch.randn(64, sum(SLICES), generator=generator).to(dtype)

    def use(self, step: list[int]) -> None:
        """
        Name the adapter of each row of the step, 0 for none.
        """
        mapping = LoRAMapping(tuple(step), tuple(step), is_prefill=True)
        self.wrapper.update_metadata(mapping, self.ids, NUM_SLOTS + 1, 100)

    def apply(self, num_rows: int) -> torch.Tensor:
        """
        The layer's output for its first rows.
        """
        output = self.base[:num_rows].clone()
        self.wrapper.add_lora_linear(output, self.rows[:num_rows], self.down, self.up, 1.0, SLICES)
        return output


def captured(layer: Layer, num_rows: int, num_active_loras: int) -> tuple[Any, torch.Tensor]:
    """
    A graph of the layer, captured with this number in its key, and its output.
    """
    descriptor = BatchDescriptor(num_rows, has_lora=num_active_loras > 0, num_active_loras=num_active_loras)
    graph = emulated.NPUGraph()
    with override_forward_context(SimpleNamespace(batch_descriptor=descriptor)), emulated.graph(graph):
        output = layer.apply(num_rows)
    return graph, output


STEPS = {
    "one adapter": [1] * 8,
    "two": [1, 1, 2, 2, 1, 2, 2, 2],
    "base and two": [0, 1, 0, 0, 2, 1, 0, 2],
    "base": [0] * 8,
    "one token of one": [2],
}
"""The adapter of each row."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
def test_bits_are_those_of_stock(name: str, dtype: torch.dtype) -> None:
    """
    Where vLLM's wrapper is right, with a slot to spare at the end, ours computes the same bits.
    """
    stock, ours = Layer(PunicaWrapperCPU, 2, dtype), Layer(GraphedPunicaWrapper, 2, dtype)
    step = STEPS[name]
    stock.use(step)
    ours.use(step)

    assert torch.equal(stock.apply(len(step)), ours.apply(len(step)))


@pytest.mark.parametrize("name", ["base and two", "base"])
def test_rows_without_an_adapter_are_left_alone(name: str) -> None:
    """
    With every slot filled, no bit of a row of the base model changes, and those of an adapter do.
    """
    layer = Layer(GraphedPunicaWrapper, NUM_SLOTS)
    layer.use(STEPS[name])
    changed = (layer.apply(8) != layer.base[:8]).all(dim=1)

    assert changed.tolist() == [adapter > 0 for adapter in STEPS[name]]


@pytest.mark.parametrize("before", STEPS)
def test_graph_follows_the_step(before: str) -> None:
    """
    A graph captured with the adapters of one step computes what an eager pass of another step computes.
    """
    layer = Layer(GraphedPunicaWrapper, NUM_SLOTS)
    layer.use((STEPS[before] * 8)[:8])
    graph, output = captured(layer, 8, NUM_SLOTS + 1)

    for step in STEPS.values():
        layer.use(step)
        expected = layer.apply(8)
        graph.replay()
        assert torch.equal(expected, output)


def test_graph_of_stock_keeps_the_step_of_its_capture() -> None:
    """
    What ours is for: captured without adapters, a graph of vLLM's wrapper applies none.
    """
    layer = Layer(PunicaWrapperCPU, NUM_SLOTS)
    layer.use(STEPS["base"])
    graph, output = captured(layer, 8, NUM_SLOTS + 1)
    layer.use(STEPS["two"])
    graph.replay()

    assert torch.equal(layer.base[:8], output)
    assert not torch.equal(layer.apply(8), output)


def test_graph_for_no_adapter_holds_no_lora_operators() -> None:
    """
    A graph with 0 in its key pays nothing for LoRA, and so knows no adapter.
    """
    layer = Layer(GraphedPunicaWrapper, NUM_SLOTS)
    layer.use(STEPS["base"])
    graph, output = captured(layer, 8, 0)
    layer.use(STEPS["two"])
    graph.replay()

    assert torch.equal(layer.base[:8], output)


def test_padding_has_no_adapter() -> None:
    """
    Rows behind those of the step are left alone, whatever longer step came before.
    """
    layer = Layer(GraphedPunicaWrapper, NUM_SLOTS)
    layer.use([3] * 8)
    layer.use([1, 2])
    changed = (layer.apply(8) != layer.base[:8]).all(dim=1)

    assert changed.tolist() == [True, True] + [False] * 6
    # An embedding layer adds these to the token ids, those of padding included.
    assert layer.wrapper._embeddings_indices[:8].tolist() == [0, 100] + [0] * 6


def test_embeddings_and_logits() -> None:
    """
    The layers that are no linear ones get stock vLLM's bits for an adapter, and the base model's without one.
    """
    results = []
    for wrapper, filled in ((PunicaWrapperCPU, 2), (GraphedPunicaWrapper, 2), (GraphedPunicaWrapper, NUM_SLOTS)):
        layer = Layer(wrapper, filled)
        layer.use(STEPS["base and two"])
        embeddings, logits = layer.base[:8, : SLICES[0]].clone(), layer.base[:8, : SLICES[0]].clone()
        layer.wrapper.add_lora_embedding(embeddings, layer.rows[:8, :RANK].contiguous(), layer.up[0])
        layer.wrapper.add_lora_logits(logits, layer.rows[:8], layer.down[0], layer.up[0], 1.0)
        results.append(torch.cat([embeddings, logits], dim=1))
    stock, spare, full = results

    assert torch.equal(stock, spare)
    assert torch.equal(stock, full)


LORA_CASES = {"gqa-lora-specialised": [0, 1, 2, 4], "gqa-lora-unspecialised": [4]}
"""The engines with three adapters, and the numbers of active ones that they capture graphs for."""


@pytest.fixture(scope="module")
def runs() -> dict[str, "Future[EngineRun]"]:
    """
    Stock vLLM without and with adapters, and ours.
    """
    stock = {name: started(name, None) for name in ("gqa", "gqa-lora")}
    return stock | {name: started(name, "full_and_piecewise") for name in LORA_CASES}


@pytest.mark.engine
@pytest.mark.parametrize("variant", LORA_CASES)
def test_tokens_are_those_of_stock(runs: dict[str, "Future[EngineRun]"], variant: str) -> None:
    """
    Adapters and the base model, one after the other and together in a step: stock vLLM's tokens.
    """
    assert runs["gqa-lora"].result().tokens == runs[variant].result().tokens


@pytest.mark.engine
@pytest.mark.parametrize("variant", LORA_CASES)
def test_base_model_stays_the_base_model(runs: dict[str, "Future[EngineRun]"], variant: str) -> None:
    """
    A request without an adapter gets the tokens of an engine without LoRA, and one with an adapter gets others.
    """
    without, tokens = runs["gqa"].result().tokens, runs[variant].result().tokens
    loras = {request.request_id: request.lora for request in adapters()}
    whole = [request.request_id for request in churn() if request.abort_step is None]

    assert len({loras[name] for name in whole}) == 4
    assert {name: loras[name] is None for name in whole} == {name: tokens[name] == without[name] for name in whole}


@pytest.mark.engine
@pytest.mark.parametrize("variant", LORA_CASES)
def test_every_size_is_captured_for_every_case(runs: dict[str, "Future[EngineRun]"], variant: str) -> None:
    """
    FULL holds one graph per size and case, PIECEWISE one per size, case and piece (layers + 1).
    """
    report = runs[variant].result().report
    num_cases = len(LORA_CASES[variant])
    expected = {f"FULL-{n}": num_cases for n in report["full_sizes"]}
    expected |= {f"PIECEWISE-{n}": 5 * num_cases for n in report["piecewise_sizes"]}

    assert LORA_CASES[variant] == report["lora_cases"]
    assert expected == report["graphs_per_size"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("variant", "cases"), [("gqa-lora-specialised", [0, 1, 0]), ("gqa-lora-unspecialised", [4] * 3)]
)
def test_twins(runs: dict[str, "Future[EngineRun]"], variant: str, cases: list[int]) -> None:
    """
    Eight decodes of the base model, eight with one adapter, eight of the base model again: specialised, two graphs
    in turn, else the one there is; and the tokens are those of the model that was asked for.
    """
    run = runs[variant].result()
    decodes = [d for d in run.report["decisions"] if d["mode"] == "FULL"][:27]
    said = [[run.tokens[f"{phase}-{i}"] for i in range(8)] for phase in ("base", "adapted", "again")]

    assert [("FULL", 8, 8, case) for case in cases for _ in range(9)] == [
        (d["mode"], d["requests"], d["padded"], d["loras"]) for d in decodes
    ]
    assert said[0] == said[2]
    assert all(base != adapted for base, adapted in zip(said[0], said[1], strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("variant", LORA_CASES)
def test_every_mode_serves_adapters(runs: dict[str, "Future[EngineRun]"], variant: str) -> None:
    """
    Graphs of both modes are replayed for several adapters at once, and every case there is takes its part.
    """
    decisions = runs[variant].result().report["decisions"]
    steps = Counter((d["mode"], d["loras"]) for d in decisions if d["mode"] != "NONE")

    assert min(steps["FULL", 4], steps["PIECEWISE", 4]) >= 5
    assert {case for mode, case in steps if mode == "FULL"} == set(LORA_CASES[variant])
