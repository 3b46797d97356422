"""What the numbers of a comparison say."""

from typing import Any

import pytest

from aclgraph_dispatch.bench.findings import Finding, findings

from .documents import document, empty_document

Mean = tuple[float | None, float | None, float | None]


def tpot_of(**means: Mean) -> Finding:
    """
    What is said of a mean TPOT and its interval; the contender "default" is vLLM's.
    """
    compared = document()
    template = compared["contenders"][0]
    compared["contenders"] = [
        template
        | {
            "name": name,
            "policy": "full_and_piecewise" if name == "default" else name,
            "ladder": "vllm",
            "metrics": template["metrics"]
            | {
                "tpot_ms": template["metrics"]["tpot_ms"]
                | dict(zip(("mean", "mean_low", "mean_high"), mean, strict=True))
            },
        }
        for name, mean in means.items()
    ]
    return findings(compared)[0]


def goodput_of(**rates: float | None) -> Finding:
    """
    What is said of a goodput.
    """
    compared: dict[str, Any] = document()
    template = compared["contenders"][0]
    compared["contenders"] = [
        template | {"name": name, "metrics": template["metrics"] | {"goodput_requests_per_second": rate}}
        for name, rate in rates.items()
    ]
    return findings(compared)[2]


def test_clear() -> None:
    """
    The best, how far below vLLM's default, how far above the oracle, and that its interval is apart.
    """
    expected = Finding(
        "mean TPOT",
        ("ours",),
        "18.00 ms",
        (
            "10.0 % below vLLM's default (20.00 ms).",
            "20.0 % above the oracle (15.00 ms).",
            "Its interval, 17.90 to 18.10 ms, is apart from all others'.",
        ),
    )

    assert expected == tpot_of(default=(20, 19.9, 20.1), ours=(18, 17.9, 18.1), oracle=(15, 14.9, 15.1))


@pytest.mark.parametrize(
    ("means", "names", "sentences"),
    [
        (
            {"default": (20, 19, 21), "ours": (19.5, 18.5, 20.5)},
            ("ours",),
            [
                "2.50 % below vLLM's default (20.00 ms); their intervals overlap, so that this may be chance.",
                "There is no oracle to compare with.",
                "Its interval, 18.50 to 20.50 ms, overlaps with that of default: by intervals of their own "
                "they are not told apart.",
            ],
        ),
        (
            {"default": (18, 17.9, 18.1), "ours": (20, 19.9, 20.1)},
            ("default",),
            [
                "This is vLLM's default.",
                "There is no oracle to compare with.",
                "Its interval, 17.90 to 18.10 ms, is apart from all others'.",
            ],
        ),
        (
            {"default": (18.001, 17, 19), "ours": (18, 17, 19), "slow": (60, 59, 61)},
            ("default", "ours"),
            [
                "A tie: 2 contenders are equal within 0.1 %.",
                "vLLM's default is among the best.",
                "There is no oracle to compare with.",
                "Its interval, 17.00 to 19.00 ms, is apart from all others'.",
            ],
        ),
        (
            {"a": (18, None, None), "b": (18, 17, 19), "oracle": (18, 17, 19)},
            ("a", "b"),
            [
                "All 2 contenders are equal within 0.1 %.",
                "vLLM's default is not among the contenders.",
                "Equal to the oracle (18.00 ms).",
                "Too few requests for an interval.",
            ],
        ),
        (
            {"a": (18, 17, 19), "b": (19, 18, 20), "c": (19, 18, 20), "d": (19, 18, 20), "oracle": (5, 4, 6)},
            ("a",),
            [
                "vLLM's default is not among the contenders.",
                "3.60 times the oracle (5.000 ms).",
                "Its interval, 17.00 to 19.00 ms, overlaps with that of 3 others: by intervals of their own "
                "they are not told apart.",
            ],
        ),
        (
            {"default": (None, None, None), "ours": (18, 17, 19)},
            ("ours",),
            [
                "vLLM's default has no value.",
                "There is no oracle to compare with.",
                "Its interval, 17.00 to 19.00 ms.",
            ],
        ),
        (
            {"ours": (18, 17, 19), "unsure": (21, None, None), "oracle": (19, 18, 20)},
            ("ours",),
            [
                "vLLM's default is not among the contenders.",
                "5.26 % below the oracle (19.00 ms).",
                "Its interval, 17.00 to 19.00 ms.",
            ],
        ),
        ({"ours": (None, None, None), "oracle": (15, 14, 16)}, (), ["No contender has a value."]),
    ],
    ids=["chance", "default", "tie", "all", "many", "no default", "unsure", "none"],
)
def test_claims(means: dict[str, Mean], names: tuple[str, ...], sentences: list[str]) -> None:
    """
    Ties and overlaps are called so, and nothing is said that is not known.
    """
    finding = tpot_of(**means)

    assert names == finding.names
    assert sentences == list(finding.sentences)


