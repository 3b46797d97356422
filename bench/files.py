"""Files that appear whole or not at all."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from aclgraph_dispatch.errors import ConfigError

_STDOUT = 1


def check_writable(path: str | os.PathLike[str]) -> None:
    """
    Make sure that `whole_file` could write there, as far as that can be told without writing.

    Raises:
        ConfigError: The path is empty or a folder, or what has to be written to is missing or may not be.
    """
    named = Path(path)
    target = Path(os.path.realpath(named))
    code = 0
    if named.is_dir():  # An empty path is the current one.
        code = errno.EISDIR
    elif _is_in_place(named):
        code = 0 if os.access(named, os.W_OK) else errno.EACCES
    elif target.is_symlink():  # After all links were followed, so it leads to itself.
        code = errno.ELOOP
    elif not target.parent.is_dir():
        code = errno.ENOENT
    elif not os.access(target.parent, os.W_OK):
        code = errno.EACCES
    if code:
        raise _refusal(named, OSError(code, os.strerror(code)))


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """
    A text file to write, which takes its place once all is written; until then what was there stays.

    Of a link the target is written. What is no regular file, as a device or a pipe, cannot be replaced and gets
    all of the text at the end; so does the file that standard output goes to, whose further output would be lost.

    Raises:
        ConfigError: The file cannot be written there.
    """
    check_writable(path)
    named = Path(path)
    if _is_in_place(named):
        text = io.StringIO()
        yield text
        try:
            _write_in_place(named, text.getvalue())
        except OSError as error:
            raise _refusal(named, error) from error
        return
    target = Path(os.path.realpath(named))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            yield file
        unfinished.replace(target)
    except OSError as error:
        raise _refusal(named, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _is_in_place(path: Path) -> bool:
    return path.exists() and (not path.is_file() or _is_stdout(path))


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:  # There is no standard output.
        return False


def _write_in_place(path: Path, text: str) -> None:
    # Standard output through its own descriptor: opened anew, each would write over what the other wrote.
    is_stdout = _is_stdout(path)
    with open(
        _STDOUT if is_stdout else path,
        "w",
        encoding="utf-8",
        errors="replace",
        newline="\n",
        closefd=not is_stdout,
    ) as file:
        file.write(text)


def _refusal(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}; name a file in a folder that can be written to"
    )
