"""
Records the operators of a captured region without letting them be seen.

Theory of operation
-------------------
A device captures by noting kernels instead of launching them. Here a dispatch mode sees every operator:

* one that writes to memory it was given is noted and not run, so no tensor outside changes (the KV cache
  included);
* one that makes a fresh result is run, because only running tells the result's shape and layout, and is noted
  together with the tensor it produced: at replay it writes there, through its out variant or a copy;
* a collective is noted together with the wait for it, and not run, so that no other rank is needed;
* views and allocations are done once, at capture; a replay works on the same memory;
* what needs a value on the host is refused, as on a device.

So the fresh results hold something during capture, but nothing that may be relied upon: they were computed from
memory that earlier, unrun operators should have written. They are overwritten with NaN when the capture ends.
Integers are zero from the start, so that an index made of them stays within bounds.

All tensors are noted as aliases. The tensor objects handed to the captured function are thus dropped when it
drops them, and that tells which memory later graphs of the same memory pool may reuse (see `graphs`).
"""

import ctypes
import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from . import collective
from .device import hardware
from .operator import Operator, operator
from .schedule import Explore

if TYPE_CHECKING:
    from .task_update import TaskGroup

_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class Task:
    """
    One noted operation; its arguments can be replaced by a task update.
    """

    __slots__ = ("args", "group", "kwargs", "lane", "outputs", "overload", "run")

    def __init__(self, overload: OpOverload, outputs: tuple[torch.Tensor, ...]) -> None:
        self.overload = overload
        self.outputs = outputs
        self.lane = hardware.current_stream
        self.group: TaskGroup | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.run: Callable[[], Any]

    def __repr__(self) -> str:
        return str(self.overload)

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        """
        Tensors among the arguments.
        """
        return _tensors((*self.args, *self.kwargs.values()))

    @property
    def writes_in_place(self) -> bool:
        """
        Whether its call writes to tensors that it is given, rather than to fresh ones that are then copied.
        """
        return not self.outputs or operator(self.overload).out is not None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Set the arguments; tensors among them by reference, all else by value.
        """
        self.args = args
        self.kwargs = kwargs
        if operator(self.overload).is_collective:
            self.run = functools.partial(collective.run, self.overload, args, kwargs, self.outputs)
        elif self.writes_in_place:
            overload, args, kwargs = self.call()
            # `_op` is the operator without its Python front: a third less time per call.
            self.run = functools.partial(overload._op, *args, **kwargs)
        else:
            self.run = functools.partial(_run_and_copy, self.overload, args, kwargs, self.outputs)

    def call(self) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
        """
        The operator that a replay calls, and its arguments.
        """
        variant = operator(self.overload).out
        if not self.outputs or variant is None:
            return self.overload, self.args, self.kwargs
        overload, names = variant
        accepted = {argument.name for argument in overload._schema.arguments}
        kwargs = {name: value for name, value in self.kwargs.items() if name in accepted}
        return overload, self.args, kwargs | dict(zip(names, self.outputs, strict=True))


class Recorder(TorchDispatchMode):
    """
    Notes operators as tasks, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []
        """Tasks, and what the graph notes between them."""
        self.fresh: list[torch.Tensor] = []
        """Results and allocations made during capture."""
        self.group_start: int | None = None
        """Index of the first task of the open task group."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        if op.body is not None:
            with self:
                return op.body(*args, **kwargs)
        if op.is_collective or op.is_wait:
            return self.note_collective(op, args, kwargs)
        if op.needs_host or selects_by_mask(op, args):
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {func} needs a value on the host"
            )
        if op.mutates:
            return self.note_write(op, args, kwargs)

        result = func(*args, **kwargs)
        tensors = _tensors(result)
        if op.allocates:
            for tensor in tensors:
                _make_harmless(tensor)
            self.fresh += alias(tensors)
            return result
        is_given = _shares_storage(tensors, _tensors((*args, *kwargs.values())))
        is_view = any(a.alias_info is not None for a in func._schema.returns) or (op.is_aten and is_given)
        if is_view or not tensors:
            return result
        task = Task(func, alias(tensors))
        task.bind(*alias((args, kwargs)))
        self.items.append(task)
        if not is_given:
            self.fresh += task.outputs
        return result

    def note_collective(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Note a collective that is not run, and return tensors such as it would; to wait for it is part of it.
        """
        if op.is_wait:
            return args[0]
        results: tuple[torch.Tensor, ...] = ()
        if op.overload.namespace == "c10d":
            result = collective.finished_work(op.overload, args)
        elif op.mutates:
            result = written(op, args, kwargs)
        else:
            result = collective.fresh_result(op.overload, args, kwargs)
            results = alias(_tensors(result))
            for tensor in results:
                _make_harmless(tensor)
        task = Task(op.overload, results)
        task.bind(*alias((args, kwargs)))
        self.items.append(task)
        self.fresh += results
        return result

    def note_write(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Note an operator that is not run, and return the arguments it would have written.
        """
        outs = _tensors(
            [kwargs.get(argument.name) for argument in op.overload._schema.arguments if argument.is_out]
        )
        if op.is_aten and outs and all(tensor.untyped_storage().nbytes() == 0 for tensor in outs):
            # `out=torch.empty(0)`: the operator makes room itself, and only running it tells how much.
            op.overload(*args, **kwargs)
            self.fresh += alias(outs)
        task = Task(op.overload, ())
        task.bind(*alias((args, kwargs)))
        self.items.append(task)
        return written(op, args, kwargs)


class UpdateRecorder(TorchDispatchMode):
    """
    Notes the operators that replace those of a task group; nothing is run. One serves all updates of a stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tasks: tuple[Task, ...] = ()
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def begin(self, tasks: tuple[Task, ...]) -> None:
        """
        Start to note what replaces *tasks*.
        """
        self.tasks = tasks
        self.calls = []
        self.__enter__()

    def end(self) -> list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]:
        """
        Return what was noted.

        Raises:
            RuntimeError: The operators differ from those captured, in number or in kind.
        """
        self.__exit__(None, None, None)
        calls, tasks = self.calls, self.tasks
        self.calls, self.tasks = [], ()  # they hold the KV cache
        if len(calls) != len(tasks) or any(t.overload is not c[0] for t, c in zip(tasks, calls, strict=True)):
            raise RuntimeError(
                f"a task update must issue the operators of its task group, {[t.overload for t in tasks]}; "
                f"got {[overload for overload, _, _ in calls]}"
            )
        return calls

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        if op.body is not None:
            with self:
                return op.body(*args, **kwargs)
        if op.mutates:
            self.calls.append((func, *alias((args, kwargs))))
            return written(op, args, kwargs)
        if op.allocates or any(a.alias_info is not None for a in func._schema.returns):
            return func(*args, **kwargs)
        task = self.tasks[len(self.calls)] if len(self.calls) < len(self.tasks) else None
        self.calls.append((func, *alias((args, kwargs))))
        if task is None or task.overload is not func:
            # The update fails at its end; until then the caller gets a result of the right kind.
            return func(*args, **kwargs)
        return task.outputs[0] if len(task.outputs) == 1 else task.outputs


