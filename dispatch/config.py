"""The configuration a user writes: `--additional-config '{"aclgraph_dispatch": {...}}'`."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .capture_plan import CapturePlan
from .errors import ConfigError
from .policy import POLICIES, modes_used
from .step_plan import RuntimeMode

KEY = "aclgraph_dispatch"

FULL = RuntimeMode.FULL
PIECEWISE = RuntimeMode.PIECEWISE


def _known(_config: object, attribute: "attrs.Attribute[str | None]", policy: str | None) -> None:
    if policy is not None and policy not in POLICIES:
        msg = f"'{attribute.name}' must be one of {', '.join(POLICIES)}: {policy!r}"
        raise ValueError(msg)


def _positive(_config: object, attribute: "attrs.Attribute[int | None]", value: int | None) -> None:
    if value is not None and value < 1:
        msg = f"'{attribute.name}' must be >= 1: {value}"
        raise ValueError(msg)


def _sizes(
    _config: object, attribute: "attrs.Attribute[tuple[int, ...] | None]", sizes: tuple[int, ...] | None
) -> None:
    if sizes is None:
        return
    if not sizes:
        msg = f"'{attribute.name}' must not be empty; leave it out to capture vLLM's sizes"
        raise ValueError(msg)
    if min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        msg = f"'{attribute.name}' must be positive and ascend without repetition: {list(sizes)}"
        raise ValueError(msg)


@attrs.frozen(kw_only=True)
class DispatchConfig:
    """
    What the user asks for; None leaves the choice to us.

    Args:
        policy: A name in `POLICIES`; by default the one that vLLM's `cudagraph_mode` stands for.
        full_sizes: Sizes of FULL graphs, in tokens; by default vLLM's sizes that a decode batch can fill.
        piecewise_sizes: Sizes of PIECEWISE graphs, in tokens; by default vLLM's sizes.
        threshold: Steps of more tokens run eagerly, and no larger size is captured.
    """

    policy: str | None = attrs.field(default=None, validator=_known)
    full_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_sizes)
    piecewise_sizes: tuple[int, ...] | None = attrs.field(default=None, validator=_sizes)
    threshold: int | None = attrs.field(default=None, validator=_positive)

    def __attrs_post_init__(self) -> None:
        errors = [
            f"'{name}' must be <= 'threshold' = {self.threshold}: {sizes[-1]}; change either"
            for name, sizes in (("full_sizes", self.full_sizes), ("piecewise_sizes", self.piecewise_sizes))
            if self.threshold is not None and sizes is not None and sizes[-1] > self.threshold
        ]
        if errors:
            raise ValueError("; ".join(errors))

    def capture_plan(
        self,
        policy: str,
        ladder: Sequence[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        query_len: int = 1,
        lora_cases: Sequence[int] = (0,),
        is_chosen: bool = True,
    ) -> CapturePlan:
        """
        The graphs to capture.

        Args:
            policy: A name in `POLICIES`; no graph is captured in a mode that it never uses.
            ladder: The engine's own sizes, in tokens: what is not configured is taken from there.
            max_num_seqs: The most requests a batch can have.
            max_num_batched_tokens: The most tokens a step can have.
            query_len: Tokens of one uniform decode.
            lora_cases: Numbers of active adapters that every size is captured for.
            is_chosen: Whether somebody chose the ladder. Its FULL sizes are then rounded up to whole requests;
                else it is read as numbers of requests, and the most requests of a step are added: no batch of
                decodes is left without a graph.

        Raises:
            ConfigError: A configured size can never be filled.
        """
        budget = max_num_batched_tokens, "max_num_batched_tokens"
        # A tie is the budget's: it is the limit that people set.
        fillable = min(budget, (max_num_seqs * query_len, "max_num_seqs * query length"), key=lambda b: b[0])
        limits = {FULL: ("full_sizes", *fillable, query_len), PIECEWISE: ("piecewise_sizes", *budget, 1)}
        used = modes_used(POLICIES[policy])
        planned: dict[str, Any] = {}
        errors = []
        for mode, (name, top, meaning, multiple) in limits.items():
            configured = getattr(self, name)
            for size in configured or ():
                if size > top:
                    errors.append(f"'{name}' must be <= {meaning} = {top}, no step fills more: {size}")
                elif size % multiple:
                    errors.append(f"'{name}' must be multiples of the query length {multiple}: {size}")
            if mode not in used:
                planned[name] = ()
            elif configured is not None:
                planned[name] = configured
            else:
                # In requests, which for PIECEWISE is tokens.
                most = min(top, self.threshold or top) // multiple
                if mode is FULL and not is_chosen:
                    counts = {n for n in ladder if n <= most} | {most}
                else:
                    # As vLLM rounds: a size between two multiples holds as many requests as the lower one, but was
                    # meant to hold more.
                    counts = {min(-(-n // multiple), most) for n in ladder if n <= (self.threshold or top)}
                planned[name] = tuple(n * multiple for n in sorted(counts - {0}))
        if errors:
            raise ConfigError("; ".join(errors) + f" @ additional_config.{KEY}")
        return CapturePlan(**planned, lora_cases=lora_cases)

    @staticmethod
    def pinned(additional_config: Mapping[str, Any] | None, plan: CapturePlan) -> dict[str, Any]:
        """
        The same `additional_config`, with the sizes of *plan* written down.
        """
        sizes = {"full_sizes": plan.full_sizes, "piecewise_sizes": plan.piecewise_sizes}
        written = {name: list(values) for name, values in sizes.items() if values}
        config = dict(additional_config or {})
        return config | {KEY: {**config.get(KEY, {}), **written}}

    @classmethod
    def load(cls, additional_config: Mapping[str, Any] | None) -> "DispatchConfig":
        """
        Read our key of vLLM's `additional_config`; strict, and all errors at once.

        Raises:
            ConfigError: The value is no object, a key is unknown, a type or a value is wrong.
        """
        raw = (additional_config or {}).get(KEY, {})
        path = f"additional_config.{KEY}"
        if not isinstance(raw, Mapping):
            msg = f"{path} must be an object: {raw!r}"
            raise ConfigError(msg)

        # Imported here: importing the package should cost little, and only engines read a configuration.
        import cattrs

        converter = cattrs.Converter()
        converter.register_structure_hook(int, _exact)
        converter.register_structure_hook(str, _exact)
        converter.register_structure_hook_func(lambda t: t == tuple[int, ...], _integers)

        # Field by field, so that a wrong type does not hide a wrong value elsewhere.
        fields = attrs.fields_dict(cls)
        values: dict[str, Any] = {}
        errors = []
        for name, value in raw.items():
            field = fields.get(name)
            if field is None:
                errors.append(f"unknown key {name!r}; known keys: {', '.join(fields)} @ {path}")
                continue
            assert field.type is not None
            assert field.validator is not None
            try:
                structured = converter.structure(value, field.type)
                field.validator(None, field, structured)
            except ValueError as exc:
                errors.append(f"{exc} @ {path}.{name}")
            else:
                values[name] = structured
        try:
            config = cls(**values)
        except ValueError as exc:
            errors.append(f"{exc} @ {path}")
        if errors:
            raise ConfigError("; ".join(errors))
        return config


def _exact(value: Any, cls: type) -> Any:
    # cattrs coerces by default: "12" would become 12, and True 1.
    if type(value) is not cls:
        msg = f"expected {cls.__name__}, got {value!r}"
        raise ValueError(msg)
    return value


def _integers(value: Any, _cls: type) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(size) is not int for size in value):
        msg = f"expected a list of integers, got {value!r}"
        raise ValueError(msg)
    return tuple(value)
