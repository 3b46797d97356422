"""Graphs that update themselves: with the order that the caller owes, results are the eager operators'."""

import pytest
import torch

from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.emulated import operators
from aclgraph_dispatch.backends.emulated.faults import FaultError

from .test_operators import latent, paged

LAYERS = 2
STEPS = [[5, 3, 20], [1, 1, 1], [19, 7, 2], [20, 15, 20]]
"""Keys of each request; none at capture, so that its lengths and the workspace for them serve nobody."""
CAPTURED = [0, 0, 0]

orders = pytest.mark.parametrize("order", ["update, replay", "replay, update"])
kinds = pytest.mark.parametrize("kind", ["paged", "paged, tensor", "fused", "fused.out"])


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Program:
    """
    A graph of attention layers, and what the eager operator gives at each step.
    """

    def __init__(self, kind):
        self.kind = kind
        self.layers = [self.arguments(CAPTURED, seed) for seed in range(LAYERS)]
        self.queries = [[torch.randn_like(layer["query"]) for layer in self.layers] for _ in STEPS]
        self.expected = []
        for lengths, queries in zip(STEPS, self.queries, strict=True):
            for seed, query in enumerate(queries):
                arguments = self.arguments(lengths, seed)
                arguments["query"].copy_(query)
                self.expected.append(self.run(arguments, is_eager=True).clone())
        self.graph = npu.NPUGraph()
        with npu.graph(self.graph, auto_dispatch_capture=True):
            self.outputs = [self.run(layer) for layer in self.layers]

    def arguments(self, lengths, seed):
        """
        Arguments of the operator, with tensors of the layer that *seed* stands for.
        """
        if self.kind == "paged":
            return paged(lengths, seed)
        if self.kind == "paged, tensor":
            return paged(torch.tensor(lengths, dtype=torch.int32), seed)
        return latent([(1, length) for length in lengths], seed)

    def run(self, arguments, is_eager=False):
        """
        The operator's result, of its functional form but where the kind says otherwise.
        """
        if self.kind.startswith("paged"):
            operators._npu_paged_attention(**arguments)
            return arguments["out"]
        if self.kind == "fused" or is_eager:
            return operators.npu_fused_infer_attention_score(**arguments)[0]
        workspace = operators._npu_fused_infer_attention_score_get_max_workspace(**arguments)
        out = [torch.empty_like(arguments["query"]), torch.empty(1)]
        return operators.npu_fused_infer_attention_score.out(**arguments, workspace=workspace, out=out)[0]

    def lengths(self, values):
        """
        What an update is given.
        """
        if self.kind == "paged, tensor":
            values = torch.tensor(values, dtype=torch.int32)
        return {"context_lens" if self.kind.startswith("paged") else "actual_seq_lengths_kv": values}

    def steps(self, order="update, replay", inputs=1, waits=True):
        """
        The results of all steps.
        """
        results = []
        for values, queries in zip(STEPS, self.queries, strict=True):
            for layer, query in zip(self.layers, queries, strict=True):
                layer["query"].copy_(query)
            if waits:
                self.graph.graph_dispatch_mode.update_stream.wait_stream(npu.current_stream())
            for action in order.split(", "):
                if action == "update":
                    self.graph.update([self.lengths(values)] * inputs)
                else:
                    self.graph.replay()
            results += [output.clone() for output in self.outputs]
        return results


def equal(results, expected):
    """
    Whether all bits are the same.
    """
    return all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@kinds
@orders
@pytest.mark.parametrize("inputs", [1, LAYERS])
@pytest.mark.parametrize("auto_reset", [True, False])
def test_results_are_eagers(monkeypatch, kind, order, inputs, auto_reset):
    """
    One dictionary for all operators, or one for each, gives what the eager operator gives, step by step.
    """
    monkeypatch.setattr(npu.hardware.limits, "auto_reset", auto_reset)
    program = Program(kind)

    assert equal(program.steps(order, inputs), program.expected)


@kinds
@orders
def test_results_are_eagers_whatever_runs_first(kind, order):
    """
    So it is in any interleaving of the streams, if the updates of a step wait for the step before.
    """
    program = Program(kind)
    for seed in range(50):
        with npu.explore(seed):
            results = program.steps(order)

        assert equal(results, program.expected)


@orders
def test_the_order_is_the_callers(order):
    """
    If they do not wait, some interleaving goes wrong and is reported.
    """

    def explored():
        for seed in range(50):
            program = Program("paged")
            with npu.explore(seed):
                program.steps(order, waits=False)

    with pytest.raises(FaultError):
        explored()


