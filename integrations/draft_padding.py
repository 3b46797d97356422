"""
Ragged drafts laid out as uniform ones, for the length of one forward pass.

Theory of operation
-------------------
A FULL graph of decodes is captured for requests of q = 1 + k tokens each. When the drafter proposed fewer for some
of them, the batch has fewer tokens, T, and they lie one behind the other; the graph expects P rows, q for every
request:

    lengths 3 1 2, q = 4       a a a b c c                    T = 6
    for the forward pass       a a a .  b . . .  c c . .      P = 12; "." are pads

Only the forward pass sees the pads. Before it, everything that is kept per token is spread, `query_start_loc`
becomes 0, q, 2q, ..., and a request's length grows by its pads; after it the hidden states are gathered and
every buffer gets back, bit for bit, what it held. Sampling, statistics, scheduler and drafter know nothing of
it, so there is nothing to reject and nothing to exclude from acceptance rates. Buffers are rewritten where they
lie, for graphs know them by their addresses.

Only buffers of the device are, in the order of its stream. A buffer of the host may be the source of a copy to the
device that has not run yet, so what reads the host is shown a stand-in, and the buffer itself stays as it is.

Why the tokens do not change: attention is causal, and the rows of a request are its last q positions. With pads
behind the real tokens and the length grown by their number, a real token keeps its position, so it attends to
what it attended to before. Pads are written nowhere (slot -1), so that no KV block need be there for them. What
they read beyond the known tokens is whatever the block table points at, finite memory of the cache; only their
own rows are computed from it, and nobody gathers those. A pad repeats the last token of its request, at that
token's position: a valid id and a valid position without asking for any.

What must hold, and is the dispatcher's to decide: all requests decode, none has more than q tokens, and none
would grow beyond the model's maximum length (computed + q), for the block table ends there. A layer with a state
of its own, which every row moves on, must not be padded so.

Requests beyond those of the batch keep vLLM's padding: no tokens, length 0. The rows behind the last request
belong to nobody and are copies of vLLM's first row of padding.
"""

from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.utils import CpuGpuBuffer


