"""JSON taken for what it is: cattrs alone makes numbers of words and true of "false", and nobody would know."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import cattrs

from .errors import ConfigError

T = TypeVar("T")

_MOST_EXACT = 1 << 53
"""A larger whole number is another one as a float."""


def read_object(path: str | Path) -> dict[str, Any]:
    """
    The object in a file.

    Raises:
        ConfigError: The file cannot be read, is no JSON, or holds something else, or numbers that are not finite.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(str(exc)) from None
    if type(content) is not dict:
        raise ConfigError(f"it must hold an object: {short(content)}")
    return content


def structured(content: Mapping[str, Any], cls: type[T]) -> T:
    """
    An attrs class with exactly these fields; its own rules may raise too.

    Raises:
        ConfigError: Something is missing, too much, or of another type; all of it is said at once.
    """
    try:
        return _converter().structure(content, cls)
    except Exception as exc:
        details = cattrs.transform_error(exc, format_exception=_described)
        raise ConfigError("; ".join(details)) from None


def short(value: Any) -> str:
    """
    What a value looks like, for an error.
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_RULES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a finite number"),
    str: ((str,), "a string"),
}


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)

    def plain(value: Any, kind: type) -> Any:
        types, what = _RULES[kind]
        is_fitting = type(value) in types
        if is_fitting and type(value) is int:
            is_fitting = abs(value) <= _MOST_EXACT
        if not is_fitting or (type(value) is float and not isfinite(value)):
            raise ValueError(f"must be {what}: {short(value)}")
        return kind(value)

    def mapping(value: Any, kind: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"must be an object: {short(value)}")
        of_keys, of_values = get_args(kind)
        # Written as the number is: int() would also take spaces, signs and underscores.
        if of_keys is int and not all(key.isascii() and key.isdecimal() and len(key) < 16 for key in value):
            raise ValueError(f"must have whole numbers as keys: {short(list(value))}")
        return {of_keys(key): converter.structure(item, of_values) for key, item in value.items()}

    def items(value: Any, kind: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"must be a list: {short(value)}")
        return tuple(converter.structure(item, get_args(kind)[0]) for item in value)

    for kind in _RULES:
        converter.register_structure_hook(kind, plain)
    converter.register_structure_hook_func(_is_mapping, mapping)
    converter.register_structure_hook_func(_is_tuple, items)
    return converter


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is Mapping


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _described(exc: BaseException, _kind: Any) -> str:
    return f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)


def _refuse(text: str) -> None:
    raise ValueError(f"numbers must be finite: {text}")