def test_one_operator_a_group():
    """
    Every operator of the table, inside composites too, is one group, in order, and no other operator is.
    """
    first, second = paged(CAPTURED), latent([(1, 0)])
    namespace = torch.library.Library("test_auto_dispatch", "DEF")
    namespace.define("attend(Tensor query, Tensor(a!) out) -> ()")
    overload = torch.ops.test_auto_dispatch.attend.default
    npu.register_composite(
        overload, lambda query, out: operators._npu_paged_attention(**first | {"query": query, "out": out})
    )
    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        overload(first["query"] * 2.0, first["out"])
        operators.npu_fused_infer_attention_score(**second)
    groups = [record.group.task_group for record in graph.graph_dispatch_mode.graph_dispatch_records]
    graph.update([{"context_lens": [2, 3, 4], "actual_seq_lengths_kv": [7]}])
    graph.replay()
    expected = paged([2, 3, 4])
    expected["query"].mul_(2.0)
    operators._npu_paged_attention(**expected)

    assert [[task.overload for task in group] for group in groups] == [
        [operators._paged_attention],
        [operators._fused_infer_out],
    ]
    assert graph.num_tasks == 3
    assert torch.equal(first["out"], expected["out"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "2 operators were captured for updates, but cpu_update_input is for 0"),
        (
            [{"context_lens": [1, 1, 1]}] * 3,
            "2 operators were captured for updates, but cpu_update_input is for 3",
        ),
        ([{"actual_seq_lengths_kv": [1, 1, 1]}], r"has \['actual_seq_lengths_kv'\].*have \['context_lens'\]"),
        ([{"context_lens": [1, 1, 1]}, {"lens": [1, 1, 1]}], r"has \['lens'\].*have \['context_lens'\]"),
    ],
)
def test_updates_that_do_not_fit(inputs, message):
    """
    Another number of dictionaries, or a parameter that the operator has not, is refused before anything is done.
    """
    program = Program("paged")
    with pytest.raises(RuntimeError, match=message):
        program.graph.update(inputs)

    assert equal(program.steps(), program.expected)


def test_a_failed_call_closes_its_update():
    """
    Lengths that the operator does not take leave nothing open: the update can be made again.
    """
    program = Program("paged")
    with pytest.raises(RuntimeError):
        program.graph.update([{"context_lens": ["five"]}])

    assert equal(program.steps(), program.expected)


def test_update_needs_auto_dispatch():
    """
    A graph that was captured without automatic dispatch, or not at all, has no updates.
    """
    graph = npu.NPUGraph()
    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        graph.update([{}])
    with npu.graph(graph):
        operators._npu_paged_attention(**paged(CAPTURED))
    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        graph.update([{}])

    assert not graph.auto_dispatch_capture
    assert graph.graph_dispatch_mode.graph_dispatch_records == []


def test_records_of_an_earlier_capture():
    """
    A graph with automatic dispatch is captured once, for its records outlive a reset.
    """
    graph = Program("paged").graph
    graph.reset()
    with (
        pytest.raises(RuntimeError, match="records of an earlier capture"),
        npu.graph(graph, auto_dispatch_capture=True),
    ):
        pass

    assert npu.hardware.capturing is None


def test_super_kernel_options():
    """
    Options that exist and have their type are taken, None included.
    """
    strategies = {"event_breaker_bypass": 1}
    options = {"split_mode": 4, "dcci_disable_on_kernel": ["add"], "aggressive_opt_strategies": strategies}

    assert npu.NPUGraph().super_kernel_optimize(options, {"debug_extend": "x"}) is None
    assert npu.NPUGraph().super_kernel_optimize() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "optimize_options must be dict, not list"),
        ({"speed": 1}, "optimize_options has no option 'speed'"),
        ({"split_mode": "4"}, r"optimize_options\['split_mode'\] must be int, not str"),
        ({"dcci_disable_on_kernel": "add"}, r"\['dcci_disable_on_kernel'\] must be list, not str"),
        ({"dcci_disable_on_kernel": [1]}, r"\['dcci_disable_on_kernel'\]\[0\] must be str, not int"),
        ({"aggressive_opt_strategies": {"all": 1}}, r"\['aggressive_opt_strategies'\] has no option 'all'"),
        ({"debug_extend": "x"}, "optimize_options has no option 'debug_extend'"),
    ],
)
def test_super_kernel_options_that_do_not_exist(options, message):
    """
    Others are refused.
    """
    with pytest.raises(RuntimeError, match=message):
        npu.NPUGraph().super_kernel_optimize(optimize_options=options)
