"""The emulated device, in the inline schedule: captures leave no trace, replays do what eager does."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from aclgraph_dispatch.backends import emulated as npu
from aclgraph_dispatch.backends.emulated.operator import operator

_library = torch.library.Library("emulated_tests", "DEF")
_library.define("write_row(Tensor(a!) cache, Tensor row, int index) -> ()")
_library.define("scaled(Tensor x, float[] scales) -> Tensor")
_library.define("halves(Tensor x) -> (Tensor, Tensor)")
_library.define("undeclared(Tensor x) -> ()")
_library.define("given_back(Tensor x) -> Tensor")
_library.define("all_reduce(Tensor x) -> Tensor")
_library.define("swap(Tensor(a!) x, Tensor y) -> Tensor")
_library.define("layer(Tensor x, Tensor cache) -> Tensor")
_library.impl("write_row", lambda cache, row, index: cache.__setitem__(index, row), "CPU")
_library.impl("scaled", lambda x, scales: x * torch.tensor(scales), "CPU")
_library.impl("halves", lambda x: (x / 2, x - x / 2), "CPU")
_library.impl("undeclared", lambda x: seen.append(x.tolist()), "CPU")
_library.impl("given_back", lambda x: x, "CPU")
_library.impl("all_reduce", lambda x: x.add_(1), "CPU")
_library.impl("swap", lambda x, y: x.clone(), "CPU")
_library.impl("layer", lambda x, cache: x, "CPU")
custom = torch.ops.emulated_tests
seen = []


@pytest.fixture(params=[torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"], autouse=True)
def _mode(request):
    """
    vLLM runs in inference mode, where an operator made of others is seen whole; elsewhere its parts are.
    """
    with request.param():
        yield
    assert not npu.is_current_stream_capturing()
    assert npu.current_stream() is npu.default_stream()


@pytest.fixture
def _no_collection():
    """
    Graphs that earlier tests left behind keep their streams.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def num_streams(monkeypatch, _no_collection):
    """
    Leaves the device that many streams, two, and no more.
    """
    monkeypatch.setattr(npu.hardware.limits, "streams", npu.hardware.streams_held + 2)
    return 2


def capture(run, graph=None, **options):
    """
    Capture *run*; return the graph and the output.
    """
    graph = graph or npu.NPUGraph()
    with npu.graph(graph, **options):
        output = run()
    return graph, output


def capture_task(run):
    """
    Capture *run* as a task group; return the graph, the handle and the output.
    """

    def grouped():
        npu.graph_task_group_begin(npu.current_stream())
        output = run()
        return npu.graph_task_group_end(npu.current_stream()), output

    graph, (handle, output) = capture(grouped)
    return graph, handle, output


def update_task(handle, run):
    """
    Issue *run* as the new form of a task group.
    """
    stream = npu.Stream()
    with npu.stream(stream):
        npu.graph_task_update_begin(stream, handle)
        run()
        npu.graph_task_update_end(stream)


def _flat(tensor):
    # A tensor of one element is contiguous whatever its strides, which a view of its bytes would not take.
    return tensor.flatten().clone(memory_format=torch.contiguous_format)


def bits(*tensors):
    """
    Type, shape and bytes, by which two NaNs can be equal.
    """
    return [(t.dtype, t.shape, _flat(t).view(torch.uint8).tolist()) for t in tensors]


def fill(tensors, seed):
    """
    Give *tensors* new values in place; integers are valid indices of three rows.
    """
    generator = torch.Generator().manual_seed(seed)
    for t in tensors:
        values = torch.randn(t.shape, generator=generator)
        t.copy_(values if t.is_floating_point() else values.abs() * 10 % 3)


def check(program, *inputs):
    """
    Capturing *program* changes no input, and each of two replays, with new inputs, does to the bit what eager
    does: to the results, and to the inputs that the program writes to.
    """
    fill(inputs, 0)
    before = bits(*inputs)
    graph, outputs = capture(lambda: program(*inputs))
    assert bits(*inputs) == before

    for seed in (1, 2):
        fill(inputs, seed)
        expected_inputs = [t.clone() for t in inputs]
        expected = program(*expected_inputs)
        graph.replay()
        assert bits(*outputs) == bits(*expected)
        assert bits(*inputs) == bits(*expected_inputs)
    return graph


def floats(*shape):
    return torch.empty(shape)


def ints(*shape):
    return torch.empty(shape, dtype=torch.int64)


