"""Memory that graphs share, and who may overwrite whose results."""

import itertools
import weakref
from typing import TYPE_CHECKING

import attrs
import torch

from .device import hardware
from .recorder import alias, aliases, poison

if TYPE_CHECKING:
    from .graphs import NPUGraph

MempoolId = tuple[int, int]

_ids = itertools.count(1)


@attrs.define(eq=False)
class Block:
    """
    Memory of a weakly held output; `owner` is the tensor the captured function returned.
    """

    tensor: torch.Tensor
    owner: "weakref.ref[torch.Tensor]"


@attrs.define(eq=False)
class Mempool:
    """
    Memory shared by graphs.

    Args:
        blocks: Its weakly held outputs.
        fresh: Those that still hold what their graph's last replay wrote.
        graphs: The graphs that it holds memory for.
    """

    blocks: set[Block] = attrs.field(factory=set)
    fresh: set[Block] = attrs.field(factory=set)
    graphs: "weakref.WeakSet[NPUGraph]" = attrs.field(factory=weakref.WeakSet)

    @property
    def num_bytes(self) -> int:
        """
        Bytes of all outputs, which stay, and of the largest graph's intermediate results, which all graphs share.
        """
        return sum(graph.kept_bytes for graph in self.graphs) + max(
            (graph.transient_bytes for graph in self.graphs), default=0
        )

    def dropped(self) -> frozenset[Block]:
        """
        Outputs that nobody holds: a graph captured now takes their memory.
        """
        return frozenset(block for block in self.blocks if block.owner() is None)

    def overwrite(self, victims: frozenset[Block], own: set[Block], graph: "NPUGraph") -> None:
        """
        A replay of *graph* begins: it overwrites *victims*, and computes its *own* outputs anew.
        """
        for block in self.fresh & victims:
            poison(block.tensor)
            self.fresh.discard(block)
            clobbered[address_of(block.tensor)] = str(graph)
        if clobbered:
            for block in own:
                clobbered.pop(address_of(block.tensor), None)

    def forget(self, blocks: set[Block]) -> None:
        """
        The graph of *blocks* is no more.
        """
        self.blocks -= blocks
        self.fresh -= blocks
        for block in blocks:
            clobbered.pop(address_of(block.tensor), None)


mempools: "weakref.WeakValueDictionary[MempoolId, Mempool]" = weakref.WeakValueDictionary()
clobbered: dict[int, str] = {}
"""Address of an output that was overwritten since its graph's last replay: the name of the graph that did it."""
owners: "weakref.WeakValueDictionary[int, NPUGraph]" = weakref.WeakValueDictionary()
"""Address of a storage: the graph whose capture made it."""


def graph_pool_handle() -> MempoolId:
    """
    A new memory pool that graphs can share.
    """
    return (0, next(_ids))


def own_pool() -> MempoolId:
    """
    A new memory pool for one graph.
    """
    return (next(_ids), 0)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """
    Another tensor on the memory of *tensor* that does not keep it from being reused by later graphs.
    """
    address = address_of(tensor)
    graph: NPUGraph | None = hardware.capturing
    # Memory that was there before the capture is nobody's to reuse.
    if graph is None or not graph.made(address):
        graph = owners.get(address)
    if graph is not None:
        graph.hold_weakly(Block(alias(tensor), weakref.ref(tensor)))
    result: torch.Tensor = alias(tensor)
    aliases.add(result)
    return result


def mem_get_info(device: object = None) -> tuple[int, int]:
    """
    Free and total memory in bytes, as far as graphs take it.
    """
    total = hardware.limits.memory_bytes
    return total - sum(pool.num_bytes for pool in mempools.values()), total


def empty_cache() -> None:
    """
    Give cached memory back; the emulation caches none.
    """
    hardware.refuse_while_capturing("empty the cache")


def address_of(tensor: torch.Tensor) -> int:
    """
    Where the storage of *tensor* begins.
    """
    address: int = tensor.untyped_storage().data_ptr()
    return address
