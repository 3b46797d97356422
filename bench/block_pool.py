"""
Blocks of the KV cache and the prefixes they hold, in numbers only: what vLLM's block pool would do.

A full block can have a *key*, which says all tokens up to its end: a number that its request came with, or one of
the request's own. A request hits the longest row of its keys that is cached. Two requests may compute the same
block side by side, so a key can have several blocks; the oldest is hit.

Free blocks that are not cached are given away first; nothing tells them apart, so they are a mere number. Then the
cached ones without a user go, the longest unused first, and of those that one request left, its last first. vLLM
has one queue for both kinds, but the first join it at the front and the second at the end, so it is always in this
order.
"""

from collections import OrderedDict
from collections.abc import Hashable

import attrs

_NEVER = 1 << 62


@attrs.define(eq=False)
class CachedBlock:
    """
    A block that can be hit.

    Args:
        key: What it holds.
        num_users: Requests that have it in their table.
    """

    key: Hashable
    num_users: int = 1


@attrs.define(eq=False)
class BlockTable:
    """
    The blocks of a request: the first ones cached, the others only counted.

    Args:
        request: The request's index.
        numbers: See `SimulatedRequest.blocks`.
        capacity: Tokens that the blocks hold.
        cached: The cached ones.
        next_cached: Tokens with which one more block can be cached.
    """

    request: int
    numbers: tuple[int, ...]
    capacity: int = 0
    cached: list[CachedBlock] = attrs.Factory(list)
    next_cached: int = _NEVER

    def key(self, i: int) -> Hashable:
        """
        That of block *i*.
        """
        return self.numbers[i] if i < len(self.numbers) else (self.request, i)


class BlockPool:
    """
    All blocks.

    Args:
        num_blocks: Their number, without the one that vLLM keeps for padding.
        block_size: Tokens of a block.
        enable_prefix_caching: Whether blocks are cached at all.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self._block_size = block_size
        self._is_caching = enable_prefix_caching
        self._num_blank = num_blocks
        self._unused: OrderedDict[CachedBlock, None] = OrderedDict()
        self._cached: dict[Hashable, list[CachedBlock]] = {}

    @property
    def num_free(self) -> int:
        """
        Blocks without a user.
        """
        return self._num_blank + len(self._unused)

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """
        How many blocks *table* lacks to hold so many tokens.
        """
        return -(-num_tokens // self._block_size) - table.capacity // self._block_size

    def find(self, table: BlockTable, num_tokens: int) -> list[CachedBlock]:
        """
        The cached blocks that hold the first tokens of a request, *num_tokens* at most.
        """
        hits: list[CachedBlock] = []
        if self._is_caching:
            for i in range(num_tokens // self._block_size):
                blocks = self._cached.get(table.key(i))
                if blocks is None:
                    break
                hits.append(blocks[0])
        return hits

    def admit(self, table: BlockTable, hits: list[CachedBlock], num_tokens: int, num_known: int) -> bool:
        """
        Give an empty table *hits* and blocks for *num_tokens*; only if there are enough for *num_known* too.
        """
        num_blocks = -(-max(num_tokens, num_known) // self._block_size) - len(hits)
        # A hit that has no user is free, too, but not for anything else.
        if num_blocks + sum(not block.num_users for block in hits) > self.num_free:
            return False
        for block in hits:
            if not block.num_users:
                del self._unused[block]
            block.num_users += 1
        table.cached = hits
        table.capacity = len(hits) * self._block_size
        self.extend(table, num_tokens)
        if self._is_caching:
            self.cache(table, min(num_tokens, num_known))
        return True

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """
        Give *table* blocks for so many tokens; enough must be free.
        """
        num_blocks = self.num_missing(table, num_tokens)
        table.capacity += num_blocks * self._block_size
        num_blank = min(num_blocks, self._num_blank)
        self._num_blank -= num_blank
        for _ in range(num_blocks - num_blank):
            evicted, _ = self._unused.popitem(last=False)
            blocks = self._cached[evicted.key]
            blocks.remove(evicted)
            if not blocks:
                del self._cached[evicted.key]

    def cache(self, table: BlockTable, num_tokens: int) -> None:
        """
        Make the full blocks of the first *num_tokens* tokens known by their keys.
        """
        cached = table.cached
        for i in range(len(cached), num_tokens // self._block_size):
            block = CachedBlock(table.key(i))
            cached.append(block)
            self._cached.setdefault(block.key, []).append(block)
        table.next_cached = (len(cached) + 1) * self._block_size

    def free(self, table: BlockTable) -> None:
        """
        Take all blocks back; what they hold can be hit until they are given away.
        """
        self._num_blank += table.capacity // self._block_size - len(table.cached)
        for block in reversed(table.cached):
            block.num_users -= 1
            if not block.num_users:
                self._unused[block] = None
        table.cached = []
        table.capacity = 0
        table.next_cached = _NEVER
