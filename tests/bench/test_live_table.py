"""The table of a comparison of real runs."""

from typing import Any

import pytest

from aclgraph_dispatch.bench.live_table import live_table, nothing_compared, wrong_texts

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
    first: dict[str, Any] = {
        "name": "stock",
        "description": "told this",
        "differing": [],
        "runs": [{"lateness_ms": 1.0}],
    }
    first |= {"metrics": dict(zip(KEYS, range(3, 10), strict=True)), "ratios": {}}
    second: dict[str, Any] = {
        "name": "piecewise",
        "description": "and that",
        "differing": [],
        "runs": [{"lateness_ms": 2.25}],
    }
    second |= {"metrics": dict.fromkeys(KEYS, 3.125), "ratios": dict.fromkeys(KEYS, ratio) | {KEYS[2]: None}}
    return {
        "trace": {"num_requests": 7, "name": "t.csv", "mean_prompt_tokens": 20.4, "mean_output_tokens": 9.6},
        "model": {"name": "gqa"},
        "device": {"type": "cpu", "is_emulated": True},
        "settings": {"rate": 2.0, "rounds": 4},
        "lengths": {"prompt_scale": 16},
        "unstable": [],
        "text_reference": "stock",
        "contenders": [first, second],
        **changes,
    }


def test_table() -> None:
    """
    The load, what each server was told, medians, ratios for all but the first, and what was checked.
    """
    assert (
        live_table(document())
        == """\
7 requests of t.csv at rate 2, gqa on the emulated NPU, 4 rounds
prompts of 20 and outputs of 10 tokens in the mean, scaled down from the trace's

servers
stock               told this
piecewise           and that

medians                TTFT ms       p99   TPOT ms       p99    ITL ms   E2EL ms  tokens/s
stock                     3.00      4.00      5.00      6.00      7.00      8.00      9.00
piecewise                 3.12      3.12      3.12      3.12      3.12      3.12      3.12

ratio to stock                     TTFT               TPOT                ITL               E2EL           tokens/s
piecewise              0.50 (0.25-1.50)                  -   0.50 (0.25-1.50)   0.50 (0.25-1.50)   0.50 (0.25-1.50)

texts      all identical
arrivals   no request was sent more than 2.2 ms late"""
    )


@pytest.mark.parametrize(
    ("ttfts_ms", "tpots_ms", "lateness_ms", "is_busy"),
    [
        ((3, 5), (4, 4), 3.0, False),
        ((3, 5), (4, 4), 3.1, True),
        ((5, 3), (4, 4), 3.1, True),
        ((90, 90), (4, 6), 40.0, False),
        ((90, 90), (4, 6), 40.1, True),
        ((90, 90), (6, 4), 40.1, True),
    ],
)
def test_busy_machine(
    ttfts_ms: tuple[float, float], tpots_ms: tuple[float, float], lateness_ms: float, *, is_busy: bool
) -> None:
    """
    A client later, in any run, than the least mean TTFT or ten of the least mean TPOT has a line of its own.
    """
    late = document()
    for contender, ttft_ms, tpot_ms in zip(late["contenders"], ttfts_ms, tpots_ms, strict=True):
        contender["metrics"] |= {"mean_ttft_ms": ttft_ms, "mean_tpot_ms": tpot_ms}
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
    assert "texts      not compared: no two contenders whose texts ought to be the same" in lines


@pytest.mark.parametrize(
    ("differing", "unstable", "wrong", "line"),
    [
        ([], [], [], "all identical"),
        ([3], [], ["piecewise"], "DIFFERENT from stock: piecewise"),
        ([3], [3], [], "identical in the 6 where stock itself is; it differs in 1"),
        ([3, 4], [3], ["piecewise"], "DIFFERENT from stock: piecewise; it differs in 1 itself"),
        ([], [3, 5], [], "identical in the 5 where stock itself is; it differs in 2"),
        (
            [0, 4],
            [*range(7)],
            [],
            "NOTHING COMPARED: stock itself differs from round to round in every request",
        ),
    ],
)
def test_texts(differing: list[int], unstable: list[int], wrong: list[str], line: str) -> None:
    """
    Where the first contender's own texts differ from round to round, another's prove nothing.
    """
    texts = document(unstable=unstable)
    texts["contenders"][1]["differing"] = differing

    assert wrong == wrong_texts(texts)
    assert (len(unstable) == 7) == nothing_compared(texts)
    assert f"texts      {line}" in live_table(texts).splitlines()


def test_texts_that_are_not_compared() -> None:
    """
    A contender whose texts are its own is left out, and what is compared is named; alone, one is not void.
    """
    some = document()
    stock, piecewise = some["contenders"]
    some["contenders"].insert(0, {**stock, "name": "stock_compiled", "differing": None})
    stock["ratios"] = piecewise["ratios"]
    alone = document(unstable=[*range(7)])
    alone["contenders"][1]["differing"] = None

    assert [] == wrong_texts(some)
    assert "texts      all identical among stock, piecewise" in live_table(some).splitlines()
    assert not nothing_compared(alone)
    assert live_table(alone).splitlines()[-2].endswith("; stock differs in 7 from round to round")
