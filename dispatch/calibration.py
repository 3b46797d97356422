"""
What was measured on a machine, as a cost: a fit, corrected at the captured sizes, and what it claims.

The time of a pass in a mode is a sum of terms with coefficients >= 0 (`pass_fit`). At the captured sizes, which
are few and the only ones a graph runs in, the sum is multiplied by what the measurements there say; between them
by what lies between. Eager passes are not corrected.

A calibration claims only what was measured: `covers` says whether a step lies within. Outside it still answers, by
the same sum, for a simulation should rather say how many of its steps are extrapolated than end.
"""

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import attrs

from .cost import StepCost
from .cost_model import StepLoad, StepTime, step_cost
from .errors import ConfigError
from .model_shape import activated_share
from .pass_fit import PassFit, correction, host_terms, load_terms, token_terms, weighted
from .step_plan import RuntimeMode

FORMAT = 1
"""Of the file; to be raised when an older one would be misread."""


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
        backend: What ran it.
        device: The device, as it calls itself.
        versions: Of the software, by name.
        engine: What the engine was told.
        host_is_device: Whether the host computes: its time and the device's are then the same.
        num_experts: Routed experts of a layer.
        experts_per_token: How many of them a token meets.
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
    backend: str
    device: str
    versions: Mapping[str, str]
    engine: Mapping[str, Any]
    host_is_device: bool
    num_experts: int
    experts_per_token: int
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
        if not 0 <= self.experts_per_token <= self.num_experts:
            errors.append(f"'experts_per_token' must be <= {self.num_experts}: {self.experts_per_token}")
        num_host_terms = len(host_terms(StepLoad()))
        for mode, of_mode in self.passes.items():
            num_pass_host_terms = 0 if self.host_is_device else num_host_terms
            num_token_terms = len(token_terms(1, of_mode.knots, 0.0))
            errors += _wrong(f"{mode}.token_coefficients", of_mode.token_coefficients, num_token_terms)
            errors += _wrong(f"{mode}.load_coefficients", of_mode.load_coefficients, len(load_terms(StepLoad())))
            errors += _wrong(f"{mode}.host_coefficients", of_mode.host_coefficients, num_pass_host_terms)
            errors += _wrong(f"{mode}.corrections", of_mode.corrections.values(), len(of_mode.corrections))
            errors += _wrong(f"{mode}.most", of_mode.most, 1 + len(attrs.fields(StepLoad)))
        errors += _wrong("prepare", self.prepare, num_host_terms) + _wrong("sample", self.sample, num_host_terms)
        if errors:
            raise ConfigError(f"{'; '.join(errors)} @ calibration of {self.model}")

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

    def covers(self, mode: RuntimeMode, num_tokens: int, load: StepLoad) -> bool:
        """
        Whether a step lies within what was measured: each of its numbers, not each combination of them.
        """
        of_mode = self.passes.get(mode.name)
        if of_mode is None or num_tokens < of_mode.least:
            return False
        if load.num_decodes and load.num_prefill_tokens and not of_mode.has_mixed:
            return False
        return all(x <= most for x, most in zip((num_tokens, *attrs.astuple(load)), of_mode.most, strict=True))

    def step_cost(
        self,
        sizes: Iterable[int],
        *,
        context_tokens: float = 1024,
        query_len: int = 1,
    ) -> StepCost:
        """
        What a dispatcher needs to know of it (`cost_model.step_cost`).
        """
        return step_cost(self, sizes, context_tokens=context_tokens, query_len=query_len)

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
        import cattrs

        converter = cattrs.Converter(forbid_extra_keys=True)
        try:
            calibration: Calibration = converter.structure(json.loads(Path(path).read_text(encoding="utf-8")), cls)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path} must be a file written by calibrate: {exc}") from None
        except Exception as exc:
            details = "; ".join(cattrs.transform_error(exc))
            raise ConfigError(f"{path} must be a file written by calibrate: {details}") from None
        return calibration


def _wrong(name: str, numbers: Iterable[float], count: int) -> list[str]:
    found = list(numbers)
    if len(found) == count and all(isfinite(x) and x >= 0 for x in found):
        return []
    return [f"'{name}' must be {count} finite numbers >= 0: {found}"]
