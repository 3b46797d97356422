"""Paired runs, on result files made up by hand."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from aclgraph_dispatch.bench.engine import EngineFailedError
from aclgraph_dispatch.bench.paired import METRICS, PairedRun, differing, medians, orders, ratios, read_run

from .results import REQUESTS, result


def read(tmp_path: Path, raw: Any) -> PairedRun:
    """
    Read a result file that holds *raw*.
    """
    path = tmp_path / "run.json"
    path.write_text(json.dumps(raw))
    return read_run(path, REQUESTS)


def run(value: float, *texts: str) -> PairedRun:
    """
    A run whose metrics are all *value*.
    """
    return PairedRun(dict.fromkeys(METRICS, value), texts, 0.0)


def test_metrics_are_those_of_the_issue() -> None:
    """
    Mean, median and two percentiles of four latencies, and three rates, by vLLM's names.
    """
    names = {f"{s}_{m}_ms" for s in ("mean", "median", "p90", "p99") for m in ("ttft", "tpot", "itl", "e2el")}

    assert names | {"output_throughput", "request_throughput", "request_goodput"} == set(METRICS)
    assert 19 == len(METRICS)


def test_orders_alternate() -> None:
    """
    In every round every contender has its turn, every other round backwards.
    """
    assert [("a", "b", "c"), ("c", "b", "a"), ("a", "b", "c")] == orders(["a", "b", "c"], 3)


def test_figures_are_vllms(tmp_path: Path) -> None:
    """
    A run's figures are those of the file, by the same names, and nothing else.
    """
    found = read(tmp_path, result(2.5))

    assert {name: 2.5 * number for number, name in enumerate(METRICS, start=1)} == found.metrics
    assert ("a b c", "d e") == found.texts


@pytest.mark.parametrize(
    ("starts", "lateness_ms"), [([7.0, 7.5], 0.0), ([7.0, 7.75], 250.0), ([7.0, 7.25], 0.0), ([7.5, 7.5], 0.0)]
)
def test_lateness(starts: list[float], lateness_ms: float, tmp_path: Path) -> None:
    """
    Lateness counts from when the first request was sent, and is the largest of all requests.
    """
    assert lateness_ms == read(tmp_path, result(start_times=starts)).lateness_ms


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"failed": 1, "completed": 1, "errors": ["", " refused\n"]},
            "1 of 2 requests failed; the first: refused",
        ),
        ({"failed": 2, "completed": 0}, "2 of 2 requests failed; the first: without a reason"),
        ({"completed": 1}, "0 of 2 requests failed; the first: without a reason"),
        ({"output_lens": [3, 1]}, "a request of 2 output tokens had 1; was it cut?"),
        ({"input_lens": [6, 17]}, "a request of 5 input tokens had 6; was it cut?"),
        ({"input_lens": [5]}, "is not a result file"),
        ({"start_times": [1.0]}, "is not a result file"),
        ({"errors": None}, "is not a result file"),
        ({"p99_itl_ms": math.nan}, "has a figure that is not finite"),
        ({"p99_itl_ms": None}, "is not a result file"),
    ],
)
def test_bad_results(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """
    A failed or a cut request, and a file that lacks something, are one error each.
    """
    with pytest.raises(EngineFailedError, match=message.replace("?", "\\?")):
        read(tmp_path, result(**changes))


@pytest.mark.parametrize("name", [*METRICS, "errors", "failed", "input_lens", "generated_texts", "start_times"])
def test_nothing_may_be_missing(name: str, tmp_path: Path) -> None:
    """
    Each key that is read is needed, and the error names it.
    """
    raw = {key: value for key, value in result().items() if key != name}

    with pytest.raises(
        EngineFailedError, match=rf"run\.json is not a result file of vLLM's: KeyError\('{name}'\)"
    ):
        read(tmp_path, raw)


def test_no_file(tmp_path: Path) -> None:
    """
    A client that wrote nothing, or half of it, is an error.
    """
    (tmp_path / "half.json").write_text('{"completed": ')

    for name in ("none.json", "half.json"):
        with pytest.raises(EngineFailedError, match="is not a result file"):
            read_run(tmp_path / name, REQUESTS)


def test_medians() -> None:
    """
    The median is over rounds, and not the mean.
    """
    assert dict.fromkeys(METRICS, 4.0) == medians([run(4.0), run(100.0), run(1.0)])


def test_ratios_are_within_rounds() -> None:
    """
    Each round is compared with the same round, then come the median and the range; not medians with medians.
    """
    ours, reference = [run(2.0), run(90.0), run(3.0)], [run(4.0), run(10.0), run(2.0)]
    expected = {"median": 1.5, "lowest": 0.5, "highest": 9.0}

    assert dict.fromkeys(METRICS, expected) == ratios(ours, reference)


def test_no_ratio_to_nothing() -> None:
    """
    Where the reference is 0 in one round there is no ratio; where we are, it is 0.
    """
    one_is_zero = [run(1.0), run(0.0)]

    assert dict.fromkeys(METRICS) == ratios([run(1.0), run(1.0)], one_is_zero)
    assert {name: {"median": 0.5, "lowest": 0.0, "highest": 1.0} for name in METRICS} == ratios(
        one_is_zero, [run(1.0), run(1.0)]
    )


def test_rounds_must_pair() -> None:
    """
    A missing round is an error, not left out.
    """
    with pytest.raises(ValueError, match="longer than"):
        ratios([run(1.0)], [run(1.0), run(1.0)])
    with pytest.raises(ValueError, match="longer than"):
        differing([run(1.0)], [run(1.0), run(1.0)])


def test_differing() -> None:
    """
    A request counts once, in whichever round its text differs from the reference's in that round.
    """
    reference = [run(1.0, "a", "b", "c"), run(1.0, "d", "e", "f")]
    ours = [run(1.0, "a", "b", "x"), run(1.0, "x", "e", "x")]

    assert [0, 2] == differing(ours, reference)
    assert [] == differing(reference, [attrs.evolve(r) for r in reference])
