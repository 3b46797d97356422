"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from aclgraph_dispatch.bench.files import whole_file
from aclgraph_dispatch.errors import ConfigError


def test_replaces(tmp_path: Path) -> None:
    """
    What was there stays until the new text is complete, and nothing else is left.
    """
    path = tmp_path / "file.txt"
    path.write_text("before")
    with whole_file(path) as file:
        file.write("after")
        assert path.read_text() == "before"

    assert path.read_text() == "after"
    assert [path] == list(tmp_path.iterdir())


def test_failure(tmp_path: Path) -> None:
    """
    A failure on the way leaves no file.
    """
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "file.txt") as file:
        file.write(str(1 / 0))

    assert [] == list(tmp_path.iterdir())


def test_folder(tmp_path: Path) -> None:
    """
    A folder is not overwritten.
    """
    (tmp_path / "file.txt").mkdir()
    with pytest.raises(ConfigError, match=r"file\.txt cannot be written"), whole_file(tmp_path / "file.txt"):
        pass

    assert [tmp_path / "file.txt"] == list(tmp_path.iterdir())
