"""Scripts that run as two ranks."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 60


def run_ranks(script: Path, directory: Path) -> list[str]:
    """
    Run `python SCRIPT STORE RANK` as ranks 0 and 1, with a file in *directory* for them to meet; return what each
    printed.

    Raises:
        AssertionError: One failed, or they wait for each other; the message holds what both printed.
    """
    paths = [directory / f"output-{rank}" for rank in range(2)]
    processes = []
    for rank, path in enumerate(paths):
        with path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(script), str(directory / "store"), str(rank)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    try:
        for process in processes:
            process.wait(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # its exit code tells
    finally:
        for process in processes:
            process.kill()
    codes = [process.wait() for process in processes]
    outputs = [path.read_text() for path in paths]
    assert codes == [0, 0], "\n".join([f"exit codes {codes}", *outputs])
    return outputs
