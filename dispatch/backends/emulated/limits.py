"""What the emulated device has to give, and what it says when nothing is left."""

import attrs

STREAM_LIMITS = {
    "legacy-1800": 2048 - 248,
    "a2-a3": 1984,
    "310p": 1024,
    "200i": 512,
    "hdk25.5": 32 * 1024,
}
"""
Streams that graphs can hold, by device and driver: 2048 with 248 kept back (vllm-ascend up to 0.20), the maxima of
CANN's aclrtCreateStream, and what binding queues in software allows (HDK 25.5 and later).
"""

NO_STREAM = (
    "{what} failed, error code is 207008: the stream resource is insufficient "
    "(ACL_ERROR_RT_NO_STREAM_RESOURCE, EL0009); graphs hold {held} of {limit} streams"
)
NO_STREAM_OLD = (
    "{what} failed, error code is 207005 (0x7020023): Alloc sq cq fail, stream_id={held}; "
    "graphs hold {held} of {limit} streams"
)


@attrs.define
class Limits:
    """
    What the device has to give.

    Args:
        streams: Streams that graphs can hold, see `STREAM_LIMITS`.
        old_driver: Whether exhaustion is reported as by drivers before error 207008 existed.
        memory_bytes: Memory in all.
        auto_reset: Whether an external event resets itself when a wait is satisfied (CANN with value events).
    """

    streams: int = STREAM_LIMITS["a2-a3"]
    old_driver: bool = False
    memory_bytes: int = 64 << 30
    auto_reset: bool = True