def test_goodput() -> None:
    """
    Of the goodput the highest is the best, and it has no interval.
    """
    finding = goodput_of(slow=1.0, ours=2.0, oracle=4.0)

    assert (
        Finding(
            "goodput",
            ("ours",),
            "2.000 requests/s",
            (
                "vLLM's default is not among the contenders.",
                "50.0 % below the oracle (4.000 requests/s).",
                "A request counts with a TTFT up to 1000 ms and a TPOT up to 50 ms.",
            ),
        )
        == finding
    )


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [({"a": 0.0, "b": 0.0}, "It is 0 for every contender."), ({"a": None}, "No contender has a value.")],
)
def test_no_goodput(rates: dict[str, float | None], sentence: str) -> None:
    """
    Where no request meets the limits, nobody is the best.
    """
    finding = goodput_of(**rates)

    assert () == finding.names
    assert sentence == finding.sentences[0]


def test_nothing() -> None:
    """
    Without numbers and without contenders there is no winner.
    """
    for nothing in (empty_document(), document() | {"contenders": []}):
        assert [()] * 3 == [finding.names for finding in findings(nothing)]


def test_no_limits() -> None:
    """
    Without limits every request counts.
    """
    unlimited = document() | {"slo": {"ttft_ms": None, "tpot_ms": None}}

    assert "Every request counts." == findings(unlimited)[2].sentences[-1]


@pytest.mark.parametrize("share", [1.0, 0.99, None])
def test_all_within_limits(share: float | None) -> None:
    """
    Where all requests of all contenders count, the goodput says little, and that is said.
    """
    compared = document()
    for contender in compared["contenders"]:
        contender["metrics"]["goodput_share"] = 1.0
    compared["contenders"][0]["metrics"]["goodput_share"] = share

    assert (share == 1) == ("All requests of all contenders do" in findings(compared)[2].sentences[-1])


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.96, 0.99, "over the same requests -4 % to -1 %."),
        (0.96, 1.01, "over the same requests -4 % to +1 %, so that this may be chance."),
    ],
)
def test_pairs_say_more(low: float, high: float, words: str) -> None:
    """
    Where the ratio over the same requests is known, it says whether the default may be as good.
    """
    compared = document()
    template = compared["contenders"][3]
    tpot = template["metrics"]["tpot_ms"] | {"mean": 20.0, "mean_low": 18.0, "mean_high": 22.0}
    better = tpot | {"mean": 19.5}
    compared["contenders"] = [
        template | {"name": "default", "metrics": template["metrics"] | {"tpot_ms": tpot}},
        template
        | {
            "name": "ours",
            "policy": "ours",
            "metrics": template["metrics"] | {"tpot_ms": better},
            "versus_default": {"tpot_ms": {"ratio": 0.975, "low": low, "high": high}},
        },
    ]
    finding = findings(compared)[0]

    assert f"2.50 % below vLLM's default (20.00 ms); {words}" == finding.sentences[0]
    assert "Its interval, 18.00 to 22.00 ms." == finding.sentences[-1]


@pytest.mark.parametrize(
    ("third", "default_low", "words"),
    [
        (
            (19.8, 17.8, 21.8),
            18.0,
            " overlaps with that of third: by intervals of their own they are not told apart.",
        ),
        ((30.0, 29.0, 31.0), 18.0, "."),
        ((30.0, 29.0, 31.0), 19.9, " is apart from all others'."),
    ],
)
def test_others_are_not_in_pairs(third: Mean, default_low: float, words: str) -> None:
    """
    Also with pairs, the best is told from others by intervals of their own; of the default, which is in a pair, no
    overlap is said, but neither that there is none.
    """
    compared = document()
    template = compared["contenders"][3]
    means = {"default": (20.0, default_low, 22.0), "ours": (19.5, 19.2, 19.8), "third": third}
    compared["contenders"] = [
        template
        | {
            "name": name,
            "policy": template["policy"] if name == "default" else name,
            "metrics": template["metrics"]
            | {
                "tpot_ms": template["metrics"]["tpot_ms"]
                | dict(zip(("mean", "mean_low", "mean_high"), mean, strict=True))
            },
            "versus_default": {"tpot_ms": {"ratio": mean[0] / 20, "low": 0.96, "high": 0.99}},
        }
        for name, mean in means.items()
    ]
    finding = findings(compared)[0]

    assert "2.50 % below vLLM's default (20.00 ms); over the same requests -4 % to -1 %." == finding.sentences[0]
    assert f"Its interval, 19.20 to 19.80 ms{words if words == '.' else ',' + words}" == finding.sentences[-1]
