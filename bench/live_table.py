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
_LATE_TOKENS = 10
"""A request that is sent later than so many tokens take changes what is batched with what."""


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
        "servers",
        *(f"{contender['name']:<{width}}{contender['description']}" for contender in contenders),
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
        f"texts      {_texts(document)}",
        f"arrivals   no request was sent more than {lateness:.1f} ms late",
    ]
    limit_ms = min(
        min(metrics["mean_ttft_ms"], _LATE_TOKENS * metrics["mean_tpot_ms"])
        for metrics in (contender["metrics"] for contender in contenders)
    )
    if lateness > limit_ms:
        lines.append(
            f"           which is more than {limit_ms:.1f} ms, the least mean TTFT or {_LATE_TOKENS} mean TPOTs:\n"
            "           the machine is too busy for these figures to be trusted"
        )
    return "\n".join(lines)


def _texts(document: Mapping[str, Any]) -> str:
    reference, wrong, num_unstable = document["text_reference"], wrong_texts(document), len(document["unstable"])
    compared = [c["name"] for c in document["contenders"] if c["differing"] is not None]
    if wrong:
        own = f"; it differs in {num_unstable} itself" if num_unstable else ""
        return f"DIFFERENT from {reference}: {', '.join(wrong)}{own}"
    if nothing_compared(document):
        return f"NOTHING COMPARED: {reference} itself differs from round to round in every request"
    if not compared[1:]:
        own = f"; {reference} differs in {num_unstable} from round to round" if num_unstable else ""
        return f"not compared: no two contenders whose texts ought to be the same{own}"
    left_out = len(document["contenders"]) - len(compared)
    among = f" among {', '.join(compared)}" if left_out else ""
    if num_unstable:
        num_compared = document["trace"]["num_requests"] - num_unstable
        return f"identical{among} in the {num_compared} where {reference} itself is; it differs in {num_unstable}"
    return f"all identical{among}"


def _ratio_cell(ratio: Mapping[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})"


def wrong_texts(document: Mapping[str, Any]) -> list[str]:
    """
    The contenders that gave other texts than the reference, where that always gives the same.
    """
    unstable = set(document["unstable"])
    return [c["name"] for c in document["contenders"] if set(c["differing"] or ()) - unstable]


def nothing_compared(document: Mapping[str, Any]) -> bool:
    """
    Whether texts ought to be compared and none could be: the reference never gave the same one twice.
    """
    num_compared = sum(c["differing"] is not None for c in document["contenders"])
    return num_compared > 1 and len(document["unstable"]) == document["trace"]["num_requests"]
