"""
Runs of operators, interpreted without Python in between.

A replay calls operators with arguments that were fixed at capture. Called one by one from Python, each costs about
as much as a small kernel; TorchScript's interpreter makes the same calls for a third of that. It is given the
operators as they were noted, their tensors as inputs (constants might be folded), and nothing to optimise.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from .operator import operator
from .recorder import Task


class Interpreted:
    """
    Context in which programs run: as they are. To optimise them would take more time than they have to save, up to
    30 ms at the first run, and the setting is read at every run.
    """

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        self._previous = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *exc_info: object) -> None:
        torch._C._set_graph_executor_optimize(self._previous)


class Program:
    """
    Consecutive tasks as one callable, to be run within `Interpreted`.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        graph = torch._C.Graph()
        self._tensors: list[torch.Tensor] = []
        values: dict[Any, Any] = {}

        def tensor_value(tensor: torch.Tensor) -> Any:
            key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            if key not in values:
                values[key] = graph.addInput()
                values[key].setType(torch._C.TensorType.get())
                self._tensors.append(tensor)
            return values[key]

        def value(argument: Any, kind: str) -> Any:
            if isinstance(argument, torch.Tensor):
                return tensor_value(argument)
            if kind == "List[Tensor]" and argument is not None:
                items = [tensor_value(item) for item in argument]
                node = graph.create("prim::ListConstruct", items, 1)
                graph.insertNode(node)
                node.output().setType(torch._C.ListType(torch._C.TensorType.get()))
                return node.output()
            return graph.insertConstant(_constant(argument, kind))

        for task in tasks:
            schema = task.call()[0]._schema
            inputs = [value(given, _kind(argument)) for argument, given in _arguments(task)]
            node = graph.create(schema.name, inputs, len(schema.returns))
            graph.insertNode(node)
        graph.registerOutput(graph.insertConstant(None))
        self._function = torch._C._create_function_from_graph("replay", graph)

    def run(self) -> None:
        """
        Run the operators.
        """
        self._function(*self._tensors)


def is_expressible(task: Task) -> bool:
    """
    Whether the interpreter can make the task's call: no task update changes it, it writes to given tensors, and
    has done so when it returns.
    """
    if task.group is not None or not task.writes_in_place or operator(task.overload).is_collective:
        return False
    # An empty list has no type by itself.
    return _is_plain(task.call()[0]) and not any(
        isinstance(value, list | tuple) and not value for _, value in _arguments(task)
    )


def _arguments(task: Task) -> list[tuple[Any, Any]]:
    """
    Each argument of the schema with the value that the call gives it.
    """
    overload, args, kwargs = task.call()
    arguments = overload._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [(a, given.get(a.name, a.default_value)) for a in arguments]


@functools.cache
def _is_plain(overload: OpOverload) -> bool:
    """
    Whether the interpreter sees what the operator writes (else it would drop the call as useless), and has
    constants for all its arguments.
    """
    schema = overload._schema
    aliases = [a.alias_info for a in (*schema.arguments, *schema.returns) if a.alias_info is not None]
    writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (
        bool(writes)
        and all(_kind(a) == "Tensor" for a in writes)
        and all(_kind(a) in _KINDS for a in schema.arguments)
        # Schemas inferred from C++ signatures lose the second set, and the interpreter stumbles over them.
        and all(alias.before_set == alias.after_set for alias in aliases)
    )


_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
"""The interpreter knows them by number (c10/core/MemoryFormat.h)."""

_KINDS = frozenset(
    {"Tensor", "List[Tensor]", "int", "float", "bool", "str", "number", "List[int]", "List[float]", "List[bool]"}
)


def _kind(argument: Any) -> str:
    kind = str(argument.type)
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind


def _constant(argument: Any, kind: str) -> Any:
    """
    The constant in the type that the schema names: from Python, an int may stand for a float or a list.
    """
    if kind == "float" and type(argument) is int:
        return float(argument)
    if kind.startswith("List[") and isinstance(argument, int | float):
        return [argument]
    if isinstance(argument, torch.memory_format):
        return _MEMORY_FORMATS[argument]
    return list(argument) if isinstance(argument, tuple) else argument
