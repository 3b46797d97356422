"""
The emulated namespace is `torch.npu`'s, and what `backends/npu.py` takes from it exists there.

Nothing is imported: both sides are read as source, torch_npu's from the wheel that `make contract` downloads.
Attributes that instances get at run time are not compared, on either side.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from inspect import Parameter, Signature
from itertools import count

import pytest

from .source import PINS, ROOT, Definition, bind, exports, find, is_property, signature, torch_npu, wheel
from .uses import Reader, Use

pytestmark = pytest.mark.contract

EMULATED = ROOT / "dispatch" / "backends" / "emulated" / "__init__.py"
BACKEND = ROOT / "dispatch" / "backends" / "npu.py"

STANDS_FOR = {
    "Event": "streams.py",
    "ExternalEvent": "streams.py",
    "NPUGraph": "graphs.py",
    "Stream": "streams.py",
    "current_stream": "utils.py",
    "default_stream": "utils.py",
    "empty_cache": "memory.py",
    "graph": "graphs.py",
    "graph_pool_handle": "graphs.py",
    "graph_task_group_begin": "graphs.py",
    "graph_task_group_end": "graphs.py",
    "graph_task_update_begin": "graphs.py",
    "graph_task_update_end": "graphs.py",
    "is_current_stream_capturing": "graphs.py",
    "mem_get_info": "__init__.py",
    "stream": "utils.py",
    "synchronize": "utils.py",
}
"""
What the emulation stands for: the function or class of the same name in this file of torch_npu/npu. Of a class,
the constructor and every public method are compared.
"""

OWN = {
    "hardware": "the state of the one device, which a real device keeps to itself",
    "explore": "chooses the schedule by which streams advance",
    "register_composite": "tells the emulation's recorder what an operator consists of",
    "weak_ref_tensor": "stands for torch_npu._C._weak_ref_tensor; a backend is given it, apart from the namespace",
}
"""What is the emulation's own; torch.npu must not have it, or it would hide what torch.npu has."""

NOT_OFFERED = {
    "Event.elapsed_time": "nothing takes time on the emulated device",
    "Event.from_ipc_handle": "one process",
    "Event.ipc_handle": "one process",
    "Event.recorded_time": "nothing takes time on the emulated device",
    "Stream.set_data_preprocess_stream": "changes speed only",
}
"""Public methods of torch_npu's classes that the emulation may lack."""

NOT_IN_PYTHON = {
    "Event.device": "attribute of the C++ base _NPUEventBase, as is npu_event",
    "NPUGraph.begin_capture_to_if_node": "method of the C++ base _NPUGraph, as is end_capture_to_conditional_node",
    "NPUGraph.get_currently_capturing_graph": "static method of the C++ base _NPUGraph",
    "NPUGraph.register_generator_state": "method of the C++ base _NPUGraph, as is enable_debug_mode",
    "Stream.device": "attribute of the C++ base _NPUStreamBase, as are device_index, device_type and npu_stream",
    "Stream.stream_id": "attribute of the C++ base _NPUStreamBase",
    "_NPUTaskGroupHandle": "what graph_task_group_end returns, with the attribute task_group, is a C++ class",
    "_weak_ref_tensor": "function of torch_npu._C",
}
"""
What could not be checked, because torch_npu defines it in C++ and its wheel has no stubs. Beyond these: types,
what is returned, what `**kwargs` of a constructor hands to a C++ base, and texts of errors raised there.
"""

COMPARED = sorted(STANDS_FOR.keys() & set(exports(EMULATED)))

RETURNS = {
    **{name: name for name in ("Event", "ExternalEvent", "NPUGraph", "Stream")},
    "current_stream": "Stream",
    "default_stream": "Stream",
    "record_event": "Event",
}

SEED_FILE = "vllm_ascend/compilation/acl_graph.py"
SEED_NAMES = {
    "ACLGraphWrapper": "integrations/acl_graph.py",
    "get_graph_params": "dispatch/params.py",
    "set_graph_params": "dispatch/params.py",
    "update_attn_params": "dispatch/backends/graph_params.py",
    "update_full_graph_params": "dispatch/params.py",
    "update_graph_params_workspaces": "dispatch/params.py",
    "update_mla_attn_params": "dispatch/backends/graph_params.py",
}
"""Names of the seed systems, and where we offer those that we offer."""


@pytest.fixture(scope="module")
def npu():
    """
    The file that `torch.npu` is.
    """
    return torch_npu() / "torch_npu" / "npu" / "__init__.py"


