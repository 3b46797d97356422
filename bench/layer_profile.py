"""
How long a step takes on a card whose layers were measured one by one.

Theory of operation
-------------------
The profile is what LLMServingSim's profiler writes about one model on one card: device kernel times of each kind
of layer, in microseconds, in tables by the number of tokens (`dense.csv`), of sequences (`per_sequence.csv`), or
by the four numbers that attention depends on (`attention.csv`): tokens of the prefill chunk, tokens before it,
decodes, and tokens each decode reads. A step's time is their sum over the model's layers:

    step = embedding + final_layernorm + lm_head + sampler
         + num_layers * (2 * layernorm + every other dense layer + attention (+ moe))

Between the points of a table it is linear. Attention's points are the union of two grids, so that no axis is the
same for all rows; it is interpolated from the inside out: by the tokens a decode reads, by the tokens before the
chunk, by the chunk, by the number of decodes, each among the points that exist there. Beyond the last tokens read
and the last number of decodes the line goes on; nothing else is extrapolated.

Decodes that read different numbers of tokens take longer than their mean says. The profile measures how far the
time lies between that of the mean and that of the maximum (`skew_fit.csv`, alpha):

    attention = t(mean) + alpha * (t(max) - t(mean))

with alpha by chunk, decodes, skew rate (mean - min) / (max - min), maximum and tokens before the chunk. A profile
without that table gets alpha 0: what was not measured is not corrected.

There are no host times in it, and no graph modes: kernels are as long in a graph as outside.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from aclgraph_dispatch.cost_model import StepTime
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape
from aclgraph_dispatch.step_plan import Part

from .profile_table import LABELS, find_table, number, read_table
from .scheduling import ScheduledStep

MICROSECOND = 1e-6
ONCE_A_STEP = frozenset({"embedding", "final_layernorm"})
"""Dense layers outside the decoder's blocks."""
TIMES_A_LAYER = {"layernorm": 2}
"""Dense layers of which a block has more than one: before attention and before the MLP."""

Line = list[tuple[float, float]]
"""Points (x, microseconds), ascending in x."""


def on_line(line: Sequence[tuple[float, float]], x: float, *, extend: bool = False) -> float:
    """
    The value at *x*: linear between points, constant before the first, and after the last constant or, with
    *extend*, along the last two.
    """
    i = bisect_left(line, (x, 0.0))
    if i < len(line) and line[i][0] == x:
        return line[i][1]
    if i == 0:
        return line[0][1]
    if i == len(line):
        if not extend or i == 1:
            return line[-1][1]
        i -= 1
    (low, before), (high, after) = line[i - 1], line[i]
    return before + (after - before) * (x - low) / (high - low)


