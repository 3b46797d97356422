"""Collectives in graphs of the emulated device: two ranks, each in a process of its own."""

from pathlib import Path

from ..rank_processes import run_ranks

PROGRAMS = Path(__file__).with_name("collectives.py")


def test_two_ranks(tmp_path):
    """
    Collectives replay with the waits for them, and a capture leaves other ranks alone; see the programs.
    """
    outputs = run_ranks(PROGRAMS, tmp_path)

    assert all(output.endswith("explored\n") for output in outputs), "\n".join(outputs)
