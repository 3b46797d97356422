"""A real model: what it says is readable, and the same with and without us."""

import re
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.demo import DemoResult, run_demo
from aclgraph_dispatch.bench.smollm2 import convert

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """
    The demonstration on SmolLM2-135M-Instruct, converted for it.
    """
    checkpoint = convert(tmp_path_factory.mktemp("smollm2") / "checkpoint")
    return run_demo(str(checkpoint), "full_and_piecewise", 8, print)


def test_tokens_are_identical(result: DemoResult) -> None:
    """
    Every token and every text of eight questions is the same.
    """
    assert [] == result.differing
    assert result.stock.texts == result.dispatched.texts
    assert 8 == len(result.stock.tokens)


def test_routes(result: DemoResult) -> None:
    """
    Decodes replay FULL graphs, prefills PIECEWISE ones.
    """
    steps = result.figures()["steps_by_route"]

    assert steps["FULL"] > steps["PIECEWISE"] > 0


def test_texts_are_readable(result: DemoResult) -> None:
    """
    The answers are words of English; about France it says Paris.
    """
    texts = result.dispatched.texts
    said = [word for text in texts.values() for word in text.split()]
    words = [word for word in said if re.fullmatch(r"[A-Za-z'-]+[.,:;?!]?", word)]
    (about_france,) = (texts[r.request_id] for r in result.requests if "France" in str(r.prompt))

    assert "Paris" in about_france
    assert len(words) > 0.8 * len(said) > 40


def test_converted_once(tmp_path: Path) -> None:
    """
    A second call leaves the checkpoint as it is.
    """
    directory = convert(tmp_path / "checkpoint")
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}

    assert directory == convert(tmp_path / "checkpoint")
    assert before == {path: path.stat().st_mtime_ns for path in directory.iterdir()}
