"""
The emulated operators have torch_npu's parameters, in its order: updates of a captured operator address them so.

torch_npu declares the fused ones in a YAML file of schemas, and those of the ATB library in a C++ header only.
"""

import ast
import re

import pytest

from .source import ROOT, find, parse, signature, torch_npu

pytestmark = pytest.mark.contract

OPERATORS = ROOT / "dispatch" / "backends" / "emulated" / "operators.py"
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
HEADER = "torch_npu/include/third_party/op-plugin/op_plugin/include/AtbOpsInterface.h"

FUSED = "npu_fused_infer_attention_score"
ATB = ["_npu_paged_attention", "_npu_paged_attention_get_workspace", "_npu_reshape_and_cache"]


def parameters(schema):
    """
    The parameters of a schema without their types: `["query", "*", "scale=1.0"]`.
    """
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return [parameter.rpartition(" ")[2] for parameter in inside.split(", ")]


def defined():
    """
    The schemas that the emulation defines, by the operator's name.
    """
    constants = {
        node.targets[0].id: node.value.value
        for node in parse(OPERATORS).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    schemas = {}
    for node in ast.walk(parse(OPERATORS)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_library.define":
            pieces = getattr(node.args[0], "values", [node.args[0]])
            schema = "".join(
                piece.value if isinstance(piece, ast.Constant) else constants[piece.value.id] for piece in pieces
            )
            schemas[schema.partition("(")[0]] = schema
    return schemas


def declared(name):
    """
    The parameters of an operator in torch_npu's file of schemas.
    """
    lines = (torch_npu() / SCHEMAS).read_text(encoding="utf-8").splitlines()
    (line,) = {line for line in lines if line.startswith(f"- func: {name}(")}
    return parameters(line)


def in_header(name):
    """
    The parameters of a function in the header: names, and whether each may be left out.
    """
    text = (torch_npu() / HEADER).read_text(encoding="utf-8")
    inside = re.search(rf"\b{name}\((.*?)\);", text)[1]
    return [(p[re.search(r"\w+$", p).start() :], "optional<" in p) for p in inside.split(", ")]


def test_fused_schema():
    """
    The fused operator is torch_npu's `.out`, parameter by parameter, defaults included.
    """
    assert parameters(defined()[f"{FUSED}.out"]) == declared(f"{FUSED}.out")


@pytest.mark.parametrize("name", [FUSED, f"_{FUSED}_get_max_workspace"])
def test_fused_variants(name):
    """
    The functional variant and the one that asks for the workspace take what `.out` takes, without its results.
    """
    assert declared(name) == declared(f"{FUSED}.out")[:-3]


@pytest.mark.parametrize("name", ATB)
def test_atb_functions(name):
    """
    Functions of the ATB library have the header's parameters, and can leave out what is optional there.
    """
    ours = signature(find(OPERATORS, name).node).parameters.values()

    assert [(p.name, p.default is not p.empty) for p in ours] == in_header(name)


@pytest.mark.parametrize("name", ["_npu_paged_attention", "_npu_reshape_and_cache"])
def test_atb_schemas(name):
    """
    What a capture sees of them has the same parameters in the same order.
    """
    ours = [parameter.partition("=") for parameter in parameters(defined()[name])]

    assert [(name, default == "None") for name, _, default in ours] == in_header(name)
