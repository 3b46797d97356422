"""The table of a comparison of real runs."""

from typing import Any

import pytest

from aclgraph_dispatch.bench.live_table import live_table, wrong_texts

KEYS = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "output_throughput",
)


def document(**changes: Any) -> dict[str, Any]:
    """
    Two contenders, figures made up.
    """
    ratio = {"median": 0.5, "lowest": 0.25, "highest": 1.5}
    first: dict[str, Any] = {"name": "stock", "differing": [], "runs": [{"lateness_ms": 1.0}]}
    first |= {"metrics": dict(zip(KEYS, range(3, 10), strict=True)), "ratios": {}}
    second: dict[str, Any] = {"name": "piecewise", "differing": [], "runs": [{"lateness_ms": 2.25}]}
    second |= {"metrics": dict.fromkeys(KEYS, 0.125), "ratios": dict.fromkeys(KEYS, ratio) | {KEYS[2]: None}}
    return {
        "trace": {"num_requests": 7, "name": "t.csv", "mean_prompt_tokens": 20.4, "mean_output_tokens": 9.6},
        "model": {"name": "gqa"},
        "device": {"type": "cpu", "is_emulated": True},
        "settings": {"rate": 2.0, "rounds": 4},
        "lengths": {"prompt_scale": 16},
        "unstable": [],
        "contenders": [first, second],
        **changes,
    }


def test_table() -> None:
    """
    The load, a row of medians for each contender, a row of ratios for all but the first, and what was checked.
    """
    assert (
        live_table(document())
        == """\
7 requests of t.csv at rate 2, gqa on the emulated NPU, 4 rounds
prompts of 20 and outputs of 10 tokens in the mean, scaled down from the trace's

medians                TTFT ms       p99   TPOT ms       p99    ITL ms   E2EL ms  tokens/s
stock                     3.00      4.00      5.00      6.00      7.00      8.00      9.00
piecewise                 0.12      0.12      0.12      0.12      0.12      0.12      0.12

ratio to stock                     TTFT               TPOT                ITL               E2EL           tokens/s
piecewise              0.50 (0.25-1.50)                  -   0.50 (0.25-1.50)   0.50 (0.25-1.50)   0.50 (0.25-1.50)

texts      all identical
arrivals   no request was sent more than 2.2 ms late"""
    )


@pytest.mark.parametrize(("lateness_ms", "is_busy"), [(3.0, False), (3.1, True)])
def test_busy_machine(lateness_ms: float, *, is_busy: bool) -> None:
    """
    A client later than the first contender's TTFT, in any run, has a line of its own.
    """
    late = document()
    late["contenders"][1]["runs"] = [{"lateness_ms": lateness_ms}, {"lateness_ms": 0.5}]

    assert is_busy == live_table(late).endswith("the machine is too busy for these figures to be trusted")


def test_what_is_said_differs() -> None:
    """
    Lengths as in the trace, a real device, and one contender alone are said to be so.
    """
    alone = document(lengths={}, device={"type": "npu", "is_emulated": False})
    alone["contenders"].pop()
    lines = live_table(alone).splitlines()

    assert "gqa on npu, 4 rounds" in lines[0]
    assert lines[1].endswith("tokens in the mean, as in the trace")
    assert not any(line.startswith(("piecewise", "ratio")) for line in lines)


@pytest.mark.parametrize(
    ("differing", "unstable", "wrong", "line"),
    [
        ([], [], [], "all identical"),
        ([3], [], ["piecewise"], "DIFFERENT from stock: piecewise"),
        ([3], [3], [], "all identical where stock itself is; it differs in 1"),
        ([3, 4], [3], ["piecewise"], "DIFFERENT from stock: piecewise; it differs in 1 itself"),
        ([], [3, 5], [], "all identical where stock itself is; it differs in 2"),
    ],
)
def test_texts(differing: list[int], unstable: list[int], wrong: list[str], line: str) -> None:
    """
    Where the first contender's own texts differ from round to round, another's prove nothing.
    """
    texts = document(unstable=unstable)
    texts["contenders"][1]["differing"] = differing

    assert wrong == wrong_texts(texts)
    assert f"texts      {line}" in live_table(texts).splitlines()