WRITES = {
    "add_": lambda cache, rows, slots: cache.add_(1),
    "operator": lambda cache, rows, slots: cache.__imul__(2),
    "copy_": lambda cache, rows, slots: cache[1:].copy_(rows),
    "slice": lambda cache, rows, slots: cache.__setitem__(slice(0, 2), rows),
    "index_put_": lambda cache, rows, slots: cache.__setitem__(slots, 1.5),
    "index_copy_": lambda cache, rows, slots: cache.index_copy_(0, torch.arange(2), rows),
    "scatter_": lambda cache, rows, slots: cache.scatter_(0, slots[:, None].expand(2, 4), 2.5),
    "masked_fill_": lambda cache, rows, slots: cache.masked_fill_(cache > 0, -1),
    "out": lambda cache, rows, slots: torch.add(rows, 1, out=cache[:2]),
    "out of two": lambda cache, rows, slots: torch.max(rows, 0, out=(cache[0], torch.empty_like(cache[0]).long())),
    "foreach": lambda cache, rows, slots: torch._foreach_add_([cache[0], rows[0]], 1.0),
    "view of a view": lambda cache, rows, slots: cache.t()[1:3].flatten(0)[::2].unsqueeze(0).zero_(),
    "view by name": lambda cache, rows, slots: cache.view(2, 6)[1].fill_(3),
    "twice": lambda cache, rows, slots: cache.add_(rows.sum()).mul_(rows[0, 0]),
    "integers": lambda cache, rows, slots: slots.add_(1).remainder_(3),
    "custom": lambda cache, rows, slots: custom.write_row(cache, rows[0], 2),
}
"""Ways to write into memory that is not the graph's."""


@pytest.mark.parametrize("write", WRITES)
def test_writes_happen_at_replay_only(write):
    """
    What the captured function writes to, the KV cache say, changes with every replay and not before.
    """

    def program(cache, rows, slots):
        WRITES[write](cache, rows, slots)
        return cache[:2] + rows, slots * 2

    graph = check(program, floats(3, 4), floats(2, 4), ints(2))

    assert graph.num_tasks >= 3


COMPOSITES = {
    "to another type": lambda x: x.to(torch.float64),
    "to its own type": lambda x: x.to(torch.float32),
    "long": lambda x: (x * 10).long(),
    "reshape": lambda x: x.reshape(2, 6),
    "reshape of a transpose": lambda x: x.t().reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "flatten of a transpose": lambda x: x.t().flatten(),
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a transpose": lambda x: x.t().contiguous(),
    "chunk": lambda x: torch.cat(x.chunk(2, dim=1)[::-1]),
    "tensor_split": lambda x: x.tensor_split(2, dim=1)[1],
    "expand_as": lambda x: x.expand_as(x),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "linear": lambda x: functional.linear(x[None], x, x[:, 0]),
    "matmul": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("ij,kj->ki", x, x),
    "einsum that is a view": lambda x: torch.einsum("ij->ji", x),
    "rms_norm": lambda x: functional.rms_norm(x, (4,), x[0]),
    "dropout that is none": lambda x: functional.dropout(x, training=False),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view.default(x, [4, 3]),
    "unsqueeze_": lambda x: (x + 1).unsqueeze_(0).squeeze_(0).t_(),
}


@pytest.mark.parametrize("composite", COMPOSITES)
def test_views_or_copies(composite):
    """
    An operator that gives a view of this input and a copy of that one does at replay what it does in eager, also
    to who writes to its result.
    """

    def program(x):
        result = COMPOSITES[composite](x)
        return result, result * 2, result.add_(1)

    check(program, floats(3, 4))


def test_a_view_is_no_task():
    """
    A replay does not repeat what makes views or asks what a tensor is; views show the memory of the capture.
    """
    x = torch.zeros(3, 4)
    graph, views = capture(
        lambda: (
            (x.t(), x.reshape(4, 3), x.to(x.dtype), torch.ops.aten._unsafe_view.default(x, [12]), *x.unbind())
            if not x.is_pinned()
            else ()
        )
    )
    x.fill_(7)

    assert (graph.num_tasks, len(views)) == (0, 7)
    assert all(view.eq(7).all() for view in views)


