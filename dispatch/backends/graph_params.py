"""
The functions by which runners written for vllm-ascend v0.11 update the attention of a FULL graph.

They are told neither an engine nor a graph. The engine's `AttentionParams` are set once for each role, and the
graph is the one that the forward context describes: two graphs with equal numbers of tokens are two graphs.

A runner that calls them replays by itself, so it calls `AttentionParams.order_updates` before. Others call
`AttentionParams.replay`, which does all.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ReplayError
from ..lengths import pad_lengths, uniform_query_ends
from ..params import AttentionParams
from ..step_plan import BatchDescriptor
from .attention import LatentLengths

MTP_METHODS = ("deepseek_mtp", "mtp")
"""What vLLM calls the method in which every request has the same number of drafts; v0.11 has the first name."""

_params: dict[str, AttentionParams] = {}


def set_attention_params(params: AttentionParams, role: str = "target") -> None:
    """
    Let the update functions, which are told no engine, use *params* for the graphs of *role*.

    Raises:
        ValueError: The role has some already.
    """
    if role in _params:
        msg = f"the parameters of {role!r} are set once: call clear_attention_params when their engine is gone"
        raise ValueError(msg)
    _params[role] = params


def get_attention_params(role: str = "target") -> AttentionParams:
    """
    The parameters of *role*.

    Raises:
        ReplayError: None were set.
    """
    if role not in _params:
        raise ReplayError(f"{role!r} has no attention parameters: call set_attention_params first")
    return _params[role]


def clear_attention_params(*roles: str) -> None:
    """
    Forget the parameters of *roles*, or of all; their engine is gone.
    """
    for role in roles or tuple(_params):
        _params.pop(role, None)


def update_attn_params(
    update_stream: Any, forward_context: Any, runtime_shape: int, kv_transfer_config: Any = None
) -> None:
    """
    Update the `PagedAttention` of all layers for a replay that was submitted.

    Args:
        update_stream: The backend's, which `AttentionParams.order_updates` made wait before the replay.
        forward_context: With `batch_descriptor`, ours or vLLM's, and `attn_metadata`: by layer name, what has
            `seq_lens`, the keys of each request as an int32 tensor on the host. Rows beyond have none.
        runtime_shape: Padded number of tokens.
        kv_transfer_config: Changes nothing: the stream is entered for each layer, as KV transfer wants it.

    Raises:
        ReplayError: The arguments do not fit each other or what was captured. Like any exception, it leaves the
            replay with worthless results, and the graph, or all graphs that may be meant, unusable until captured
            again.
    """

    def lengths(metadata: Any) -> torch.Tensor:
        return torch.tensor(pad_lengths(metadata.seq_lens.tolist(), runtime_shape), dtype=torch.int32)

    _update(update_stream, forward_context, runtime_shape, lengths)


def update_mla_attn_params(
    update_stream: Any, forward_context: Any, runtime_shape: int, speculative_config: Any
) -> None:
    """
    Update the `LatentAttention` of all layers for a replay that was submitted.

    Args:
        update_stream: As in `update_attn_params`.
        forward_context: As there, but `attn_metadata` have `decode.seq_lens_list`.
        runtime_shape: Padded number of tokens.
        speculative_config: With MTP, every row has `num_speculative_tokens` + 1 query tokens; else, or if it is
            None, a row is a token.

    Raises:
        ReplayError: As there.
    """
    is_mtp = speculative_config is not None and speculative_config.method in MTP_METHODS
    query_len = speculative_config.num_speculative_tokens + 1 if is_mtp else 1

    def lengths(metadata: Any) -> LatentLengths:
        ends = uniform_query_ends(runtime_shape, query_len)
        return LatentLengths(pad_lengths(metadata.decode.seq_lens_list, len(ends)), ends if is_mtp else None)

    _update(update_stream, forward_context, runtime_shape, lengths)


def _update(update_stream: Any, forward_context: Any, runtime_shape: int, lengths: Callable[[Any], Any]) -> None:
    described, metadata = forward_context.batch_descriptor, forward_context.attn_metadata
    params = get_attention_params(_role(forward_context))
    replayed = [d for d in params.descriptors if d.role == _role(forward_context) and _describes(described, d)]
    fault = None
    if len(replayed) != 1:
        fault = f"{described} must describe one captured graph, not {len(replayed)}: {replayed}"
    elif replayed[0].num_tokens != runtime_shape:
        fault = f"runtime_shape must be the graph's number of tokens: {runtime_shape} for {replayed[0]}"
    elif update_stream != params.backend.update_stream:
        fault = (
            "updates must be submitted to the stream that waited before the replay: "
            f"{update_stream} is not the backend's {params.backend.update_stream}"
        )
    if fault:
        error = ReplayError(fault)
        for descriptor in replayed:  # one of them is being replayed
            params.abandon(descriptor, error)
        raise error

    known: dict[int, Any] = {}

    def lengths_of(layer_name: str) -> Any:
        if layer_name not in metadata:
            raise ReplayError(f"no attention metadata for {layer_name} in a replay of {replayed[0]}")
        own = metadata[layer_name]  # often one object for all layers
        if id(own) not in known:
            known[id(own)] = lengths(own)
        return known[id(own)]

    params.update(replayed[0], lengths_of)


def _role(forward_context: Any) -> str:
    if isinstance(forward_context.batch_descriptor, BatchDescriptor):
        return forward_context.batch_descriptor.role
    return "drafter" if getattr(forward_context, "is_draft_model", False) else "target"


def _describes(described: Any, descriptor: BatchDescriptor) -> bool:
    """
    Whether all that *described*, ours or vLLM's of any version, says holds for *descriptor*.
    """
    if isinstance(described, BatchDescriptor):
        return described == descriptor
    if getattr(described, "num_tokens", None) != descriptor.num_tokens:
        return False
    is_uniform = descriptor.query_len is not None
    facts = {
        "num_reqs": descriptor.num_reqs,
        "uniform": is_uniform,
        "uniform_decode": is_uniform,  # v0.11
        "has_lora": descriptor.num_active_loras > 0,
        "num_active_loras": descriptor.num_active_loras,
    }
    return all(getattr(described, name, None) in (None, fact) for name, fact in facts.items())
