"""Options of `NPUGraph.super_kernel_optimize`, which changes speed only: they are checked, and that is all."""

from typing import Any

_NUMBERS = dict.fromkeys(
    ("preload_code", "split_mode", "stream_fusion", "constant_codegen", "auto_op_parallel", "early_start"), int
)
_KERNELS = dict.fromkeys(
    (
        "dcci_before_kernel_start",
        "dcci_after_kernel_end",
        "dcci_disable_on_kernel",
        "ubuf_lock_ignore_kernel",
    ),
    list[str],
)
OPTIMIZE: dict[str, Any] = {
    **_NUMBERS,
    **_KERNELS,
    "opt_extend": str,
    "aggressive_opt_strategies": dict.fromkeys(
        ("event_breaker_bypass", "value_breaker_bypass", "task_breaker_bypass"), int
    ),
}
"""Types by name; a dictionary of such for options in options."""
DEBUG: dict[str, Any] = {
    **dict.fromkeys(
        ("debug_sync_all", "debug_op_exec_trace", "debug_cross_core_sync_check", "debug_per_op_max_core_num"), int
    ),
    "debug_extend": str,
}


def check(name: str, value: Any, expected: Any) -> None:
    """
    Compare *value* with the *expected* type.

    Raises:
        RuntimeError: It is of another, or has an option that does not exist.
    """
    if isinstance(expected, dict):
        check(name, value, dict)
        for key, option in value.items():
            if key not in expected:
                raise RuntimeError(f"{name} has no option {key!r}")
            check(f"{name}[{key!r}]", option, expected[key])
    elif expected == list[str]:
        check(name, value, list)
        for position, kernel in enumerate(value):
            check(f"{name}[{position}]", kernel, str)
    elif not isinstance(value, expected):
        raise RuntimeError(f"{name} must be {expected.__name__}, not {type(value).__name__}")
