import pytest

from aclgraph_dispatch.bench.table import markdown, served, table


def test_table_holds_the_figures():
    """
    Each contender has a row with its name and figures; what does not exist is a dash.
    """
    contender = {
        "name": "eager",
        "metrics": {
            "tpot_ms": {"mean": None, "p99": None},
            "ttft_ms": {"mean": 12.34, "p99": 99.96},
            "goodput_share": 0.5,
            "output_tokens_per_second": 1000.0,
            "device_idle_share": 0.0,
            "padding_share": 0.125,
            "route_shares": {"FULL": 0.0, "PIECEWISE": 0.25, "NONE": 0.75},
            "capture_seconds": 0.0,
        },
    }
    lines = table(
        {
            "trace": {"num_requests": 3, "name": "t.csv"},
            "settings": {"rate": 2.0, "scheduler": "fast"},
            "model": {"name": "m"},
            "device": {"name": "d"},
            "contenders": [contender],
        }
    ).splitlines()

    assert "3 requests of t.csv at rate 2, m on d, scheduler fast" == lines[0]
    assert ["eager", "-", "-", "12.3", "100.0", "50.0", "1000.0", "0.0", "12.5", "0.0", "25.0", "75.0", "0.0"] == (
        lines[-1].split()
    )
    assert 1 == len({len(line) for line in lines[2:]})


def document(trace: str, rate: float, means: dict[str, float | None]):
    """
    A comparison by its mean TPOTs; TTFTs are a hundred times as long.
    """
    return {
        "trace": {"name": trace},
        "settings": {"rate": rate},
        "model": {"name": "m"},
        "device": {"name": "d"},
        "contenders": [
            {"name": name, "metrics": {"tpot_ms": {"mean": mean}, "ttft_ms": {"mean": mean and 100 * mean}}}
            for name, mean in means.items()
        ],
    }


def test_markdown_marks_the_best():
    """
    A table for each model, a row for each trace; the best is bold, the oracle never is.
    """
    lines = markdown(
        [
            document("a-3.1.csv.gz", 1.0, {"eager": 20.0, "legacy": 10.04, "to_budget": 10.01, "oracle": 9.0}),
            document("b.csv", 2.0, {"eager": 11.0, "legacy": 12.0, "to_budget": 13.0, "oracle": 9.0}),
        ]
    ).splitlines()

    assert "**m on d: mean TPOT, ms**" == lines[0]
    assert "| trace | eager | legacy | to_budget | oracle |" == lines[2]
    assert "| a-3.1 | 20.0 | **10.0** | **10.0** | 9.0 |" == lines[4]
    assert "| b x 2 | **11.0** | 12.0 | 13.0 | 9.0 |" == lines[5]
    assert "| a-3.1 | 2000 | 1004 | **1001** | 900.0 |" == lines[11]


def test_markdown_without_a_best():
    """
    The oracle alone is not bold, and what has no mean is a dash that is not the best.
    """
    [alone] = [line for line in markdown([document("a", 1.0, {"oracle": 9.0})]).splitlines() if "9.0 |" in line]
    rows = [{"eager": None, "legacy": 2.0, "oracle": 1.0}, {"eager": None, "legacy": None, "oracle": None}]
    lines = markdown([document("a", 1.0, row) for row in rows]).splitlines()

    assert "| a | 9.0 |" == alone
    assert ["| a | - | **2.0** | 1.0 |", "| a | - | - | - |"] == lines[4:6]


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ({}, "60 requests of t.csv"),
        ({"num_too_long": 0, "num_cut": 0}, "60 requests of t.csv"),
        (
            {"num_too_long": 30, "num_cut": 2},
            "30 requests of t.csv (30 left out, their prompts are too long; 2 outputs cut)",
        ),
        ({"num_too_long": 1}, "59 requests of t.csv (1 left out, its prompt is too long)"),
        ({"num_cut": 1}, "60 requests of t.csv (1 output cut)"),
    ],
)
def test_requests_served(trace: dict[str, int], words: str):
    """
    Requests that were not simulated do not count, and what was changed is said.
    """
    assert words == served({"name": "t.csv", "num_requests": 60, **trace})