class AttentionTable:
    """
    Microseconds of one layer's attention.

    Args:
        rows: Chunk, tokens before it, decodes, tokens each decode reads, microseconds.
    """

    def __init__(self, rows: Iterable[tuple[int, int, int, int, float]]) -> None:
        slices: dict[int, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for chunk, history, num_decodes, context, microseconds in rows:
            slices[num_decodes][chunk][history].append((context, microseconds))
        for of_decodes in slices.values():
            for of_chunk in of_decodes.values():
                for line in of_chunk.values():
                    line.sort()
        # By decodes, then chunk, then history: ascending lists, the last of them with the line by context.
        self._slices = {
            num_decodes: {chunk: sorted(of_chunk.items()) for chunk, of_chunk in sorted(of_decodes.items())}
            for num_decodes, of_decodes in sorted(slices.items())
        }
        self._decodes = sorted(self._slices)

    def microseconds(self, chunk: int, history: float, num_decodes: int, context: float) -> float:
        """
        The time of a chunk of *chunk* tokens behind *history*, beside *num_decodes* that read *context* each.
        """
        decodes = [n for n in self._decodes if self._covers(n, chunk)]
        i = bisect_right(decodes, num_decodes)
        if i and decodes[i - 1] == num_decodes:
            around = [num_decodes]
        elif i == len(decodes):
            around = decodes[-2:]
        else:
            around = decodes[max(i - 1, 0) : i + 1]
        line = [(float(n), self._at_decodes(n, chunk, history, context)) for n in around]
        return on_line(line, num_decodes, extend=True)

    def _covers(self, num_decodes: int, chunk: int) -> bool:
        # Of many decodes only those without a prefill may have been measured, and of none only prefills.
        chunks = self._slices[num_decodes]
        return chunk in chunks if chunk == 0 else max(chunks) > 0

    def _at_decodes(self, num_decodes: int, chunk: int, history: float, context: float) -> float:
        chunks = self._slices[num_decodes]
        measured = list(chunks)
        i = bisect_left(measured, chunk)
        around = (
            measured[i : i + 1] if i < len(measured) and measured[i] == chunk else measured[max(i - 1, 0) : i + 1]
        )
        line = []
        for c in around:
            by_history = [(float(h), on_line(by_context, context, extend=True)) for h, by_context in chunks[c]]
            line.append((float(c), on_line(by_history, history, extend=True)))
        return on_line(line, chunk)


@attrs.frozen
class SkewTable:
    """
    How far the time of unequal decodes lies between that of their mean and that of their maximum.

    Args:
        chunks: The chunks it was measured for, ascending.
        axes: By name ("n", "skew_rate", "kv_big", "kp") the upper ends of the bins, included, and their labels.
        alphas: By chunk and the labels in that order.
        default: For bins that hold nothing.
    """

    chunks: tuple[int, ...]
    axes: Mapping[str, tuple[tuple[float, ...], tuple[str, ...]]]
    alphas: Mapping[tuple[int, str, str, str, str], float]
    default: float

    def alpha(self, chunk: int, history: float, num_decodes: int, skew_rate: float, longest: int) -> float:
        """
        The share of the way to the maximum's time.
        """
        nearest = min(self.chunks, key=lambda measured: abs(measured - chunk))
        key = (
            nearest,
            self._label("n", num_decodes),
            self._label("skew_rate", skew_rate),
            self._label("kv_big", longest),
            self._label("kp", history),
        )
        return self.alphas.get(key, self.default)

    def _label(self, axis: str, value: float) -> str:
        ends, labels = self.axes[axis]
        return labels[min(bisect_left(ends, value), len(labels) - 1)]


@attrs.frozen
class LayerProfile:
    """
    A card's measured layers.

    Args:
        model: Name of the model, as the profile has it.
        card: Name of the card, as its driver has it.
        dense: By layer, microseconds by tokens.
        per_sequence: By layer, microseconds by sequences.
        attention: Microseconds of attention.
        moe: Microseconds of the experts by tokens, and by activated experts; empty for dense models.
        skew: The correction for unequal decodes, where it was measured.
        variant: The numbers' format, as the profile has it: "bf16".
        assumptions: What the profile did not say.
    """

    model: str
    card: str
    dense: Mapping[str, Line]
    per_sequence: Mapping[str, Line]
    attention: AttentionTable
    moe: Sequence[tuple[int, Line]]
    skew: SkewTable | None
    variant: str = ""
    assumptions: tuple[str, ...] = ()

    def attention_microseconds(self, chunk: int, history: float, contexts: Sequence[int]) -> float:
        """
        One layer's attention of a chunk beside decodes that read *contexts*.
        """
        if not contexts:
            return self.attention.microseconds(chunk, history, 0, 0)
        mean, longest = sum(contexts) / len(contexts), max(contexts)
        microseconds = self.attention.microseconds(chunk, history, len(contexts), mean)
        shortest = min(contexts)
        if self.skew is None or longest == shortest:
            return microseconds
        rate = (mean - shortest) / (longest - shortest)
        alpha = self.skew.alpha(chunk, history, len(contexts), rate, longest)
        upper = self.attention.microseconds(chunk, history, len(contexts), longest)
        # Where the table's noise has the maximum below the mean there is nothing to lie between.
        return microseconds + alpha * max(upper - microseconds, 0.0)

    def moe_microseconds(self, num_tokens: float, num_activated: float) -> float:
        """
        One layer's experts, when *num_tokens* meet *num_activated* of them.
        """
        line = [(float(tokens), on_line(by_activated, num_activated)) for tokens, by_activated in self.moe]
        return on_line(line, num_tokens)


@attrs.frozen
class ProfileTimer:
    """
    Times of steps from a profile; see `simulate.StepTimer`.

    Args:
        profile: The card's measured layers.
        model: The model on one rank.
        additive: A negative control: attention of a mixed step as if decodes and prefill were apart.
        max_context: A negative control: every decode reads as many tokens as the longest.
        expert_ranks: Ranks that share the experts.
        link: What exchanges between cards cost: seconds of one without bytes, and bytes a second.
    """

    profile: LayerProfile
    model: ModelShape
    additive: bool = False
    max_context: bool = False
    expert_ranks: int = 1
    link: tuple[float, float] = (0.0, float("inf"))

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        profile, model = self.profile, self.model
        num_tokens = part.num_padded_tokens
        once = sum(on_line(profile.dense[name], num_tokens) for name in ONCE_A_STEP & profile.dense.keys())
        once += sum(
            on_line(line, max(part.requests[1] - part.requests[0], 1)) for line in profile.per_sequence.values()
        )
        layer = sum(
            TIMES_A_LAYER.get(name, 1) * on_line(line, num_tokens)
            for name, line in profile.dense.items()
            if name not in ONCE_A_STEP
        )
        if step.requests:
            layer += self._attention(step)
        seconds = (once + model.num_layers * layer) * MICROSECOND
        if profile.moe:
            seconds += model.num_layers * self._moe(num_tokens) * MICROSECOND
        latency, bytes_per_second = self.link
        seconds += model.num_collectives * latency
        seconds += model.collective_bytes_per_token * num_tokens / bytes_per_second
        return StepTime(0.0, 0.0, 0.0, 0.0, seconds, 0.0)

    def _moe(self, num_tokens: int) -> float:
        model = self.model
        local = model.num_experts / self.expert_ranks
        return self.profile.moe_microseconds(
            num_tokens * model.expert_tokens, local * model.activated_share(num_tokens)
        )

    def _attention(self, step: ScheduledStep) -> float:
        is_decode = (step.num_scheduled - step.num_drafts == 1) & (step.num_computed >= step.num_prompt)
        contexts: list[int] = step.num_computed[is_decode].tolist()
        if self.max_context and contexts:
            contexts = [max(contexts)] * len(contexts)
        chunks = step.num_scheduled[~is_decode].astype(float)
        if not chunks.size:
            return self.profile.attention_microseconds(0, 0, contexts)
        # Several prefills as one that computes as many tokens and, as far as that goes, as many pairs.
        chunk = float(chunks.sum())
        pairs = float((chunks * (step.num_computed[~is_decode] + chunks / 2)).sum())
        history = max(pairs / chunk - chunk / 2, 0.0)
        if self.additive:
            alone = self.profile.attention_microseconds(int(chunk), history, [])
            return alone + (self.profile.attention_microseconds(0, 0, contexts) if contexts else 0.0)
        return self.profile.attention_microseconds(int(chunk), history, contexts)


def read_profile(directory: Path, *, tensor_parallel: int = 1, expert_parallel: int = 1) -> LayerProfile:
    """
    Read a profile; its tables lie in *directory* or, by tensor parallelism, in `tp1`, `tp2` ... inside.

    Args:
        directory: Of the profile.
        tensor_parallel: Ranks that share a layer.
        expert_parallel: Ranks that share the experts.

    Raises:
        ConfigError: A file is missing or broken.
    """
    meta = _read_meta(directory / "meta.yaml")
    inside = directory / f"tp{tensor_parallel}"
    tables = inside if inside.is_dir() else directory
    degrees = meta.get("tp_degrees")
    is_told = degrees == [tensor_parallel] or (tensor_parallel == 1 and (degrees is None or 1 in degrees))
    assumptions = []
    if tables is directory and not is_told:
        assumptions.append(
            f"the profile's tables are for tensor parallelism {tensor_parallel}: it does not say so"
        )
    return LayerProfile(
        str(meta.get("model") or ""),
        str(meta.get("gpu") or ""),
        _lines(read_table(tables, "dense", ("layer", "tokens"))),
        _lines(read_table(tables, "per_sequence", ("layer", "sequences"))),
        _read_attention(tables),
        _read_moe(tables, expert_parallel) if find_table(tables, "moe") is not None else [],
        _read_skew(tables, meta, tensor_parallel) if find_table(tables, "skew_fit") is not None else None,
        variant=str(meta.get("variant") or ""),
        assumptions=tuple(assumptions),
    )


def _read_attention(directory: Path) -> AttentionTable:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    rows = read_table(directory, "attention", names, only_layer=True)
    for kind, is_there in (
        ("of decodes alone", any(not chunk and decodes for chunk, _, decodes, _ in rows)),
        ("with a prefill chunk", any(chunk for chunk, *_ in rows)),
    ):
        if not is_there:
            raise ConfigError(
                f"{directory} must hold rows {kind} in attention.csv: there is none; profile them too"
            )
    return AttentionTable((*key, time) for key, time in rows.items())


def _read_moe(directory: Path, expert_parallel: int) -> list[tuple[int, Line]]:
    by_tokens: dict[int, Line] = defaultdict(list)
    # Older profiles know of no expert parallelism.
    rows = read_table(directory, "moe", ("tokens", "activated_experts", "ep"), defaults={"ep": "1"})
    for (tokens, activated, ranks), time in rows.items():
        if ranks == expert_parallel:
            by_tokens[tokens].append((float(activated), time))
    if not by_tokens:
        raise ConfigError(f"{directory} must hold experts measured for ep {expert_parallel} in moe.csv")
    return sorted((tokens, sorted(line)) for tokens, line in by_tokens.items())


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path} cannot be read as a profile's description: {exc}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} must hold keys and values, as the profiler writes them")
    degrees = meta.get("tp_degrees")
    if not isinstance(degrees, list | None):
        raise ConfigError(f"{path}, tp_degrees: must be a list of integers: {degrees!r}")
    return meta


