import os
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.case import Case
from aclgraph_dispatch.bench.contenders import CONTENDERS
from aclgraph_dispatch.bench.sweep import grid, sweep
from aclgraph_dispatch.bench.table import markdown

TRACES = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "traces")
NAMES = (
    "azure_conv_2023_5min.csv.gz",
    "azure_code_2023_5min.csv.gz",
    "mooncake_conversation_5min.csv.gz",
    "servegen_deepseek_r1_5min.csv.gz",
    "sharegpt_300_llama-3.1-8b.csv.gz",
)
MODELS = ("qwen2.5-7b", "deepseek-v2-lite", "deepseek-v3")
RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not beside the checkout")
def test_results_are_those_of_the_command(tmp_path):
    """
    The tables in the documentation are what its command prints.
    """
    case = Case(trace="", model="", device="ascend-910b", max_model_len=131072, is_fast=True)
    cases = grid(case, {"trace": [str(TRACES / name) for name in NAMES], "model": MODELS})
    documents = sweep(cases, list(CONTENDERS), tmp_path, jobs=2)

    assert markdown(documents) in RESULTS.read_text()
