"""Files that appear whole or not at all."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.files import check_writable, whole_file
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


@pytest.mark.parametrize("exists", [True, False])
def test_link(tmp_path: Path, exists: bool) -> None:
    """
    Of a link the target is written, also one that is not there yet, and the link stays.
    """
    target, link = tmp_path / "file.txt", tmp_path / "link"
    link.symlink_to(target.name)
    if exists:
        target.write_text("before")
    with whole_file(link) as file:
        file.write("after")

    assert "after" == target.read_text()
    assert target.name == os.readlink(link)
    assert {target, link} == set(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_no_regular_file(tmp_path: Path, name: str) -> None:
    """
    A pipe is written to and stays one, whether it is named or a link to it; a failure on the way writes nothing.
    """
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / name) as file:
        file.writelines("half" if i else str(1 / i) for i in (1, 0))
    with whole_file(tmp_path / name) as file:
        file.write("whole")
    read = os.read(reader, 100)
    os.close(reader)

    assert b"whole" == read
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert {tmp_path / "pipe", tmp_path / "link"} == set(tmp_path.iterdir())


@pytest.mark.parametrize("is_file", [True, False])
def test_standard_output(tmp_path: Path, is_file: bool) -> None:
    """
    Standard output may be named, be it a pipe or a file, and what is printed before and after is kept.
    """
    code = (
        "from aclgraph_dispatch.bench.files import whole_file\n"
        "print('before', flush=True)\n"
        "with whole_file('/dev/stdout') as file: file.write('text\\n')\n"
        "print('after')\n"
    )
    path = tmp_path / "out"
    with path.open("w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out if is_file else subprocess.PIPE, check=True)

    assert b"before\ntext\nafter\n" == (path.read_bytes() if is_file else done.stdout)


@pytest.mark.parametrize("name", ["", ".", "folder", "folder/", "nowhere/file.txt", "file.txt/below", "loop"])
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """
    No name, a folder, a file in a folder that is not there, and a link to itself are refused before anything is
    written, by the check as well.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("before")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(name)
    with pytest.raises(ConfigError, match="cannot be written"), whole_file(name) as file:
        file.write("after")

    assert before == sorted(tmp_path.rglob("*"))
    assert "before" == (tmp_path / "file.txt").read_text()


def test_check_writes_nothing(tmp_path: Path) -> None:
    """
    What can be written passes the check, which leaves everything as it is.
    """
    (tmp_path / "file.txt").write_text("before")
    for path in (tmp_path / "file.txt", str(tmp_path / "new.txt"), "/dev/null"):
        check_writable(path)

    assert [tmp_path / "file.txt"] == list(tmp_path.iterdir())
    assert "before" == (tmp_path / "file.txt").read_text()


def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A folder that may not be written to is said before minutes of work.
    """
    # Asked of the system, for root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=r"file\.txt cannot be written"):
        check_writable(tmp_path / "file.txt")
