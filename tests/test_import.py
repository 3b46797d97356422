"""vLLM imports plugins in every process, so importing us costs next to nothing and does nothing."""

import os
import subprocess
import sys

import pytest


def python(code):
    """
    Run *code* in a fresh interpreter and return what it printed.
    """
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def best_seconds(code, runs=5):
    """
    The least processor time that *code* took, start of the interpreter included; waiting does not count.
    """
    seconds = []
    for _ in range(runs):
        before = os.times()
        python(code)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(seconds)


@pytest.mark.parametrize("module", ["torch", "torch_npu", "vllm", "cattrs", "click"])
def test_stays_light(module):
    """
    Heavy packages are imported where they are used.
    """
    code = f"import sys, aclgraph_dispatch; print({module!r} in sys.modules)"

    assert python(code) == "False\n"


def test_costs_little():
    """
    The import takes less than 0.1 seconds of processor time beyond that of numpy, which vLLM imports anyway.
    """
    assert best_seconds("import numpy, aclgraph_dispatch") - best_seconds("import numpy") < 0.1


def test_leaves_logging_alone():
    """
    Nothing configures logging, nothing is printed.
    """
    code = (
        "import logging; before = vars(logging.root).copy(); handlers = logging.root.handlers[:]\n"
        "import aclgraph_dispatch\n"
        "print((before, handlers) == (vars(logging.root), logging.root.handlers))"
    )

    assert python(code) == "True\n"
