"""
What was measured on a machine, as a cost: a fit, corrected at the captured sizes, and what it claims.

The time of a pass in a mode is a sum of terms with coefficients >= 0 (`pass_fit`). At the captured sizes, which
are few and the only ones a graph runs in, the sum is multiplied by what the measurements there say; between them
by what lies between. Eager passes are not corrected.

A calibration claims only what was measured: `covers` says whether a step lies within. Outside it still answers, by
the same sum, for a simulation should rather say how many of its steps are extrapolated than end.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from .cost_model import StepLoad, StepTime
from .errors import ConfigError
from .model_shape import ModelShape, activated_share
from .pass_fit import MOST, PassFit, correction, host_terms, load_terms, token_terms, weighted, wrong
from .step_plan import RuntimeMode

FORMAT = 2
"""Of the file; to be raised when an older one would be misread or says too little."""

MODEL_FIELDS = ("num_layers", "num_parameters", "kv_bytes_per_token", "num_experts", "experts_per_token")
"""By which a model is known again, as `ModelShape` has them."""

LEAST_SECONDS = 1e-9
"""Of a pass with one token."""

_NUM_HOST_TERMS = len(host_terms(StepLoad()))
_ERROR_KEYS = {"points", "mean", "p95", "max"}


@attrs.frozen
class BatchShape:
    """
    The batch of a step to be timed.

    Args:
        num_decodes: Requests that decode.
        context_tokens: Tokens of the KV cache that each of them reads, its own among them; at least 3.
        chunk_tokens: Tokens of the prefill beside them; 0 for none.
        tokens_before: Tokens of its prompt that were computed before.
    """

    num_decodes: int = 0
    context_tokens: int = 3
    chunk_tokens: int = 0
    tokens_before: int = 0

    @property
    def load(self) -> StepLoad:
        """
        The same in a cost's words.
        """
        load = StepLoad.decodes(self.num_decodes, self.context_tokens)
        return load.chunk(self.chunk_tokens, self.tokens_before) if self.chunk_tokens else load


@attrs.frozen(kw_only=True)
class MeasuredStep:
    """
    One point of the grid: medians over its steps.

    Args:
        mode: The mode's name.
        num_tokens: Tokens after padding.
        load: What they were.
        num_steps: How many steps the medians are of.
        prepare_seconds: As in `StepTime`, and so on.
        host_seconds: Of the pass.
        device_seconds: Of the pass.
        sample_seconds: Logits, sampling, and the tokens' way to the host.
        spread: Of `device_seconds`: half of the distance between the quartiles, by the median.
        is_held_out: Whether it was kept from the fit.
    """

    mode: str
    num_tokens: int
    load: StepLoad
    num_steps: int
    prepare_seconds: float
    host_seconds: float
    device_seconds: float
    sample_seconds: float
    spread: float
    is_held_out: bool


@attrs.frozen(kw_only=True)
class Calibration:
    """
    A measured cost, used as `CostModel` is.

    Args:
        format: `FORMAT`.
        model: Name of the model.
        num_layers: Of the model, as `ModelShape` counts it, and so are the following up to `experts_per_token`.
        num_parameters: Of the whole model.
        kv_bytes_per_token: With two bytes a number, whatever the engine had: to know the model by.
        num_experts: Routed experts of a layer.
        experts_per_token: How many of them a token meets.
        backend: What ran it.
        device: The device, as it calls itself.
        versions: Of the software, by name.
        engine: What the engine was told.
        host_is_device: Whether the host computes: its time and the device's are then the same.
        num_shapes: Batches that were to be timed.
        left_out: How many of them the engine could not hold, by why.
        prepare: Coefficients of `host_terms`.
        sample: Coefficients of `host_terms`.
        passes: The passes by the mode's name.
        errors: Relative errors of predicted passes, by what was predicted.
        points: What was measured.

    Raises:
        ConfigError: It contradicts itself.
    """

    format: int
    model: str
    num_layers: int
    num_parameters: int
    kv_bytes_per_token: float
    num_experts: int
    experts_per_token: int
    backend: str
    device: str
    versions: Mapping[str, str]
    engine: Mapping[str, Any]
    host_is_device: bool
    num_shapes: int
    left_out: Mapping[str, int]
    prepare: tuple[float, ...]
    sample: tuple[float, ...]
    passes: Mapping[str, PassFit]
    errors: Mapping[str, Mapping[str, float]]
    points: tuple[MeasuredStep, ...]
    # There are as many entries as sizes of steps.
    _of_tokens: dict[tuple[RuntimeMode, int], tuple[float, float, PassFit]] = attrs.field(
        factory=dict, init=False, eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        errors = []
        if self.format != FORMAT:
            errors.append(f"'format' must be {FORMAT}: {self.format}; calibrate again")
        unknown = sorted(set(self.passes) - set(RuntimeMode.__members__))
        if RuntimeMode.NONE.name not in self.passes or unknown:
            errors.append(
                f"'passes' must hold NONE, and no mode but {', '.join(RuntimeMode.__members__)}: {unknown}"
            )
        for name in MODEL_FIELDS:
            least = name not in ("num_experts", "experts_per_token")
            most = max(0, self.num_experts) if name == "experts_per_token" else MOST
            if not least <= getattr(self, name) <= most:
                errors.append(f"'{name}' must be from {least:d} to {most:.15g}: {getattr(self, name)}")
        for mode, of_mode in self.passes.items():
            errors += of_mode.errors(mode, has_host=not self.host_is_device)
        errors += wrong("prepare", self.prepare, _NUM_HOST_TERMS) + wrong("sample", self.sample, _NUM_HOST_TERMS)
        errors += wrong("left_out", [self.num_shapes, *self.left_out.values()], 1 + len(self.left_out))
        errors += self._wrong_results()
        if not errors:
            errors = self._without_time()
        if errors:
            raise ConfigError(f"{'; '.join(errors)} @ calibration of {self.model}")

    def _wrong_results(self) -> list[str]:
        errors = []
        for name, of_name in self.errors.items():
            if set(of_name) != _ERROR_KEYS:
                errors.append(f"'errors.{name}' must have {', '.join(sorted(_ERROR_KEYS))}: {sorted(of_name)}")
            errors += wrong(f"errors.{name}", of_name.values(), len(of_name))
        for index, point in enumerate(self.points):
            if point.mode not in self.passes:
                errors.append(f"'points.{index}.mode' must be one of {', '.join(self.passes)}: {point.mode!r}")
            numbers = [x for x in attrs.astuple(point, recurse=False) if type(x) in (int, float)]
            numbers += attrs.astuple(point.load)
            errors += wrong(f"points.{index}", numbers, len(numbers))
        return errors

    def _without_time(self) -> list[str]:
        load = StepLoad.decodes(1, 1)
        seconds = {mode: self.times(RuntimeMode[mode], 1, load).device_seconds for mode in self.passes}
        return [
            f"'{mode}.token_coefficients' must give a pass of one token at least {LEAST_SECONDS:g} s: {of_mode}"
            for mode, of_mode in seconds.items()
            if of_mode < LEAST_SECONDS
        ]

    def times(self, mode: RuntimeMode, num_tokens: int, load: StepLoad) -> StepTime:
        """
        Predict a step; beyond what was measured too (`covers`).

        Args:
            mode: How it runs.
            num_tokens: Tokens after padding.
            load: What they are.

        Raises:
            ConfigError: No step of this mode was measured.
        """
        known = self._of_tokens.get((mode, num_tokens))
        if known is None:
            known = self._of_tokens[mode, num_tokens] = self._tokens_part(mode, num_tokens)
        seconds, factor, of_mode = known
        device = (seconds + weighted(of_mode.load_coefficients, load_terms(load))) * factor
        of_host = host_terms(load)
        host = device if self.host_is_device else weighted(of_mode.host_coefficients, of_host)
        return StepTime(weighted(self.prepare, of_host), 0.0, host, 0.0, device, weighted(self.sample, of_host))

    def _tokens_part(self, mode: RuntimeMode, num_tokens: int) -> tuple[float, float, PassFit]:
        of_mode = self.passes.get(mode.name)
        if of_mode is None:
            msg = (
                f"no {mode.name} step was measured in the calibration of {self.model}; calibrate with sizes for it"
            )
            raise ConfigError(msg)
        share = activated_share(self.num_experts, self.experts_per_token, num_tokens)
        seconds = weighted(of_mode.token_coefficients, token_terms(num_tokens, of_mode.knots, share))
        return seconds, correction(of_mode.corrections, num_tokens), of_mode

    def least_device_seconds(self, num_tokens: int, load: StepLoad) -> float:
        """
        The shortest pass with so much work in any measured mode that was measured with work of its kind.

        Where host and device are one, an eager pass contains its launches, and a graph is faster. Padding up to a
        captured size is allowed too, for that may be the faster one.

        Args:
            num_tokens: Tokens without padding.
            load: What they are.
        """
        return min(
            self.times(RuntimeMode[mode], size, load).device_seconds
            for mode, of_mode in self.passes.items()
            if mode == RuntimeMode.NONE.name or of_mode.knows(load)
            for size in (num_tokens, *(size for size in of_mode.corrections if size > num_tokens))
        )

    def covers(self, mode: RuntimeMode, num_tokens: int, load: StepLoad) -> bool:
        """
        Whether a step lies within what was measured: each of its numbers, not each combination of them.

        Decodes have one token each: beyond padding, which is less than to twice the next captured size, there must
        be no more tokens. A little speculation that looks like padding is not told from it.
        """
        of_mode = self.passes.get(mode.name)
        if of_mode is None or num_tokens < of_mode.least or not of_mode.knows(load):
            return False
        decodes = load.num_decodes
        if decodes and not load.num_prefill_tokens:
            size = min((size for size in of_mode.corrections if size >= decodes), default=decodes)
            if num_tokens >= 2 * size:
                return False
        return all(x <= most for x, most in zip((num_tokens, *attrs.astuple(load)), of_mode.most, strict=True))

    def check_model(self, model: ModelShape) -> None:
        """
        Check that *model* is the one that was measured, as far as its size tells.

        Raises:
            ConfigError: It is another one, or on several ranks.
        """
        asked = {name: getattr(model, name) for name in MODEL_FIELDS}
        other = [name for name in MODEL_FIELDS if asked[name] != getattr(self, name)]
        if other:
            theirs, ours = (
                ", ".join(f"{name} {numbers(name):.15g}" for name in other)
                for numbers in (asked.__getitem__, lambda name: getattr(self, name))
            )
            raise ConfigError(
                f"'device' must be a calibration of the model that is compared, {model.name} ({theirs}): "
                f"it is of {self.model} ({ours}); calibrate with that model"
            )

    def dumps(self) -> str:
        """
        The file's text.
        """
        return json.dumps(attrs.asdict(self, filter=lambda field, _: field.init), indent=1)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """
        Read what `dumps` wrote.

        Raises:
            ConfigError: The file cannot be read, or is something else.
        """
        # Imported here: importing the package should cost little.
        from .strict_json import read_object, short, structured

        rule = f"{path} must be a file written by calibrate"
        try:
            content = read_object(path)
            if type(content.get("format")) is not int or content["format"] != FORMAT:
                raise ConfigError(f"'format' must be {FORMAT}: {short(content.get('format'))}; calibrate again")
            calibration = structured(content, cls)
        except ConfigError as exc:
            raise ConfigError(f"{rule}: {exc}") from None
        return calibration
