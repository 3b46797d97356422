"""
What an operator does to memory, read off its schema once.

The recorder must know four things of every operator it sees: whether it writes to memory it was given, whether
its result is a view, whether it needs a value on the host, and how to make it write its result to a given
place. Each answer is a table entry or a look at the schema; nothing of this is needed at replay.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch._ops import OpOverload

from . import collective

_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
_ALLOCATORS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)

composites: dict[OpOverload, Callable[..., Any]] = {}
"""
Operators written in Python that are captured operator by operator: what they read from their surroundings (the
forward context, say) would otherwise be read again at replay, and no host parameter would be baked in.
"""


@attrs.frozen
class Operator:
    """
    Facts about one operator.

    Args:
        overload: The operator.
        body: What to trace instead, if only its parts tell what it does.
        allocates: Whether it only makes room.
        written: For each result, the name of the argument that it is; None for fresh results.
        mutates: Whether it writes to an argument's memory (which `unsqueeze_`, say, does not), or declares no
            effect at all.
        is_collective: Whether it only starts what other ranks take part in, see `collective`.
        is_wait: Whether it waits for that.
        needs_host: Whether its result or its shape depends on a value, which the host would have to wait for.
        out: The variant that writes its results to given tensors, and the names of those arguments.
    """

    overload: OpOverload
    body: Callable[..., Any] | None
    allocates: bool
    written: tuple[str | None, ...]
    mutates: bool
    is_collective: bool
    is_wait: bool
    needs_host: bool
    out: tuple[OpOverload, tuple[str, ...]] | None

    @property
    def is_aten(self) -> bool:
        """
        Whether the schema can be trusted to say "fresh" or "view" only as far as storages confirm it.
        """
        return self.overload.namespace == "aten"


@functools.cache
def operator(overload: OpOverload) -> Operator:
    """
    Look *overload* up.
    """
    schema = overload._schema
    tags = overload.tags
    mutates = (schema.is_mutable and torch.Tag.inplace_view not in tags) or not schema.returns
    out = None if mutates else _out_variant(overload)
    return Operator(
        overload=overload,
        body=composites.get(overload) or (None if mutates else _parts(overload, out is not None)),
        allocates=overload.namespace == "aten" and schema.name.removeprefix("aten::") in _ALLOCATORS,
        written=_written(schema),
        mutates=mutates,
        is_collective=collective.is_collective(overload),
        is_wait=collective.is_wait(overload),
        needs_host=torch.Tag.data_dependent_output in tags
        or (torch.Tag.dynamic_output_shape in tags and schema.name != "aten::index"),
        out=out,
    )


def register_composite(overload: OpOverload, body: Callable[..., Any]) -> None:
    """
    Capture *overload* as the operators that the Python function *body* calls.
    """
    composites[overload] = body
    operator.cache_clear()


def _parts(overload: OpOverload, has_out: bool) -> Callable[..., Any] | None:
    """
    The composition of an operator made of others, where it may return a view or a copy depending on its input
    (`reshape`), or may ask the host in between (`is_nonzero`, `where` with a condition only). Only torch's own
    are known to do nothing besides.
    """
    reads_alias = any(a.alias_info is not None and not a.alias_info.is_write for a in overload._schema.arguments)
    is_unknown = reads_alias or (overload.namespace == "aten" and not has_out)
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if is_unknown and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
        # Not `decompose`: it prefers compositions in Python, which are others (`dropout` copies there).
        return functools.partial(overload._op_dk, key)
    return None


def _written(schema: Any) -> tuple[str | None, ...]:
    owners = {
        name: argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    return tuple(
        next((owners[name] for name in result.alias_info.before_set if name in owners), None)
        if result.alias_info is not None
        else None
        for result in schema.returns
    )


def _out_variant(overload: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """
    Find the overload with the same arguments and one more per result. Names and types must agree:
    `pow.Tensor_Scalar` is not served by `pow.Tensor_Tensor_out`. Options of a factory may be missing: the
    given tensor settles them.
    """
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments]
    without_options = [argument for argument in wanted if argument[0] not in _FACTORY_OPTIONS]
    packet = overload.overloadpacket
    candidates = [getattr(packet, name) for name in packet.overloads()]
    for arguments in (wanted, without_options):
        for candidate in candidates:
            given = candidate._schema.arguments
            outs = tuple(a.name for a in given if a.is_out)
            if len(outs) != len(overload._schema.returns) or not outs:
                continue
            if any(str(a.type) != "Tensor" for a in given if a.is_out):
                continue  # a list of tensors to write to: run and copied instead
            if [(a.name, str(a.type)) for a in given if not a.is_out] == arguments:
                return candidate, outs
    return None
