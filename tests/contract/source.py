"""Names, parameters and defaults, read off Python source that is not imported."""

import ast
from inspect import Parameter, Signature
from pathlib import Path
from zipfile import Path as ZipPath

import attrs
import pytest

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".cache" / "contract"
PINS = [
    tuple(line.split("=="))
    for line in (ROOT / "requirements-contract.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
]

POSITIONAL, KEYWORD = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY

File = Path | ZipPath
"""A file on disk, or in a wheel, which is a zip file."""


def wheel(name: str, version: str) -> ZipPath:
    """
    The root folder in a wheel that was downloaded.
    """
    found = list(WHEELS.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if len(found) != 1:
        pytest.fail(f"{len(found)} wheels of {name} {version} in {WHEELS}: `make contract` downloads them", False)
    return ZipPath(found[0])


def torch_npu() -> ZipPath:
    """
    The root folder in the wheel of torch_npu.
    """
    (version,) = (version for name, version in PINS if name == "torch_npu")
    return wheel("torch_npu", version)


class Source(str):
    """
    A default, as it is written.
    """

    __repr__ = str.__str__


@attrs.frozen
class Definition:
    """
    A function or a class, and the file that defines it.
    """

    file: File
    node: ast.FunctionDef | ast.ClassDef

    @property
    def is_class(self) -> bool:
        """
        Whether it is a class.
        """
        return isinstance(self.node, ast.ClassDef)

    def members(self) -> dict[str, ast.FunctionDef | None]:
        """
        Public methods, and None for class attributes, those of bases included; a base in C++ is not seen.
        """
        members: dict[str, ast.FunctionDef | None] = {}
        for definition in reversed([self, *self._bases()]):
            for node in definition.node.body:
                if isinstance(node, ast.FunctionDef):
                    members[node.name] = node
                for target in _targets(node):
                    members[ast.unparse(target)] = None
        return {name: node for name, node in members.items() if not name.startswith("_")}

    def call(self) -> Signature:
        """
        What calling it takes.

        Raises:
            LookupError: It is a class without a constructor in Python.
        """
        if isinstance(self.node, ast.FunctionDef):
            return signature(self.node)
        for definition in [self, *self._bases()]:
            functions = {n.name: n for n in definition.node.body if isinstance(n, ast.FunctionDef)}
            for name in ("__init__", "__new__"):
                if name in functions:
                    return signature(functions[name], is_method=True)
        raise LookupError(f"{self.node.name} has no constructor in {self.file}")

    def _bases(self) -> list["Definition"]:
        bases = getattr(self.node, "bases", [])
        found = [find(self.file, base.id) for base in bases if isinstance(base, ast.Name)]
        return [d for base in found if base is not None and base.is_class for d in (base, *base._bases())]


def find(file: File, name: str) -> Definition | None:
    """
    What *name* means in *file*: defined there, or imported from a neighbour.
    """
    for node in reversed(parse(file).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Definition(file, node)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                neighbour = _neighbour(file, node.module)
                if (alias.asname or alias.name) == name:
                    return find(neighbour, alias.name)
                if alias.name == "*" and name in exports(neighbour):
                    return find(neighbour, name)
    return None


def exports(file: File) -> list[str]:
    """
    The names in `__all__`.
    """
    for node in parse(file).body:
        if any(ast.unparse(target) == "__all__" for target in _targets(node)):
            return ast.literal_eval(node.value)
    return []


_trees: dict[str, ast.Module] = {}


def parse(file: File) -> ast.Module:
    """
    The syntax tree of *file*, which is read once and must not change.
    """
    return _trees.get(str(file)) or _trees.setdefault(str(file), ast.parse(file.read_text(encoding="utf-8")))


def signature(function: ast.FunctionDef, *, is_method: bool = False) -> Signature:
    """
    The parameters of *function*, without `self`; a default is its source in one spelling.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    kinds = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [POSITIONAL] * len(arguments.args)
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = [_parameter(*each) for each in zip(positional, kinds, defaults, strict=True)]
    if is_method and not any(ast.unparse(d) == "staticmethod" for d in function.decorator_list):
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, KEYWORD, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD, None))
    return Signature(parameters)


def bind(accepted: Signature, call: ast.Call) -> None:
    """
    Bind the arguments of *call* as it is written.

    Raises:
        TypeError: It does not fit, or unpacks arguments, so that nobody can tell.
    """
    unpacked = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    if unpacked:
        raise TypeError("unpacks its arguments")
    accepted.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


def is_property(function: ast.FunctionDef | None) -> bool:
    """
    Whether a member of a class is a value, not a method.
    """
    return function is None or any(ast.unparse(d) == "property" for d in function.decorator_list)


def _parameter(argument, kind, default) -> Parameter:
    return Parameter(
        argument.arg, kind, default=Parameter.empty if default is None else Source(ast.unparse(default))
    )


def _targets(node) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _neighbour(file: File, module: str) -> File:
    path = file.parent / module.replace(".", "/")
    package = path / "__init__.py"
    return package if package.is_file() else path.parent / f"{path.name}.py"
