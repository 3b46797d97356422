"""A comparison of real runs as a table for a terminal."""

from collections.abc import Mapping
from typing import Any

_COLUMNS = (
    ("TTFT ms", "mean_ttft_ms"),
    ("p99", "p99_ttft_ms"),
    ("TPOT ms", "mean_tpot_ms"),
    ("p99", "p99_tpot_ms"),
    ("ITL ms", "mean_itl_ms"),
    ("E2EL ms", "mean_e2el_ms"),
    ("tokens/s", "output_throughput"),
)
"""Title and metric."""


def live_table(document: Mapping[str, Any]) -> str:
    """
    The figures for people.
    """
    trace, contenders = document["trace"], document["contenders"]
    device = document["device"]
    reference = contenders[0]["name"]
    width = max(20, *(len(contender["name"]) + 2 for contender in contenders))
    lines = [
        f"{trace['num_requests']} requests of {trace['name']} at rate {document['settings']['rate']:g}, "
        f"{document['model']['name']} on {'the emulated NPU' if device['is_emulated'] else device['type']}, "
        f"{document['settings']['rounds']} rounds",
        f"prompts of {trace['mean_prompt_tokens']:.0f} and outputs of {trace['mean_output_tokens']:.0f} tokens in "
        "the mean, " + ("scaled down from the trace's" if document["lengths"] else "as in the trace"),
        "",
        f"{'medians':<{width}}" + "".join(f"{title:>10}" for title, _ in _COLUMNS),
    ]
    lines += [
        f"{contender['name']:<{width}}" + "".join(f"{contender['metrics'][key]:>10.2f}" for _, key in _COLUMNS)
        for contender in contenders
    ]
    ratio_columns = [(title, key) for title, key in _COLUMNS if title != "p99"]
    if contenders[1:]:
        title = f"ratio to {reference}"
        lines += ["", f"{title:<{width}}" + "".join(f"{name.split()[0]:>19}" for name, _ in ratio_columns)]
    for contender in contenders[1:]:
        cells = (_ratio_cell(contender["ratios"][key]) for _, key in ratio_columns)
        lines.append(f"{contender['name']:<{width}}" + "".join(f"{cell:>19}" for cell in cells))
    lateness = max(run["lateness_ms"] for contender in contenders for run in contender["runs"])
    lines += [
        "",
        f"texts      {_texts(document, reference)}",
        f"arrivals   no request was sent more than {lateness:.1f} ms late",
    ]
    if lateness > contenders[0]["metrics"]["mean_ttft_ms"]:
        lines.append(
            "           which is more than a TTFT: the machine is too busy for these figures to be trusted"
        )
    return "\n".join(lines)


def _texts(document: Mapping[str, Any], reference: str) -> str:
    wrong, num_unstable = wrong_texts(document), len(document["unstable"])
    if wrong:
        own = f"; it differs in {num_unstable} itself" if num_unstable else ""
        return f"DIFFERENT from {reference}: {', '.join(wrong)}{own}"
    if num_unstable:
        return f"all identical where {reference} itself is; it differs in {num_unstable}"
    return "all identical"


def _ratio_cell(ratio: Mapping[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})"


def wrong_texts(document: Mapping[str, Any]) -> list[str]:
    """
    The contenders that gave other texts than the reference, where that always gives the same.
    """
    unstable = set(document["unstable"])
    return [c["name"] for c in document["contenders"] if set(c["differing"]) - unstable]
