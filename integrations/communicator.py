"""The communicator of the emulated NPU: vLLM's for CPUs, and mixture of experts under data parallelism."""

from collections.abc import Sequence

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class EmulatedCommunicator(CpuCommunicator):
    """
    Gathers and reduces parts whose sizes differ by rank.

    Both are one exchange of parts, by an operator that graphs capture as all others.
    """

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """
        Collect the parts of all ranks, in the order of ranks.

        Args:
            input_: This rank's part, shape (n, ...), or several parts, each collected.
            dim: 0.
            sizes: `n` of every rank; None if all are this rank's.

        Returns:
            Tensors of shape (sum(sizes), ...), one or a list as *input_* is.
        """
        _require_rows(dim)
        if isinstance(input_, list):
            return [self._all_gatherv(part, sizes) for part in input_]
        return self._all_gatherv(input_, sizes)

    def _all_gatherv(self, part: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        rows = part.shape[0]
        sizes = [rows] * self.world_size if sizes is None else sizes
        if sizes[self.rank_in_group] != rows:
            raise ValueError(f"rank {self.rank_in_group} has {rows} rows; sizes are {sizes}")
        # Every rank is sent the same.
        copies = part.repeat(self.world_size, *[1] * (part.dim() - 1))
        return self._exchange(copies, [rows] * self.world_size, sizes)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """
        Sum over all ranks, and keep this rank's part.

        Args:
            input_: Shape (sum(sizes), ...), the parts in the order of ranks.
            dim: 0.
            sizes: Rows of each part; None if they are equal.

        Returns:
            Shape (sizes[rank], ...). The sum is taken in the order of ranks, so that all runs agree bit for bit.
        """
        _require_rows(dim)
        sizes = [input_.shape[0] // self.world_size] * self.world_size if sizes is None else sizes
        rows = sizes[self.rank_in_group]
        parts = self._exchange(input_.contiguous(), sizes, [rows] * self.world_size)
        return parts.view(self.world_size, rows, *input_.shape[1:]).sum(dim=0)

    def _exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert self.device_group is not None
        exchange, wait = torch.ops._c10d_functional.all_to_all_single, torch.ops._c10d_functional.wait_tensor
        result: torch.Tensor = wait(exchange(rows, received, sent, self.device_group.group_name))
        return result


def _require_rows(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"parts are rows, dim must be 0: {dim}")
