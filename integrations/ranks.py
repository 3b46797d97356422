"""The vote of data parallel ranks over vLLM's group."""

import torch
import torch.distributed
from vllm.distributed.parallel_state import get_dp_group

from aclgraph_dispatch import RuntimeMode, StepPlan
from aclgraph_dispatch.agreement import ROW_LENGTH, Vote


def exchange(vote: Vote) -> list[Vote]:
    """
    Send this rank's *vote* and return those of all ranks, in order of rank.

    Every rank must call it once a step, an idle one too. It is one exchange of a few integers through the host,
    as vLLM's own, which it replaces: that has no place for LoRA cases and passes, and lets each rank pad its
    tokens to sizes of its own mode before they are compared.
    """
    group = get_dp_group()
    mine = torch.tensor([vote.to_row()], dtype=torch.int32)
    rows = torch.empty(group.world_size, ROW_LENGTH, dtype=torch.int32)
    torch.distributed.all_gather_into_tensor(rows, mine, group=group.cpu_group)
    return [Vote.from_row(row) for row in rows.tolist()]


def padded_tokens(step_plan: StepPlan, votes: list[Vote]) -> torch.Tensor:
    """
    The tokens that each rank computes, an int32 tensor of shape (num_ranks,), the same on every rank.
    """
    [part] = step_plan.parts
    if part.mode is RuntimeMode.NONE:
        return torch.tensor([vote.num_tokens for vote in votes], dtype=torch.int32)
    return torch.full((len(votes),), part.num_padded_tokens, dtype=torch.int32)
