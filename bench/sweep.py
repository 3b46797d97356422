"""
Comparisons over a grid of cases, kept in a folder, so that a sweep that was stopped goes on where it was.

Each contender of each case is a file named by the hash of all that its result depends on: the case, the requests,
the contents of the files it names, and this package's own source with its catalogue. A file that is there is not
computed again; one that cannot be read is.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import aclgraph_dispatch.bench
from aclgraph_dispatch.errors import ConfigError

from .case import Case, load_trace
from .compare import Task, check_contenders, document, run_all
from .files import whole_file


def grid(case: Case, axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """
    All cases that differ from *case* in the fields that *axes* name.
    """
    return [
        attrs.evolve(case, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]


def sweep(
    cases: Sequence[Case],
    names: Sequence[str],
    directory: Path,
    *,
    jobs: int = 1,
    on_done: Callable[[int], None] = lambda _count: None,
    command: str = "",
) -> list[dict[str, Any]]:
    """
    The comparison documents of *cases*.

    Args:
        cases: From `grid`.
        names: Contenders.
        directory: Where results are kept; it is made if it is not there.
        jobs: Processes.
        on_done: Told how many results are there that were not before.
        command: What makes these documents, for their readers.

    Raises:
        ConfigError: A case or a contender is not possible, or the folder cannot be written to.
        TraceError: A trace cannot be read.
    """
    check_contenders(names)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{directory} cannot be a folder for results: {exc.strerror}; name another") from None
    source = _source()
    paths = {task: directory / _name(task, source) for task in itertools.product(cases, names)}
    results: dict[Task, dict[str, Any]] = {}
    missing: list[Task] = []
    for task, path in paths.items():
        kept = _read(path)
        if kept is None:
            missing.append(task)
        else:
            results[task] = kept
    on_done(len(results))
    for task, result in run_all(missing, jobs=jobs):
        with whole_file(paths[task]) as file:
            json.dump(result, file, allow_nan=False)
        results[task] = result
        on_done(1)
    return [document(case, [results[case, name] for name in names], command) for case in cases]


def _name(task: Task, source: str) -> str:
    case, contender = task
    # The files may lie elsewhere next time; what is in them counts.
    contents = {"trace": load_trace(case).sha256, "model": _content(case.model), "device": _content(case.device)}
    key = json.dumps([attrs.asdict(case) | contents, contender, source], sort_keys=True)
    return f"{contender}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


def _content(name: str) -> str:
    """
    Of a file or a folder with a `config.json` the hash, else the name.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name


def _source() -> str:
    """
    A hash of all of this package: whatever is changed in it may change a result.
    """
    digest = hashlib.sha256()
    for folder in (aclgraph_dispatch, aclgraph_dispatch.bench):
        root = Path(folder.__path__[0])
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.keys() >= {"metrics", "series", "per_request"} else None