RESULTS = {
    "topk": lambda x: x.topk(2),
    "max": lambda x: x.max(dim=1),
    "sort": lambda x: x.sort(stable=True),
    "split": lambda x: x.split([1, 3], dim=1),
    "split into sums": lambda x: [part.sum() for part in x.split(1)],
    "aminmax": torch.aminmax,
    "var_mean": lambda x: torch.var_mean(x, 0),
    "custom": custom.halves,
    "no out variant": lambda x: (custom.scaled(x, [1.5]),),
    "out of nothing": lambda x: (torch.add(x, x, out=torch.empty(0)) * 2,),
    "argmax": lambda x: (x.argmax(-1),),
    "pow": lambda x: (x**3, 2**x, x.mean(0), x.mean(0, dtype=torch.float64)),
    "bool": lambda x: (x > 0, (x > 0).logical_not_()),
    "empty": lambda x: (x[:0] + 1,),
    "zeros": lambda x: (torch.zeros(3, 4).add_(x), torch.zeros_like(x).sub_(x), x.new_zeros(2)),
    "full": lambda x: (torch.full((3, 4), 2.5).mul_(x), torch.full_like(x, 3), torch.ones(2, dtype=torch.int32)),
    "arange": lambda x: (
        torch.arange(4) * x,
        torch.arange(1, 5).add_(1),
        torch.arange(0, 8, 2, dtype=torch.float64),
    ),
    "tensor": lambda x: (torch.tensor([1.0, 2.0, 3.0, 4.0]) + x,),
    "empty tensor": lambda x: (torch.empty_like(x).copy_(x), x.new_empty(3, 4).fill_(1).add_(x)),
}


@pytest.mark.parametrize("results", RESULTS)
def test_results(results):
    """
    Operators with one result, several, or none of a tensor's size; and memory made within the graph starts every
    replay as it started the capture.
    """
    check(RESULTS[results], floats(3, 4))


@pytest.mark.parametrize(
    ("overload", "variant"),
    [
        (torch.ops.aten.pow.Tensor_Scalar, "Tensor_Scalar_out"),
        (torch.ops.aten.topk.default, "values"),
        (torch.ops.aten.mean.dim, "out"),
        (torch.ops.aten.max.dim, "dim_max"),
        (torch.ops.aten._to_copy.default, "out"),
        (torch.ops.aten.zeros.default, "out"),
        (torch.ops.aten.cat.default, "out"),
        (torch.ops.aten.add_.Tensor, None),
        (torch.ops.aten.repeat_interleave.self_int, None),
        (torch.ops.emulated_tests.halves.default, None),
    ],
)
def test_out_variants(overload, variant):
    """
    Where a variant exists that takes the same arguments, results are written in place instead of copied.
    """
    out = operator(overload).out

    assert (out and out[0]) == (variant and getattr(overload.overloadpacket, variant))


def test_results_are_unspecified_until_the_first_replay():
    """
    Between capture and replay nobody can mistake what lies in the graph's memory for a result.
    """
    x = torch.ones(4)
    _, outputs = capture(lambda: (x + 1, x.clone().add_(1), torch.zeros(4), torch.empty(4), *x.topk(2)[:1]))

    assert all(output.isnan().all() for output in outputs)
    assert x.eq(1).all()


def test_replay_reads_and_writes_where_it_did_at_capture():
    """
    Values may change, places may not: a replay takes no notice of a tensor that takes the place of another.
    """
    x, places = torch.ones(3), []
    graph, output = capture(lambda: x * 2)
    for value in (5, 7):
        x.fill_(value)
        graph.replay()
        places.append(output.data_ptr())
        assert output.tolist() == [2.0 * value] * 3
    x = torch.zeros(3)
    graph.replay()

    assert output.tolist() == [14.0] * 3
    assert places[0] == places[1]


def test_python_values_are_baked_in():
    """
    A number, a list or a shape is as it was at capture, whatever the host does with it later.
    """
    x, number, numbers = torch.ones(2), [3.0], [1.0, 2.0]
    graph, outputs = capture(
        lambda: (x * number[0], custom.scaled(x, numbers), x.new_full((len(numbers),), number[0]))
    )
    number[0] = numbers[0] = numbers[1] = 100.0
    numbers.append(100.0)
    graph.replay()

    assert [output.tolist() for output in outputs] == [[3.0, 3.0], [1.0, 2.0], [3.0, 3.0]]


def test_memory_that_was_only_made_is_not_replayed():
    """
    What `empty` made keeps what others wrote there; what `zeros` made does not.
    """
    graph, (empty, zeros) = capture(lambda: (torch.empty(2), torch.zeros(2)))
    empty.fill_(7)
    zeros.fill_(7)
    graph.replay()

    assert (empty.tolist(), zeros.tolist()) == ([7.0, 7.0], [0.0, 0.0])
    assert graph.num_tasks == 1


def test_an_index_made_within_the_graph_is_valid_at_capture():
    """
    Integers not yet written are zero, so that capturing what they index does not fail.
    """

    def program(table, tokens):
        index = torch.empty_like(tokens)
        index.copy_(tokens)
        return (table[index],)

    check(program, floats(3, 4), ints(5))


