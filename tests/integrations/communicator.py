"""
The communicator between two ranks, run by `test_ranks.py` as `python communicator.py STORE RANK`.
"""

import sys

import torch
import torch.distributed as dist

from aclgraph_dispatch.backends import emulated
from aclgraph_dispatch.integrations.communicator import EmulatedCommunicator

SIZES = [3, 5]
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)


def rows(rank, sizes, dtype=torch.float32):
    """
    The part of *rank*: row i of all parts together holds i.
    """
    start = sum(sizes[:rank])
    return torch.arange(start, start + sizes[rank], dtype=dtype)[:, None].repeat(1, 4)


def gathers(communicator, rank):
    """
    Parts of equal and of different sizes arrive in the order of ranks, of every type that experts are given.
    """
    for sizes in (SIZES, [0, 2], [4, 4]):
        everything = torch.cat([rows(r, sizes) for r in range(2)])
        for dtype in DTYPES:
            part = rows(rank, sizes, dtype)
            assert communicator.all_gatherv(part, sizes=sizes).equal(everything.to(dtype))
            assert all(
                x.equal(y)
                for x, y in zip(
                    communicator.all_gatherv([part, part[:, :1]], 0, sizes),
                    [everything.to(dtype), everything.to(dtype)[:, :1]],
                    strict=True,
                )
            )
    assert communicator.all_gatherv(rows(rank, [2, 2])).equal(torch.cat([rows(r, [2, 2]) for r in range(2)]))


def reduces(communicator, rank):
    """
    Each rank gets its part of the sum over ranks, from rows next to each other or not.
    """
    for sizes in (SIZES, [0, 2], [4, 4]):
        everything = torch.cat([rows(r, sizes) for r in range(2)])
        expected = rows(rank, sizes) * 101
        for given in (everything * 100**rank, (everything * 100**rank).t().contiguous().t()):
            assert communicator.reduce_scatterv(given, 0, sizes).equal(expected)
            output = torch.empty_like(expected)
            communicator.reduce_scatterv_into_output(given, output, 0, sizes)
            assert output.equal(expected)
    assert communicator.reduce_scatterv(torch.ones(6, 2), 0).equal(torch.full((3, 2), 2.0))


def refuses(communicator, rank):
    """
    What would send rows to the wrong place.
    """
    for call, error in (
        (lambda: communicator.all_gatherv(torch.ones(2, 2), 1), NotImplementedError),
        (lambda: communicator.reduce_scatterv(torch.ones(2, 2), 1), NotImplementedError),
        (lambda: communicator.all_gatherv(torch.ones(2, 2), 0, [3, 3]), ValueError),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError(error)


def is_captured(communicator, rank):
    """
    A graph holds both, with the sizes of its capture.
    """
    x = torch.zeros(3, 4)

    def there_and_back():
        gathered = communicator.all_gatherv(x, 0, [3, 3])
        return communicator.reduce_scatterv(gathered * (rank + 1), 0, [3, 3])

    graph = emulated.NPUGraph()
    with emulated.graph(graph):
        output = there_and_back()
    for number in range(3):
        x.copy_(rows(rank, [3, 3]) + number)
        graph.replay()
        emulated.synchronize()
        assert output.equal(x * 3)


def main(store, rank):
    """
    Run all of them as one of two ranks.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    communicator = EmulatedCommunicator(group, device_group=group, unique_name="dp:0")
    with torch.inference_mode():
        for program in (gathers, reduces, refuses, is_captured):
            sys.stdout.write(f"{program.__name__}\n")
            sys.stdout.flush()
            program(communicator, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
