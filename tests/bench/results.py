"""vLLM's result files, made up by hand."""

from typing import Any

from aclgraph_dispatch.bench.paired import METRICS

REQUESTS = [
    {"timestamp": 0.0, "input_length": 5, "output_length": 3, "hash_ids": [-1]},
    {"timestamp": 0.5, "input_length": 17, "output_length": 2, "hash_ids": [-2, -3]},
]


def result(factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    """
    What the client saves of `REQUESTS`, all figures *factor* times 1, 2, 3 and so on.
    """
    return {
        "completed": 2,
        "failed": 0,
        "errors": ["", ""],
        "input_lens": [5, 17],
        "output_lens": [3, 2],
        "start_times": [100.0, 100.5],
        "generated_texts": ["a b c", "d e"],
        "std_ttft_ms": 77.0,
        **{name: factor * number for number, name in enumerate(METRICS, start=1)},
        **changes,
    }