def test_operators_without_results_are_replayed():
    """
    Who returns nothing must do something, declared or not, and does it at replay, not at capture.
    """
    x = torch.zeros(1)
    seen.clear()
    graph, _ = capture(lambda: custom.undeclared(x))
    assert not seen

    for value in (1, 2):
        x.fill_(value)
        graph.replay()

    assert seen == [[1.0], [2.0]]


def test_an_undeclared_alias_is_not_the_graphs_memory():
    """
    A custom operator that hands its input back, without a word in its schema, costs nobody the input, and is
    replayed like any other: it may have worked in place, as vLLM's all-reduce on CPUs does.
    """
    check(lambda x: (custom.given_back(x) * 2, custom.all_reduce(x * 2)), floats(3))


def test_composite_registered_by_the_user():
    """
    An operator written in Python is captured as what it calls: what it looks up is baked in, what it writes to
    undeclared is written at replay.
    """
    context = {"scale": 2.0}

    def layer(x, cache):
        cache.copy_(x)
        return x * context["scale"]

    npu.register_composite(custom.layer.default, layer)
    x, cache = torch.ones(2), torch.zeros(2)
    graph, handle, output = capture_task(lambda: custom.layer(x, cache))
    assert cache.tolist() == [0.0, 0.0]

    context["scale"] = 100.0
    x.fill_(3)
    graph.replay()
    assert (output.tolist(), cache.tolist()) == ([6.0, 6.0], [3.0, 3.0])

    update_task(handle, lambda: custom.layer(x, cache))
    graph.replay()

    assert output.tolist() == [300.0, 300.0]


def test_writing_and_returning_something_fresh_is_refused():
    """
    What does not exist before the operator ran cannot be handed out, and the operator must not run.
    """
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"emulated_tests\.swap.* cannot be captured: it writes to an argument"):
        capture(lambda: custom.swap(x, x))


