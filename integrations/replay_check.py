"""A debugging aid: every replay is compared with the operators it stands for, run on the same inputs."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from aclgraph_dispatch.errors import ConfigError, ReplayError

CHECK = "ACLGRAPH_DISPATCH_CHECK"


def check_requested() -> bool:
    """
    Whether `ACLGRAPH_DISPATCH_CHECK` asks for it; it doubles the work of every step.

    Raises:
        ConfigError: It is neither 0 nor 1.
    """
    value = os.environ.get(CHECK, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{CHECK} must be 0 or 1: {value!r}")
    return value == "1"


def replay_checked(
    name: str,
    output: Any,
    replay: Callable[[], Any],
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_padding: torch.Tensor | None,
    *,
    leaves_room: bool,
) -> Any:
    """
    Replay a graph and compare its output with what *run* makes of the same inputs, bit for bit.

    Args:
        name: Of the graph.
        output: Where the replay will write.
        replay: Replays it, to its end; returns its output.
        run: What was captured. It is called with copies, for it may write to its inputs; what it writes to the KV
            cache is what the replay has written there.
        args: Its inputs.
        kwargs: Its inputs by name.
        is_padding: The tokens whose rows are not compared, shape (num_tokens,); a drafter does not tell.
        leaves_room: Whether outputs may be memory that the graph only makes, for attention to write to.

    Raises:
        ReplayError: The outputs differ.
    """
    inputs = {_address(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    for tensor in tree_flatten(output)[0]:
        # What is NaN afterwards was not written.
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and _address(tensor) not in inputs:
            tensor.fill_(float("nan"))
    output = replay()
    found = tree_map_only(torch.Tensor, torch.clone, output)
    expected = run(*args, **kwargs)
    pairs = zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if isinstance(ours, torch.Tensor) and not (leaves_room and ours.isnan().all()):
            # What padding is computed from may be NaN, then on both sides.
            differs = (ours.ne(theirs) & ~(ours.isnan() & theirs.isnan())).flatten(1).any(dim=1)
            if is_padding is not None:
                differs &= ~is_padding
            if differs.any():
                rows = differs.nonzero().flatten().tolist()
                raise ReplayError(f"a replay of {name} differs from its operators in output {index}, rows {rows}")
    return output


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
