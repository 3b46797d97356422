"""
Routing policies as data: which modes a kind of batch may use, best first.

A policy says only what is wanted. Whether a graph exists is the plan's business, and eager is always the last
resort, so it is never listed.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .batch import BatchKind
from .step_plan import Reason, RuntimeMode

Policy = Mapping[BatchKind, tuple[RuntimeMode, ...]]

_FULL = RuntimeMode.FULL
_PIECEWISE = RuntimeMode.PIECEWISE

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "eager": MappingProxyType({}),
        "piecewise": MappingProxyType(
            {
                BatchKind.UNIFORM_DECODE: (_PIECEWISE,),
                BatchKind.RAGGED_DECODE: (_PIECEWISE,),
                BatchKind.MIXED: (_PIECEWISE,),
                BatchKind.PREFILL: (_PIECEWISE,),
            }
        ),
        "full_decode_only": MappingProxyType(
            {BatchKind.UNIFORM_DECODE: (_FULL,), BatchKind.RAGGED_DECODE: (_FULL,)}
        ),
        "full_and_piecewise": MappingProxyType(
            {
                BatchKind.UNIFORM_DECODE: (_FULL, _PIECEWISE),
                BatchKind.RAGGED_DECODE: (_FULL, _PIECEWISE),
                BatchKind.MIXED: (_PIECEWISE,),
                BatchKind.PREFILL: (_PIECEWISE,),
            }
        ),
    }
)

KIND_OBSTACLES: Mapping[BatchKind, Reason] = MappingProxyType(
    {
        BatchKind.MIXED: Reason.MIXED,
        BatchKind.PREFILL: Reason.PREFILL,
    }
)
"""Why a kind of batch may not use the mode that uniform decodes get."""


def modes_used(policy: Policy) -> frozenset[RuntimeMode]:
    """
    The graph modes that *policy* can ever choose: graphs of others need not be captured.
    """
    return frozenset(mode for modes in policy.values() for mode in modes)