def unlike(ours: Signature, theirs: Signature) -> str:
    """
    How two signatures differ; empty if they do not. Annotations do not count.
    """
    # What a constructor takes as **kwargs goes on to a C++ base.
    compared = [p for p in theirs.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    same = list(ours.parameters.values()) == compared
    return "" if same else f"takes {ours}, torch_npu's {Signature(compared)}"


def differences(ours: Definition, theirs: Definition) -> list[str]:
    """
    Where a definition of the emulation differs from torch_npu's of the same name.
    """
    name = ours.node.name
    if ours.is_class != theirs.is_class:
        return [f"{name} is a class on one side only"]
    found = {name: unlike(ours.call(), theirs.call())}
    if ours.is_class:
        our_members, their_members = ours.members(), theirs.members()
        for member, method in their_members.items():
            key = f"{name}.{member}"
            if member not in our_members:
                found[key] = "" if key in NOT_OFFERED else "is missing"
            elif is_property(our_members[member]) != is_property(method):
                found[key] = "is a method on one side only"
            elif not is_property(method):
                parameters = [signature(f, is_method=True) for f in (our_members[member], method)]
                found[key] = unlike(*parameters)
    return [f"{key} {text}" for key, text in found.items() if text]


def all_differences(emulated, npu) -> list[str]:
    """
    Where the package whose `__init__.py` is *emulated* differs from `torch.npu`.
    """
    return [text for name in COMPARED for text in differences(find(emulated, name), find(npu, name))]


def misuses(file, npu) -> list[str]:
    """
    What the backend in *file* takes that `torch.npu` does not have, or not with such parameters.
    """
    found = []
    for use in Reader(file, RETURNS).uses():
        key = f"{use.owner or 'npu'}.{use.name}"
        try:
            accepted = None if key in NOT_IN_PYTHON else taken(npu, use)
            if use.call is not None and accepted is not None:
                bind(accepted, use.call)
        except (LookupError, TypeError) as error:
            found.append(f"line {use.line}: {key}: {error}")
    return found


def taken(npu, use: Use) -> Signature | None:
    """
    The parameters of what *use* takes; None if it is a value.

    Raises:
        LookupError: torch_npu has no such thing.
    """
    if not use.owner:
        definition = find(npu, use.name)
        if definition is None:
            raise LookupError("does not exist")
        return definition.call()
    members = find(npu, use.owner).members()
    if use.name not in members:
        raise LookupError("does not exist")
    method = members[use.name]
    return None if is_property(method) else signature(method, is_method=True)


def changes(ours: Definition, theirs: Definition) -> Iterator[Definition]:
    """
    Copies of *ours*, each with one compared parameter renamed or one compared default changed.
    """
    compared = {"__init__", *theirs.members()} if ours.is_class else {ours.node.name}
    for number in count():
        node = deepcopy(ours.node)
        functions = [f for f in (node.body if ours.is_class else [node]) if getattr(f, "name", None) in compared]
        parameters = [p for f in functions for p in [*f.args.args[ours.is_class :], *f.args.kwonlyargs]]
        defaults = [(f.args.defaults, i) for f in functions for i in range(len(f.args.defaults))]
        if number < len(parameters):
            parameters[number].arg = "planted"
        elif number < len(parameters) + len(defaults):
            values, position = defaults[number - len(parameters)]
            values[position] = ast.Constant("planted")
        else:
            return
        yield Definition(ours.file, node)


def copied(tmp_path, old: str, new: str):
    """
    A copy of the emulation with every word *old* changed to *new*; its `__init__.py`.
    """
    copy = shutil.copytree(EMULATED.parent, tmp_path / "emulated")
    for file in copy.rglob("*.py"):
        file.write_text(re.sub(rf"\b{old}\b", new, file.read_text(encoding="utf-8")), encoding="utf-8")
    return copy / "__init__.py"


def test_every_name_is_accounted_for():
    """
    What the emulation exports stands for something of torch.npu or is declared its own.
    """
    assert set() == set(exports(EMULATED)) - STANDS_FOR.keys() - OWN.keys()


def test_nothing_is_left_out():
    """
    The emulation exports everything that the tables name, so everything that graphs need.
    """
    assert set() == (STANDS_FOR.keys() | OWN.keys()) - set(exports(EMULATED))


@pytest.mark.parametrize(("name", "file"), STANDS_FOR.items(), ids=STANDS_FOR)
def test_where_torch_npu_defines_it(npu, name, file):
    """
    `torch.npu` offers the name, and means the definition in the file of the table.
    """
    found = find(npu, name)

    assert name in exports(npu)
    assert found is not None
    assert str(found.file).endswith(f"/torch_npu/npu/{file}")


@pytest.mark.parametrize("name", OWN)
def test_own_names_hide_nothing(npu, name):
    """
    A name of the emulation's own is none of torch.npu's.
    """
    assert find(npu, name) is None


@pytest.mark.parametrize("name", COMPARED)
def test_same_parameters(npu, name):
    """
    Constructor, methods and functions have the names, order, kinds and defaults of torch_npu's parameters.
    """
    assert differences(find(EMULATED, name), find(npu, name)) == []


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_exists(npu, name):
    """
    The table of what the emulation may lack names methods that torch_npu has.
    """
    owner, _, member = name.partition(".")

    assert member in find(npu, owner).members()


@pytest.mark.parametrize("name", NOT_IN_PYTHON)
def test_what_could_not_be_checked(npu, name):
    """
    The table of what is defined in C++ names nothing that could be read after all.
    """
    owner, _, member = name.rpartition(".")

    assert member not in (find(npu, owner).members() if owner else exports(npu))


def test_backend(npu):
    """
    `backends/npu.py` takes from its namespace what torch.npu has, and calls it as torch.npu can be called.
    """
    assert Reader(BACKEND, RETURNS).uses()
    assert misuses(BACKEND, npu) == []


@pytest.mark.parametrize("name", COMPARED)
def test_finds_any_change(npu, name):
    """
    One parameter renamed, or one default changed, in any function or public method is reported.
    """
    theirs = find(npu, name)

    assert all(
        "planted" in " ".join(differences(changed, theirs)) for changed in changes(find(EMULATED, name), theirs)
    )


@pytest.mark.parametrize("parameter", ["capture_error_mode", "npu_graph", "priority"])
def test_finds_a_parameter_renamed_in_a_copy(npu, tmp_path, parameter):
    """
    A parameter renamed throughout a copy of the emulation is reported.
    """
    assert any("renamed" in text for text in all_differences(copied(tmp_path, parameter, "renamed"), npu))


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("self.npu.graph(graph, mempool=self.mempool)", "unexpected keyword argument 'mempool'"),
        ("self.npu.graph_task_update_begin(handle)", "missing a required argument: 'handle'"),
        ("self.npu.graph_task_group_begin(*streams)", "unpacks its arguments"),
        ("self.npu.hold_weakly(tensor)", "npu.hold_weakly: does not exist"),
        ("self.update_stream.wait(event)", "Stream.wait: does not exist"),
        ("self.npu.current_stream().wait_stream()", "missing a required argument: 'stream'"),
        ("self.npu.NPUGraph().capture_begin(mode='relaxed')", "unexpected keyword argument 'mode'"),
    ],
)
def test_finds_misuse(npu, tmp_path, line, reported):
    """
    A call that torch.npu would not take is reported with its line.
    """
    file = tmp_path / "backend.py"
    file.write_text(
        f"class Backend:\n    def f(self):\n        self.update_stream = npu.Stream()\n        {line}\n"
    )

    assert [text for text in misuses(file, npu) if text.startswith("line 4: ") and reported in text]