def _lines(rows: Mapping[tuple[Any, ...], float]) -> dict[str, Line]:
    lines: dict[str, Line] = defaultdict(list)
    for (layer, x), time in rows.items():
        lines[layer].append((float(x), time))
    for line in lines.values():
        line.sort()
    return dict(lines)


def _read_skew(directory: Path, meta: Mapping[str, Any], tensor_parallel: int) -> SkewTable:
    alphas = read_table(directory, "skew_fit", ("pc", *LABELS), value="alpha", only_layer=True)
    try:
        fit = meta["skew_fit"]
        of_tp = fit["per_tp"][tensor_parallel]
        bins = of_tp.get("bucket_axes") or fit["bucket_axes"]
        axes = {
            name: (tuple(map(float, bins[f"{name}_bins"][1:])), tuple(bins[f"{name}_labels"]))
            for name in ("n", "skew_rate", "kv_big", "kp")
        }
        for name, (ends, labels) in axes.items():
            if not labels or len(ends) != len(labels):
                raise ValueError(f"{name}: {len(labels)} labels for {len(ends)} bins")
        default = number("alpha_default", str(of_tp["alpha_default"]))
    except (KeyError, TypeError, AttributeError, ValueError, ConfigError) as exc:
        msg = f"meta.yaml must describe the bins of skew_fit.csv (skew_fit.bucket_axes, per_tp): {exc!r}"
        raise ConfigError(msg) from None
    return SkewTable(tuple(sorted({key[0] for key in alphas})), axes, alphas, default)