REFUSED = {
    "item": lambda x, mask: x[0, 0].item(),
    "float": lambda x, mask: float(x.sum()),
    "bool": lambda x, mask: 1 if x.any() else 2,
    "equal": lambda x, mask: torch.equal(x, x),
    "slice by a tensor": lambda x, mask: x[: mask.sum()],
    "nonzero": lambda x, mask: x.nonzero(),
    "nonzero as tuple": lambda x, mask: x.nonzero(as_tuple=True),
    "where": lambda x, mask: torch.where(mask),
    "mask": lambda x, mask: x[mask],
    "mask of bytes": lambda x, mask: x[mask.to(torch.uint8)],
    "mask of rows": lambda x, mask: x[:, mask[0]],
    "mask to write to": lambda x, mask: x.__setitem__(mask, 0.0),
    "index_put": lambda x, mask: x.index_put((mask,), x[0, 0]),
    "index_put_": lambda x, mask: x.index_put_((mask,), x[0, 0], accumulate=True),
    "masked_select": lambda x, mask: x.masked_select(mask),
    "unique": lambda x, mask: x.unique(),
    "repeat by a tensor": lambda x, mask: x[0].repeat_interleave(mask[0].long()),
    "synchronize": lambda x, mask: npu.synchronize(),
    "synchronize a stream": lambda x, mask: npu.current_stream().synchronize(),
    "query a stream": lambda x, mask: npu.default_stream().query(),
    "another capture": lambda x, mask: capture(lambda: x + 1),
    "an update": lambda x, mask: npu.graph_task_update_begin(npu.Stream(), None),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_refused_while_capturing(refused):
    """
    What needs the host to wait for the device is refused, having changed nothing, and is fine elsewhere.
    """
    x, mask = torch.eye(3), torch.eye(3) > 0
    before = bits(x)
    graph = npu.NPUGraph()

    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        capture(lambda: (x.add_(1), REFUSED[refused](x, mask)), graph)
    graph.reset()

    assert bits(x) == before


def test_waiting_is_fine_outside_of_a_capture():
    """
    Inline, everything has run when a call returns.
    """
    stream = npu.Stream()
    stream.wait_stream(npu.default_stream())
    stream.synchronize()
    npu.synchronize()

    assert stream.query()


def test_only_the_task_group_gets_new_arguments():
    """
    An update replaces numbers and tensors of its own operator; all others keep theirs, also equal ones.
    """
    x, out, others = torch.ones(2), torch.zeros(2), torch.zeros(2)
    graph, handle, _ = capture_task(lambda: torch.add(x, 1, alpha=2, out=out))
    other, other_handle, _ = capture_task(lambda: torch.add(x, 1, alpha=2, out=others))
    graph.replay()
    assert out.tolist() == [3.0, 3.0]

    elsewhere, y = torch.zeros(2), torch.full((2,), 5.0)
    update_task(handle, lambda: torch.add(y, x, alpha=10, out=elsewhere))
    assert elsewhere.tolist() == [0.0, 0.0]

    y.add_(1)
    x.add_(1)
    graph.replay()
    other.replay()

    assert (out.tolist(), elsewhere.tolist(), others.tolist()) == ([3.0, 3.0], [26.0, 26.0], [4.0, 4.0])
    assert len(other_handle.task_group) == 1


def test_an_update_reaches_the_operators_around_the_group():
    """
    A functional operator keeps its place of result, which later operators of the graph read; views and types
    of the new arguments are no operators of the group.
    """
    x, handles = torch.arange(4.0), []

    def program():
        y = x + 1
        npu.graph_task_group_begin(npu.current_stream())
        values, indices = torch.topk(y, 2)
        scaled = values * 2
        handles.append(npu.graph_task_group_end(npu.current_stream()))
        return scaled + 1, indices

    graph, (result, indices) = capture(program)
    assert [task.overload for task in handles[0].task_group] == [
        torch.ops.aten.topk.default,
        torch.ops.aten.mul.Tensor,
    ]

    def update():
        torch.empty(1)
        values, _ = torch.topk(x.view(2, 2).flatten().to(x.dtype)[:3], 2, largest=False)
        return values * 10

    for _ in range(2):
        update_task(handles[0], update)
    x.add_(1)
    graph.replay()

    assert (result.tolist(), indices.tolist()) == ([11.0, 21.0], [0, 1])


WRONG_UPDATES = {
    "another operator": lambda x, out: torch.mul(x, 5, out=out),
    "another overload": lambda x, out: torch.add(x, 5),
    "one of more results": lambda x, out: x.topk(1),
    "none": lambda x, out: None,
    "one too many": lambda x, out: (torch.add(x, 5, out=out), torch.add(x, 5, out=out)),
    "a functional one too many": lambda x, out: (torch.add(x, 5, out=out), x + 5),
}


@pytest.mark.parametrize("wrong", WRONG_UPDATES)
def test_wrong_updates(wrong):
    """
    An update with other operators, in kind or in number, raises and leaves the old arguments.
    """
    x, out = torch.ones(2), torch.zeros(2)
    graph, handle, _ = capture_task(lambda: torch.add(x, 1, out=out))

    with pytest.raises(RuntimeError, match=r"must issue the operators of its task group, .*aten.add.*; got"):
        update_task(handle, lambda: WRONG_UPDATES[wrong](x, out))
    assert (x.tolist(), out.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    graph.replay()

    assert out.tolist() == [2.0, 2.0]


def test_an_update_takes_no_hold_of_an_output():
    """
    A tensor given in an update is free once its owners have gone, like any other argument.
    """
    x = torch.ones(2)
    _, handle, _ = capture_task(lambda: x + 1)
    arguments = [torch.ones(2)]
    owner = weakref.ref(arguments[0])
    update_task(handle, lambda: arguments.pop() + 1)

    assert owner() is None


def test_task_groups_and_updates_come_in_pairs():
    """
    What was not begun cannot be ended, and a group exists only within a capture.
    """
    stream = npu.Stream()
    _graph, handle, _ = capture_task(lambda: torch.ones(1))

    with pytest.raises(RuntimeError, match="only be used while the stream is capturing"):
        npu.graph_task_group_begin(stream)
    with pytest.raises(RuntimeError, match="only be used while the stream is capturing"):
        npu.graph_task_group_end(stream)
    with pytest.raises(RuntimeError, match="graph_task_group_end without graph_task_group_begin"):
        capture(lambda: npu.graph_task_group_end(npu.current_stream()))
    with pytest.raises(RuntimeError, match="graph_task_update_end without graph_task_update_begin"):
        npu.graph_task_update_end(stream)
    npu.graph_task_update_begin(stream, handle)
    with pytest.raises(RuntimeError, match="while an update is open on this stream"):
        npu.graph_task_update_begin(stream, handle)
    torch.ones(1)
    npu.graph_task_update_end(stream)


def test_every_graph_holds_a_stream_until_its_reset(num_streams):
    """
    When no stream is left a capture fails with CANN's text and takes nothing; a reset makes room again.
    """
    x, held = torch.ones(2), npu.hardware.streams_held
    graphs = [capture(lambda: x + 1)[0] for _ in range(num_streams)]
    assert npu.hardware.streams_held == held + num_streams

    graph = npu.NPUGraph()
    with pytest.raises(RuntimeError, match=r"207008.*stream resource.*ACL_ERROR_RT_NO_STREAM_RESOURCE"):
        capture(lambda: x + 1, graph)
    graph.reset()
    assert npu.hardware.streams_held == held + num_streams

    for _ in range(2):
        graphs[0].reset()
    assert npu.hardware.streams_held == held + num_streams - 1

    _, output = capture(lambda: x + 1, graph)
    graph.replay()

    assert output.tolist() == [2.0, 2.0]


def test_a_graph_that_nobody_keeps_gives_its_stream_back(num_streams):
    """
    Python's end of a graph is its reset.
    """
    x, held = torch.ones(2), npu.hardware.streams_held
    for _ in range(num_streams + 1):
        graph, _ = capture(lambda: x + 1)
        assert npu.hardware.streams_held == held + 1
        del graph

    assert npu.hardware.streams_held == held


def test_default_stream_limit():
    """
    An Atlas A2 or A3 has 1984 streams.
    """
    assert npu.hardware.limits.streams == 1984


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_capture_that_fails_half_way(error, num_streams):
    """
    An exception in the captured function ends the capture; a reset gives the stream back, and the graph can
    capture again.
    """
    x, held, graph = torch.ones(2), npu.hardware.streams_held, npu.NPUGraph()

    def half():
        npu.graph_task_group_begin(npu.current_stream())
        x.add_(1)
        raise error("half-way")

    with pytest.raises(error, match="half-way"):
        capture(half, graph)
    assert not npu.is_current_stream_capturing()
    assert npu.current_stream() is npu.default_stream()

    graph.reset()
    assert npu.hardware.streams_held == held
    assert x.tolist() == [1.0, 1.0]

    _, output = capture(lambda: x + 1, graph)
    graph.replay()

    assert output.tolist() == [2.0, 2.0]


def test_reset_ends_a_capture(num_streams):
    """
    A capture that was begun and never ended is ended by the reset.
    """
    x, graph, held = torch.ones(2), npu.NPUGraph(), npu.hardware.streams_held
    with npu.stream(npu.Stream()):
        graph.capture_begin()
        x.add_(1)
        graph.reset()
    x.add_(1)

    assert x.tolist() == [2.0, 2.0]
    assert npu.hardware.streams_held == held


def test_a_graph_captures_once():
    """
    A graph that owns a capture refuses another until its reset, and keeps what it has.
    """
    x = torch.ones(2)
    graph, output = capture(lambda: x + 1)
    with pytest.raises(RuntimeError, match="This NPUGraph instance already owns a captured graph"):
        capture(lambda: x + 2, graph)
    graph.replay()

    assert output.tolist() == [2.0, 2.0]


def test_replay_before_capture():
    """
    Without a capture, or after a reset, there is nothing to replay, no pool, and nothing to end.
    """
    graph, _ = capture(lambda: torch.ones(2))
    graph.reset()

    for empty in (npu.NPUGraph(), graph):
        with pytest.raises(RuntimeError, match="NPUGraph::replay without a preceding successful capture"):
            empty.replay()
        with pytest.raises(RuntimeError, match=r"NPUGraph::pool\(\) without a preceding successful capture"):
            empty.pool()
        with pytest.raises(RuntimeError, match="NPUGraph::capture_end without capture_begin"):
            empty.capture_end()
        assert empty.num_tasks == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": npu.default_stream()}, "NPU graphs must be captured on a non-default stream"),
        ({"capture_error_mode": "strict"}, "Unknown capture error mode.*got strict"),
    ],
)
@pytest.mark.usefixtures("_no_collection")
def test_captures_that_cannot_begin(options, message):
    """
    A capture that does not begin holds no stream and leaves the current stream alone.
    """
    held = npu.hardware.streams_held
    with pytest.raises(RuntimeError, match=message):
        capture(lambda: torch.ones(2), **options)

    assert npu.hardware.streams_held == held