@pytest.mark.parametrize(("name", "file"), SEED_NAMES.items(), ids=SEED_NAMES)
@pytest.mark.parametrize("version", [version for name, version in PINS if name == "vllm-ascend"])
def test_seed_systems(version, name, file):
    """
    What we offer under a name of vllm-ascend requires the same parameters, and shares the defaults of the others.
    """
    ours = find(ROOT / file, name)
    theirs = find(wheel("vllm-ascend", version) / SEED_FILE, name)
    if ours is None or theirs is None:
        pytest.skip(f"{'vllm-ascend' if ours else 'this project'} does not offer it")
    calls = [(ours.call(), theirs.call())]
    if theirs.is_class:
        our_members, their_members = ours.members(), theirs.members()
        assert their_members.keys() <= our_members.keys()
        calls += [
            (signature(our_members[member], is_method=True), signature(method, is_method=True))
            for member, method in their_members.items()
            if not is_property(method)
        ]

    for our_call, their_call in calls:
        shared = our_call.parameters.keys() & their_call.parameters.keys()
        defaults = [{name: c.parameters[name].default for name in shared} for c in (our_call, their_call)]

        assert required(our_call) == required(their_call)
        assert defaults[0] == defaults[1]


def required(accepted: Signature) -> list[str]:
    """
    The parameters that every call gives.
    """
    return [p.name for p in accepted.parameters.values() if p.default is p.empty]
