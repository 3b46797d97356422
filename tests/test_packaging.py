"""What the wheel declares, and what the tools say of the tree."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# The longest name first: "aclgraph_dispatch.bench" is a folder of its own, not one in dispatch/.
FOLDERS = dict(sorted(SETUPTOOLS["package-dir"].items(), reverse=True))

ENTRY_POINTS = {
    f"{group} {name}": target
    for group, targets in {"scripts": PROJECT["scripts"], **PROJECT["entry-points"]}.items()
    for name, target in targets.items()
}


def folder_of(package):
    """
    The folder that imports as *package*.
    """
    for mapped, folder in FOLDERS.items():
        if package == mapped or package.startswith(mapped + "."):
            return ROOT / folder / package.removeprefix(mapped).removeprefix(".").replace(".", "/")
    raise LookupError(package)


def run(*arguments):
    """
    Run a module's command line in the root; return its exit status and everything it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_packages():
    """
    Every folder with modules is declared, so shipped, and nothing else is.
    """
    found = {
        ".".join([mapped, *module.parent.relative_to(ROOT / folder).parts])
        for mapped, folder in FOLDERS.items()
        for module in (ROOT / folder).rglob("*.py")
    }

    assert sorted(found) == sorted(SETUPTOOLS["packages"])


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_regular_packages(package):
    """
    No package is a namespace that another distribution can add to.
    """
    assert (folder_of(package) / "__init__.py").is_file()


def test_typed():
    """
    Type checkers of our users read our annotations.
    """
    assert (ROOT / "dispatch" / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"]["aclgraph_dispatch"]


def test_dependencies():
    """
    Which build of torch, torch_npu or vLLM a machine has is not ours to choose.
    """
    requirements = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    names = {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}

    assert names
    assert set() == {name for name in names if name.startswith(("torch", "vllm"))}


@pytest.mark.parametrize("target", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_entry_points(target):
    """
    Every entry point names a function in a module that exists.
    """
    module, function = target.split(":")
    package, _, name = module.rpartition(".")
    path = folder_of(package) / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))

    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "arguments",
    [
        ("ruff", "check", "--no-cache"),
        ("ruff", "format", "--check", "--no-cache"),
        ("mypy",),
        ("mypy", "tests/typing/api.py"),
    ],
    ids=" ".join,
)
def test_tools(arguments):
    """
    The tree is clean, and the public API has the types that users write.
    """
    status, output = run(*arguments)

    assert status == 0, output


@pytest.mark.parametrize(("target", "command"), [("demo", "aclgraph-dispatch demo"), ("test", "pytest")])
def test_make(target, command):
    """
    A target installs what it needs, runs its own command, and no other.
    """
    # `make test` runs this too, and would hand its own flags down.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", target],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.splitlines()[-1] == f".venv/bin/{command}"
    assert not done.stderr
