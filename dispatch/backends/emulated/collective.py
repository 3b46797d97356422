"""
Collectives, as a capture notes them.

On a device a collective is a kernel of a stream: noted at capture, ordered before what reads its result at
replay. On a CPU it is work of another thread, which torch's operators only start; the wait for it is an operator
of its own, or a method of what they return. So a collective and its wait are noted as one operation, which starts
the work and returns when it is done; a wait noted by itself would wait for the work of the capture, never for that
of a replay.

Nothing is communicated during a capture, so that a rank can capture alone: what the result looks like is asked of
the operator on the meta device.
"""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

_WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})


def is_collective(overload: OpOverload) -> bool:
    """
    Whether *overload* starts work that must be waited for.
    """
    return overload.namespace in ("c10d", "_c10d_functional") and not is_wait(overload)


def is_wait(overload: OpOverload) -> bool:
    """
    Whether *overload* waits, now or when its result is used, for the collective that made its argument.
    """
    return overload.name() in _WAITS


def fresh_result(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """
    Tensors like those that the collective would return, without contents.
    """
    on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return tree_map_only(
        torch.Tensor,
        lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype),
        overload(*on_meta[0], **on_meta[1]),
    )


def finished_work(overload: OpOverload, args: tuple[Any, ...]) -> Any:
    """
    What a collective of `torch.distributed` returns: the tensors that it writes, if any, and its work, here done.
    """
    work = torch._C._distributed_c10d.FakeWork().boxed()
    # Schemas say nothing of what is written; by custom it comes first.
    return work if len(overload._schema.returns) == 1 else (args[0], work)


def run(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]
) -> None:
    """
    Run the collective to its end; its fresh results go to *outputs*.
    """
    result = overload(*args, **kwargs)
    if overload.namespace == "c10d":
        work = result[-1] if isinstance(result, tuple) else result
        torch._C._distributed_c10d.Work.unbox(work).wait()
        return
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for tensor in results:
        torch.ops._c10d_functional.wait_tensor.default(tensor)
    if outputs:
        for output, tensor in zip(outputs, results, strict=True):
            output.copy_(tensor)