@pytest.mark.parametrize("capture_error_mode", ["global", "thread_local", "relaxed"])
def test_capture_on_a_stream_of_the_callers(capture_error_mode):
    """
    The stream that was chosen is the current one within the capture, in every known error mode.
    """
    stream = npu.Stream(device=0, priority=-1)
    _, current = capture(npu.current_stream, stream=stream, capture_error_mode=capture_error_mode)

    assert current is stream


def test_pool_handles():
    """
    Handles differ; a graph that was given none has a pool of its own.
    """
    x, handle = torch.ones(2), npu.graph_pool_handle()
    shared = [capture(lambda: x + 1, pool=handle)[0].pool() for _ in range(2)]
    own = [capture(lambda: x + 1)[0].pool() for _ in range(2)]

    assert shared == [handle, handle]
    assert len({handle, npu.graph_pool_handle(), *own}) == 4


def replay_two(*, keep=False, same_pool=True, run=lambda x: x * 2, within=False, later=False):
    """
    Hold the output of a graph weakly, then capture and replay a second one; return what became of the output.

    Args:
        keep: Hold the output itself, too, until the second graph is captured.
        same_pool: The second graph shares the memory pool.
        run: What the first graph does.
        within: Hold the output weakly from within the capture on.
        later: Replay a third graph, captured after the output was let go of, instead of the second.
    """
    x, pool = torch.ones(2), npu.graph_pool_handle()
    first, output = capture(lambda: npu.weak_ref_tensor(run(x)) if within else run(x), pool=pool)
    weak = npu.weak_ref_tensor(output)
    if not keep:
        del output
    other = pool if same_pool else npu.graph_pool_handle()
    second, _ = capture(lambda: x * 3, pool=other)
    output = None
    third, _ = capture(lambda: x * 4, pool=other)
    first.replay()
    before = weak.tolist()
    (third if later else second).replay()
    after = weak.tolist()
    first.replay()
    assert weak.tolist() == before
    assert x.tolist() == [1.0, 1.0]
    return before, after