class DraftPadding:
    """
    The uniform layout of one step at a time; `restore` ends it. The host never waits.

    Args:
        query_len: The most tokens that one uniform decode has.
        max_num_seqs: The most requests that a graph holds.
        device: Where the buffers to lay out are.
    """

    def __init__(self, *, query_len: int, max_num_seqs: int, device: torch.device) -> None:
        max_num_tokens = query_len * max_num_seqs
        self.query_len = query_len
        self._offsets = np.arange(query_len)
        self._sources = CpuGpuBuffer(max_num_tokens, dtype=torch.int64, device=device)
        self._rows = CpuGpuBuffer(max_num_tokens, dtype=torch.int64, device=device)
        self._is_pad = CpuGpuBuffer(max_num_tokens, dtype=torch.bool, device=device)
        self._num_pads = CpuGpuBuffer(max_num_seqs, dtype=torch.int32, device=device)
        self._indices = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32, pin_memory=PIN_MEMORY)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=PIN_MEMORY)
        self._num_reqs = self._num_reqs_padded = self._num_tokens = self._num_tokens_padded = 0
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def is_begun(self) -> bool:
        """
        Whether buffers are laid out now.
        """
        return bool(self._saved)

    def begin(self, lengths: npt.NDArray[np.int32], *, num_reqs_padded: int, num_tokens_padded: int) -> None:
        """
        Take the layout of a step.

        Args:
            lengths: Tokens of every request, shape (num_reqs,), 1 to q each and not all q.
            num_reqs_padded: Requests of the graph.
            num_tokens_padded: Tokens of the graph: q for each of its requests.
        """
        assert not self._saved
        self.query_len = query_len = num_tokens_padded // num_reqs_padded
        num_reqs, num_rows = len(lengths), len(lengths) * self.query_len
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        sources, is_pad = self._sources.np[:num_tokens_padded], self._is_pad.np[:num_tokens_padded]
        grid = num_reqs, self.query_len
        last = (lengths - 1)[:, None]
        np.add(
            (ends - lengths)[:, None],
            np.minimum(self._offsets[:query_len], last),
            out=sources[:num_rows].reshape(grid),
        )
        np.greater(self._offsets[:query_len], last, out=is_pad[:num_rows].reshape(grid))
        sources[num_rows:] = num_tokens
        is_pad[num_rows:] = True
        self._rows.np[:num_tokens] = np.flatnonzero(~is_pad)
        np.subtract(self.query_len, lengths, out=self._num_pads.np[:num_reqs])

        self._sources.copy_to_gpu(num_tokens_padded)
        self._is_pad.copy_to_gpu(num_tokens_padded)
        self._rows.copy_to_gpu(num_tokens)
        self._num_pads.copy_to_gpu(num_reqs)
        self._num_reqs, self._num_reqs_padded = num_reqs, num_reqs_padded
        self._num_tokens, self._num_tokens_padded = num_tokens, num_tokens_padded

    def lay_out_starts(self, query_start_loc: torch.Tensor) -> None:
        """
        Make the starts of the requests, in a buffer of shape (> num_reqs_padded,) on the device, uniform.
        """
        starts = query_start_loc[: self._num_reqs_padded + 1]
        self._save(starts)
        torch.arange(0, starts.numel() * self.query_len, self.query_len, out=starts)
        starts.clamp_(max=self._num_reqs * self.query_len)

    def lay_out_lengths(self, seq_lens: torch.Tensor) -> None:
        """
        Add every request's pads to its length, in a buffer of shape (>= num_reqs,) on the device.
        """
        lengths = seq_lens[: self._num_reqs]
        self._save(lengths)
        lengths.add_(self._num_pads.gpu[: self._num_reqs])

    def stand_in_for_starts(self, query_start_loc: CpuGpuBuffer) -> CpuGpuBuffer:
        """
        The same buffer on the device, with one on the host, shape (max_num_seqs + 1,), that says what is laid out.

        It holds until the next step begins.
        """
        stand_in = copy(query_start_loc)
        stand_in.cpu, stand_in.np = self._starts, self._starts.numpy()
        np.multiply(self._indices, self.query_len, out=stand_in.np)
        stand_in.np[self._num_reqs :] = self._num_reqs * self.query_len
        return stand_in

    def stand_in_for_lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """
        The lengths on the host with every request's pads, shape (max_num_seqs,), until the next step begins.
        """
        num_reqs = self._num_reqs
        torch.add(seq_lens[:num_reqs], self._num_pads.cpu[:num_reqs], out=self._lengths[:num_reqs])
        self._lengths[num_reqs:] = 0
        return self._lengths

    def lay_out_tokens(self, buffer: torch.Tensor, *, dim: int = 0, pad: int | None = None) -> None:
        """
        Spread what is kept per token.

        Args:
            buffer: Has `num_tokens_padded` elements or more along *dim*, filled up by vLLM's padding.
            dim: The dimension of the tokens.
            pad: What pads get; by default what the last token of their request has.
        """
        rows = buffer.narrow(dim, 0, self._num_tokens_padded)
        saved = self._save(rows)
        rows.copy_(saved.index_select(dim, self._sources.gpu[: self._num_tokens_padded]))
        if pad is not None:
            assert buffer.dim() == 1
            rows.masked_fill_(self._is_pad.gpu[: self._num_tokens_padded], pad)

    def gather(self, output: Any) -> Any:
        """
        The rows of the real tokens, in their ragged order, of all tensors in *output*, shape (num_tokens, ...).

        What one pipeline rank sends to the next is no tensor here and stays uniform: the next has the same plan.
        """
        rows = self._rows.gpu[: self._num_tokens]
        return tree_map_only(torch.Tensor, lambda tensor: tensor.index_select(0, rows), output)

    def restore(self) -> None:
        """
        Give every buffer back what it held.
        """
        while self._saved:
            rows, saved = self._saved.pop()
            rows.copy_(saved)

    def _save(self, rows: torch.Tensor) -> torch.Tensor:
        saved = rows.clone()
        self._saved.append((rows, saved))
        return saved
