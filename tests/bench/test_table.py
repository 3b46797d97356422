from aclgraph_dispatch.bench.table import markdown, table


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


def test_markdown_marks_the_best():
    """
    A table for each model, a row for each trace; the best is bold, the oracle never is.
    """

    def document(trace: str, rate: float, means: dict[str, float]):
        return {
            "trace": {"name": trace},
            "settings": {"rate": rate},
            "model": {"name": "m"},
            "device": {"name": "d"},
            "contenders": [
                {"name": name, "metrics": {"tpot_ms": {"mean": mean}, "ttft_ms": {"mean": 100 * mean}}}
                for name, mean in means.items()
            ],
        }

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