class Aliases:
    """
    Tensors that do not own their memory: weak references, what graphs read, what an exploring schedule submitted.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._counts: Counter[int] = Counter()

    def add(self, tensor: torch.Tensor) -> None:
        """
        Count *tensor* as long as it lives.
        """
        key, address = id(tensor), tensor.untyped_storage().data_ptr()
        if key in self._refs:
            return

        def forget(_: object) -> None:
            del self._refs[key]
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

        self._refs[key] = weakref.ref(tensor, forget)
        self._counts[address] += 1

    def count(self, address: int) -> int:
        """
        How many there are of the memory at *address*.
        """
        return self._counts[address]


aliases = Aliases()


def alias(values: Any) -> Any:
    """
    Replace every tensor in nested tuples, lists and dictionaries by another object on the same memory.
    """
    if isinstance(values, torch.Tensor):
        # Not `aten.alias`: outside of inference mode a view keeps the object that it is a view of.
        result = values.data
        if isinstance(hardware.schedule, Explore):
            aliases.add(result)
        return result
    if type(values) in (tuple, list):
        return type(values)([alias(value) for value in values])
    if type(values) is dict:
        return {name: alias(value) for name, value in values.items()}
    return values


def poison(tensor: torch.Tensor) -> None:
    """
    Overwrite *tensor* with what nobody can mistake for a result: NaN, whose bits are all ones.
    """
    if tensor.is_floating_point():
        _overwrite(tensor, 0xFF)


def _overwrite(tensor: torch.Tensor, byte: int) -> None:
    # Not an operator: no mode must see it, and none may be delayed.
    if tensor.is_contiguous():
        ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)
    else:
        storage = tensor.untyped_storage()
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())


def written(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """
    The results of a writing operator: the arguments that it writes.

    Raises:
        RuntimeError: It returns fresh tensors besides; those do not exist before it has run.
    """
    if not op.written:
        return None
    if None in op.written:
        raise RuntimeError(
            f"{op.overload} cannot be captured: it writes to an argument and returns a fresh tensor"
        )
    names = [argument.name for argument in op.overload._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    results = tuple(bound[name] for name in op.written if name is not None)
    return results[0] if len(results) == 1 else results or None


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(result, torch.Tensor):
        return (result,)
    return (
        tuple(tensor for item in result for tensor in _tensors(item)) if isinstance(result, tuple | list) else ()
    )


def _make_harmless(tensor: torch.Tensor) -> None:
    _overwrite(tensor, 0xFF if tensor.is_floating_point() else 0)


def selects_by_mask(op: Operator, args: tuple[Any, ...]) -> bool:
    """
    Whether an index is a mask: the size of the result then depends on values.
    """
    if op.overload._schema.name not in _INDEXING:
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _shares_storage(results: tuple[torch.Tensor, ...], arguments: tuple[torch.Tensor, ...]) -> bool:
    """
    Whether a result lies in an argument's memory; `_unsafe_view` does without saying so.
    """
    pointers = {tensor.untyped_storage().data_ptr() for tensor in arguments}
    return any(t.numel() > 0 and t.untyped_storage().data_ptr() in pointers for t in results)


def _run_and_copy(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]
) -> None:
    for output, result in zip(outputs, _tensors(overload(*args, **kwargs)), strict=True):
        output.copy_(result)