@pytest.mark.parametrize("options", [{}, {"within": True}, {"within": True, "keep": True}])
def test_a_later_graph_of_the_pool_overwrites_what_nobody_held(options):
    """
    A weakly held output is good until a graph is replayed that was captured when its memory was free.
    """
    before, after = replay_two(**options)

    assert before == [2.0, 2.0]
    assert str(after) == "[nan, nan]"


@pytest.mark.parametrize(
    "options",
    [
        {"keep": True},
        {"same_pool": False},
        {"run": lambda x: x},
        {"run": lambda x: x[:1]},
        {"run": lambda x: x.view(1, 2)},
        {"run": lambda x: x[:1], "within": True},
    ],
    ids=["held", "another pool", "an input", "part of an input", "view of an input", "from within"],
)
def test_what_a_later_graph_leaves_alone(options):
    """
    Memory in use when a graph was captured, of another pool, or of no pool at all is not that graph's to use.
    """
    before, after = replay_two(**options)

    assert after == before


def test_memory_let_go_of_later_is_reused_later():
    """
    What one capture had to leave alone, the next one may use.
    """
    before, after = replay_two(keep=True, later=True)

    assert before == [2.0, 2.0]
    assert str(after) == "[nan, nan]"


def test_an_output_passed_on_by_a_later_graph_is_still_the_first_ones():
    """
    A graph that returns what another one made does not make it.
    """
    x, pool = torch.ones(2), npu.graph_pool_handle()
    first, *made = capture(lambda: x * 2, pool=pool)
    second, passed_on = capture(lambda: npu.weak_ref_tensor(made[0]), pool=pool)
    made.clear()
    third, _ = capture(lambda: x * 3, pool=pool)
    for graph in (first, second):
        graph.replay()
    assert passed_on.tolist() == [2.0, 2.0]

    third.replay()
    assert passed_on.isnan().all()

    second.replay()
    assert passed_on.isnan().all()

    first.replay()

    assert passed_on.tolist() == [2.0, 2.0]


def test_memory_of_a_graph_is_its_own_until_the_reset():
    """
    What was made within a capture is given to nobody else, also if the graph itself has no further use for it.
    """
    addresses = []
    graph, _ = capture(lambda: addresses.append(torch.empty(1000).data_ptr()))
    others = [torch.empty(1000) for _ in range(50)]

    assert graph.num_tasks == 0
    assert not {tensor.data_ptr() for tensor in others} & {*addresses}


def test_after_a_reset_the_memory_is_nobodys():
    """
    A graph that was reset has no outputs left that another one could overwrite.
    """
    x, pool = torch.ones(2), npu.graph_pool_handle()
    first, output = capture(lambda: x * 2, pool=pool)
    weak = npu.weak_ref_tensor(output)
    del output
    second, _ = capture(lambda: x * 3, pool=pool)
    first.replay()
    first.reset()
    second.replay()

    assert weak.tolist() == [2.0, 2.0]


def _fit(a, like):
    """
    *a* in a shape that can be combined with *like*, in memory of its own.
    """
    return (a if a.shape == like.shape else a.flatten()[:1]).clone()


