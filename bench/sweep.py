"""
Comparisons over a grid of cases, kept in a folder, so that a sweep that was stopped goes on where it was.

Each contender of each case is a file named by the hash of all that its result depends on: the case, the requests,
the contender, and the version of this package. A file that is there is not computed again; one that cannot be read
is.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from aclgraph_dispatch.errors import ConfigError

from .compare import Case, Task, check_contenders, document, load_trace, run_all
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
    hashes = {case: load_trace(case).sha256 for case in cases}
    results: dict[Task, dict[str, Any]] = {}
    missing: list[Task] = []
    for task in itertools.product(cases, names):
        kept = _read(directory / _name(task, hashes[task[0]]))
        if kept is None:
            missing.append(task)
        else:
            results[task] = kept
    on_done(len(results))
    for task, result in run_all(missing, jobs=jobs):
        with whole_file(directory / _name(task, hashes[task[0]])) as file:
            json.dump(result, file, allow_nan=False)
        results[task] = result
        on_done(1)
    return [document(case, [results[case, name] for name in names], command) for case in cases]


def _name(task: Task, trace_hash: str) -> str:
    case, contender = task
    # The file may lie elsewhere next time; its requests are what counts.
    fields = attrs.asdict(case) | {"trace": trace_hash}
    key = json.dumps([fields, contender, version("aclgraph-dispatch")], sort_keys=True)
    return f"{contender}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.keys() >= {"metrics", "series", "per_request"} else None
