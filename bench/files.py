"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from aclgraph_dispatch.errors import ConfigError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """
    A text file to write, which takes its place once all is written; until then what was there stays.

    Raises:
        ConfigError: The file cannot be written there.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            yield file
        unfinished.replace(target)
    except OSError as error:
        msg = f"{target} cannot be written: {error.strerror}; name a file in a folder that can be written to"
        raise ConfigError(msg) from error
    finally:
        unfinished.unlink(missing_ok=True)