STEPS = {
    "add": lambda a, b, i, n: a + _fit(b, a) * n,
    "sub_": lambda a, b, i, n: a.sub_(_fit(b, a), alpha=n),
    "copy_": lambda a, b, i, n: a.copy_(_fit(b, a)),
    "mul out": lambda a, b, i, n: torch.mul(
        a, n, out=b if a.shape == b.shape and a.is_set_to(b) else torch.empty_like(a)
    ),
    "maximum out": lambda a, b, i, n: torch.maximum(_fit(b, a).expand(a.shape), a, out=torch.empty(0)),
    "masked_fill_": lambda a, b, i, n: a.masked_fill_(a > _fit(b, a), n),
    "transpose": lambda a, b, i, n: a.unsqueeze(0).transpose(0, -1),
    "slice": lambda a, b, i, n: a[..., 1:] if a.shape[-1] > 1 else a,
    "reshape": lambda a, b, i, n: a.reshape(-1),
    "chunk": lambda a, b, i, n: a.chunk(2, dim=-1),
    "topk": lambda a, b, i, n: a.topk(1, dim=0),
    "max": lambda a, b, i, n: a.max(dim=-1, keepdim=True),
    "cumsum": lambda a, b, i, n: a.cumsum(0),
    "argsort": lambda a, b, i, n: a.argsort(dim=0, stable=True),
    "index": lambda a, b, i, n: a[i.flatten().remainder(a.shape[0])],
    "index_put_": lambda a, b, i, n: a.index_put_((i.flatten().remainder(a.shape[0]),), torch.tensor(float(n))),
    "repeat": lambda a, b, i, n: a[:2].repeat_interleave(2, 0),
    "half": lambda a, b, i, n: a.half().float(),
    "zeros": lambda a, b, i, n: torch.zeros_like(a).add_(a),
    "full": lambda a, b, i, n: torch.full(a.shape, float(n)).sub_(a),
    "int add_": lambda a, b, i, n: i.add_(n),
    "int mul": lambda a, b, i, n: i * n,
    "int out": lambda a, b, i, n: torch.bitwise_and(i, 5, out=i),
    "int where": lambda a, b, i, n: torch.where(i > n, i, torch.arange(i.shape[-1])),
    "to float": lambda a, b, i, n: i.to(torch.float32),
    "row": lambda a, b, i, n: custom.write_row(a, a[0] * n, a.shape[0] - 1),
}

programs = st.lists(
    st.tuples(st.sampled_from(list(STEPS)), *[st.integers(0, 9)] * 3, st.integers(-2, 3)), min_size=3, max_size=12
)


def run_steps(steps, *inputs):
    """
    Run straight-line code: each step takes any of the values so far, the newest first, and adds its results.
    """
    values = list(inputs)
    for name, a, b, i, number in steps:
        numbers = [value for value in reversed(values) if value.is_floating_point()]
        indices = [value for value in reversed(values) if not value.is_floating_point()]
        result = STEPS[name](
            numbers[a % len(numbers)], numbers[b % len(numbers)], indices[i % len(indices)], number
        )
        values += [result] if isinstance(result, torch.Tensor) else result or []
    return values


@given(programs)
@settings(max_examples=300, deadline=None)
def test_any_program(steps):
    """
    Whatever a program does, replays are eager to the bit: in every value it made and every input it wrote to.
    """
    check(lambda *inputs: run_steps(steps, *inputs), floats(3, 4), floats(4), ints(4))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x.amax(),),
        lambda x: (x.sum(dim=()),),
        lambda x: (torch.zeros(()) + x,),
        lambda x: tuple(torch.split_with_sizes_copy(x, [1, 2], 1)),
        lambda x: tuple(torch._foreach_add([x, x], 1.0)),
    ],
)
def test_empty_lists_and_lists_of_results(program):
    """
    An argument that is an empty list, and a result that is a list of tensors, replay like any other.
    """
    check(program, floats(2, 3))


def test_capture_must_not_end_within_a_task_group():
    """
    A task group left open is an error, and the graph holds nothing.
    """
    held = npu.hardware.streams_held

    def program():
        npu.graph_task_group_begin(npu.current_stream())
        torch.ones(2).add_(1)

    with pytest.raises(RuntimeError, match="within a task group"):
        capture(program)

    assert held == npu.hardware.streams_held


def test_an_event_is_waited_for_alone():
    """
    The host waits for an event's own mark, whatever else is stuck.
    """
    stuck, external, event = npu.Stream(), npu.ExternalEvent(), npu.Event()
    external.wait(stuck)
    event.record()
    event.synchronize()
    assert event.query()

    external.record()


def test_events_of_a_capture_stay_in_it():
    """
    What was recorded in a capture marks nothing outside.
    """
    event = npu.Event()
    capture(lambda: event.record(npu.current_stream()))

    with pytest.raises(RuntimeError, match="only its capture can wait"):
        event.wait(npu.Stream())
