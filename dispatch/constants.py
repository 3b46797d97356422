"""The catalogue of models and devices: numbers with where they come from, as data (`catalogue/*.toml`)."""

import functools
import tomllib
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import attrs

from .errors import ConfigError

MARKS = ("measured", "derived", "guessed")
"""
How well a number is known: measured, or stated by the maker; computed from measurements; assumed by us or by its
source.
"""


@attrs.frozen
class Constant:
    """
    A number of the catalogue.

    Args:
        value: The number.
        unit: Its unit; "1" where it has none.
        source: Where it comes from, and its range where one is known.
        mark: One of `MARKS`.
    """

    value: float
    unit: str
    source: str
    mark: str


@functools.cache
def catalogue(kind: str) -> Mapping[str, Any]:
    """
    All entries of *kind*, "models" or "devices", by name, as written.
    """
    return tomllib.loads((Path(__file__).parent / "catalogue" / f"{kind}.toml").read_text(encoding="utf-8"))


def entry(kind: str, name: str) -> Mapping[str, Any]:
    """
    One entry of the catalogue; what it does not say is that of its `base`, if it has one.

    Raises:
        ConfigError: There is none of that name.
    """
    entries = catalogue(kind)
    if name not in entries:
        raise ConfigError(f"'{kind.removesuffix('s')}' must be one of {', '.join(entries)}: {name!r}")
    found: Mapping[str, Any] = entries[name]
    return {**entries[found["base"]], **found} if "base" in found else found


def constants(table: Mapping[str, Any], path: str = "") -> dict[str, Constant]:
    """
    Every number of an entry, by its dotted name.
    """
    found: dict[str, Constant] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{path}{key}"
            found |= {name: Constant(**value)} if "value" in value else constants(value, f"{name}.")
    return found


def require_numbers(instance: Any) -> None:
    """
    Check that every numeric field is finite and not negative, and positive unless its metadata say otherwise.

    Raises:
        ConfigError: Some are not; all of them are named.
    """
    errors = []
    for field in attrs.fields(type(instance)):
        if field.type not in (int, float):
            continue
        value = getattr(instance, field.name)
        least = field.metadata.get("least")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value < inf or not (value > 0 if least is None else value >= least):
            rule = "> 0" if least is None else f">= {least}"
            errors.append(f"'{field.name}' must be a finite number {rule}: {value!r}")
    if errors:
        raise ConfigError(f"{'; '.join(errors)} @ {type(instance).__name__} {instance.name!r}")


ZERO = {"least": 0}
"""Metadata of a field that may be 0."""
