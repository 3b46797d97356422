"""
Programs of two ranks, run by `test_collective.py` as `python collectives.py PROGRAM STORE RANK`. A rank that sees
something wrong raises.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from aclgraph_dispatch.backends import emulated as npu

functional = torch.ops._c10d_functional
NUM_REPLAYS = 3


def capture(run):
    """
    Capture *run*; return the graph and the output.
    """
    graph = npu.NPUGraph()
    with npu.graph(graph):
        output = run()
    return graph, output


def replay(graph, rank):
    """
    Replay *graph*, on one rank later than on the other: what does not wait for it reads too early.
    """
    if rank == 1:
        time.sleep(0.2)
    graph.replay()
    npu.synchronize()


def group():
    """
    The name of the group of both.
    """
    return dist.group.WORLD.group_name


def all_reduce_functional(rank):
    """
    What a compiled model holds: the sum of a fresh tensor, and what depends on it.
    """
    x = torch.zeros(1000)
    graph, y = capture(lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group())) * 2)
    assert graph.num_tasks == 2  # the sum with its wait, and the product
    for number in range(NUM_REPLAYS):
        x.fill_(10 * number + rank)
        replay(graph, rank)
        assert (y == 2 * (20 * number + 1)).all(), y


def all_reduce_waiting_when_used(rank):
    """
    torch's own front, whose result waits when it is used.
    """
    x = torch.zeros(1000)
    graph, y = capture(lambda: _functional_collectives.all_reduce(x, "sum", dist.group.WORLD) * 2)
    for number in range(NUM_REPLAYS):
        x.fill_(10 * number + rank)
        replay(graph, rank)
        assert (y == 2 * (20 * number + 1)).all(), y


def all_reduce_functional_in_place(rank):
    """
    The sum takes the place of its input.
    """
    x = torch.zeros(1000)
    graph, y = capture(lambda: functional.wait_tensor(functional.all_reduce_(x, "sum", group())) * 2)
    assert (x == 0).all()
    for number in range(NUM_REPLAYS):
        x.fill_(10 * number + rank)
        replay(graph, rank)
        assert (y == 2 * (20 * number + 1)).all(), y


def all_reduce(rank):
    """
    What a model holds that is not compiled.
    """
    x = torch.zeros(1000)

    def summed():
        dist.all_reduce(x)
        return x * 2

    graph, y = capture(summed)
    assert (x == 0).all()
    for number in range(NUM_REPLAYS):
        x.fill_(10 * number + rank)
        replay(graph, rank)
        assert (y == 2 * (20 * number + 1)).all(), y


def all_gather(rank):
    """
    Both parts end up in the tensor that is given for them.
    """
    part, parts = torch.zeros(2, 3), torch.zeros(4, 3)

    def gathered():
        dist.all_gather_into_tensor(parts, part)
        return parts + 1

    graph, y = capture(gathered)
    for number in range(NUM_REPLAYS):
        part.fill_(10 * number + rank)
        replay(graph, rank)
        assert y[:, 0].tolist() == [10 * number + 1] * 2 + [10 * number + 2] * 2, y


def exchange(rank):
    """
    Parts of different sizes; the result has a size of its own on each rank.
    """
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
    x = torch.zeros(sum(sent), 2, dtype=torch.int64)
    graph, y = capture(
        lambda: functional.wait_tensor(functional.all_to_all_single(x, received, sent, group())) + 1
    )
    assert y.shape == (sum(received), 2)
    for number in range(NUM_REPLAYS):
        x.fill_(10 * number + rank)
        replay(graph, rank)
        assert y[:, 0].tolist() == [10 * number + 1] * received[0] + [10 * number + 2] * received[1], y


def capture_alone(rank):
    """
    A capture needs no other rank and sends nothing.
    """
    x = torch.full((4,), float(rank))

    def communicate():
        dist.all_reduce(x)
        dist.barrier()
        return functional.wait_tensor(functional.all_reduce(x, "sum", group()))

    if rank == 0:
        capture(communicate)
        assert (x == 0).all()
    dist.all_reduce(x)
    assert (x == 1).all(), x


def explored(rank):
    """
    The device behind the host: other ranks wait where they must, whatever runs first here.
    """
    x = torch.zeros(1000)
    graph, y = capture(lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group())) * 2)
    for seed in range(NUM_REPLAYS):
        x.fill_(10 * seed + rank)
        with npu.explore(2 * seed + rank):
            replay(graph, rank)
        assert (y == 2 * (20 * seed + 1)).all(), y


PROGRAMS = (
    all_reduce_functional,
    all_reduce_waiting_when_used,
    all_reduce_functional_in_place,
    all_reduce,
    all_gather,
    exchange,
    capture_alone,
    explored,
)


def main(store, rank):
    """
    Run all programs as one of two ranks.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with torch.inference_mode():
        for program in PROGRAMS:
            sys.stdout.write(f"{program.__name__}\n")
            sys.stdout.flush()
            program(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
