"""What a module takes from its `npu` namespace, and how it calls it."""

import ast
from collections.abc import Iterator, Mapping

import attrs

from .source import File, parse


@attrs.frozen
class Use:
    """
    An attribute taken, and the call of it if it is called at once.

    Args:
        owner: The class of the object that it is taken from; empty for the namespace itself.
    """

    line: int
    owner: str
    name: str
    call: ast.Call | None


class Reader:
    """
    Follows the namespace, and what its classes make, through plain assignments and `with ... as`.

    Args:
        results: What calls return, by name: `{"NPUGraph": "NPUGraph", "current_stream": "Stream"}`.
    """

    def __init__(self, file: File, results: Mapping[str, str]) -> None:
        self._results = results
        self._nodes = list(_scoped(parse(file), ""))
        self._owners: dict[tuple[str, str], str] = {}
        # Twice: what `__init__` assigns may be taken in a method written above it.
        for scope, node in self._nodes * 2:
            for target, value in _assignments(node):
                owner = self._owner(value, scope)
                if owner:
                    self._owners[self._key(target, scope)] = owner

    def uses(self) -> list[Use]:
        """
        All of them, in the order of the file.
        """
        calls = {node.func: node for _, node in self._nodes if isinstance(node, ast.Call)}
        found = [
            Use(node.lineno, owner, node.attr, calls.get(node))
            for scope, node in self._nodes
            if isinstance(node, ast.Attribute) and (owner := self._owner(node.value, scope)) is not None
        ]
        return sorted(found, key=lambda use: use.line)

    def _owner(self, value: ast.expr, scope: str) -> str | None:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            taken_from = self._owner(value.func.value, scope)
            return None if taken_from is None else self._results.get(value.func.attr)
        if isinstance(value, ast.Name | ast.Attribute):
            is_namespace = ast.unparse(value).rpartition(".")[2] == "npu"
            return "" if is_namespace else self._owners.get(self._key(value, scope))
        return None

    @staticmethod
    def _key(target: ast.expr, scope: str) -> tuple[str, str]:
        return ("" if isinstance(target, ast.Attribute) else scope, ast.unparse(target))


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if not scope and isinstance(child, ast.FunctionDef):
            inner = f"{child.name}:{child.lineno}"
        yield inner, child
        yield from _scoped(child, inner)


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return [(node.optional_vars, node.context_expr)]
    return []
