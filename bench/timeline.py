"""
A run as a Chrome trace, which Perfetto opens: what host, device and update stream do, step by step.

The format is that of "Trace Event Format" (Google, 2016): complete events ("X"), counters ("C") and metadata
("M"), times in microseconds.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
from attrs import validators

from .files import whole_file

MAX_STEPS = 20_000
"""The most steps of a file: about 20 MB, which a viewer opens at once."""

TRACKS = {"host": 1, "device": 2, "update stream": 3}
"""Thread ids, in the order in which a viewer shows them."""

_SECONDS: Any = [validators.ge(0), validators.lt(math.inf)]


@attrs.frozen
class TimelineStep:
    """
    A step of a run.

    The host prepares it, waits (sync), and launches it, and from then on the device runs it. In a FULL replay the
    host then updates parameters of attention, on a stream beside the replay. When both host and device are done,
    tokens are sampled.

    Args:
        index: Its number.
        start_seconds: When its preparation begins, from the start of the run.
        mode: The runtime mode's name.
        reason: Why this mode.
        num_reqs: Requests of the step.
        num_tokens: Tokens before padding.
        num_padded_tokens: Tokens after padding.
        prepare_seconds: The host's, before anything can be launched.
        host_seconds: The host's, to launch, updates included.
        update_seconds: The share of it, at its end, that is for updates.
        device_seconds: The device's, for the forward pass.
        sync_seconds: The host's, waiting between preparation and launch.
        sample_seconds: The device's, for sampling.
    """

    index: int
    start_seconds: float = attrs.field(validator=_SECONDS)
    mode: str
    reason: str
    num_reqs: int
    num_tokens: int
    num_padded_tokens: int
    prepare_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)
    host_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)
    update_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)
    device_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)
    sync_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)
    sample_seconds: float = attrs.field(kw_only=True, default=0.0, validator=_SECONDS)

    def __attrs_post_init__(self) -> None:
        if self.update_seconds > self.host_seconds:
            msg = f"update_seconds must be a share of host_seconds: {self.update_seconds}, {self.host_seconds}"
            raise ValueError(msg)

    @property
    def launch_seconds(self) -> float:
        """
        When the launch begins.
        """
        return self.start_seconds + self.prepare_seconds + self.sync_seconds

    @property
    def forward_end_seconds(self) -> float:
        """
        When host and device are both done.
        """
        return self.launch_seconds + max(self.host_seconds, self.device_seconds)

    @property
    def end_seconds(self) -> float:
        """
        When its tokens are sampled.
        """
        return self.forward_end_seconds + self.sample_seconds


def write_timeline(steps: Sequence[TimelineStep], path: str | os.PathLike[str], *, name: str = "run") -> None:
    """
    Write the first steps of a run, `MAX_STEPS` at most; the file says when there were more.

    Args:
        steps: In the order of time.
        path: Where to; a file there is replaced.
        name: The run's, for the viewer.

    Raises:
        ValueError: A step begins before the one before it has ended.
        ConfigError: The file cannot be written there.
    """
    shown = steps[:MAX_STEPS]
    for before, step in pairwise(shown):
        # Sums of the same seconds in another order differ by rounding.
        if step.start_seconds < before.end_seconds - 1e-6:
            msg = f"step {step.index} must not begin before step {before.index} ends: {step.start_seconds} s, "
            raise ValueError(f"{msg}{before.end_seconds} s; give the steps in the order of time")

    label = (
        f"the first {len(shown)} of {len(steps)} steps" if len(shown) < len(steps) else f"all {len(steps)} steps"
    )
    facts = {"num_steps": len(steps), "num_steps_shown": len(shown), "steps": label}
    with whole_file(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(shown, f"{name}, {label}")))
        file.write("\n]}\n")


def _events(steps: Sequence[TimelineStep], name: str) -> Iterator[dict[str, Any]]:
    """
    All events, metadata first.
    """
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}
    for track, thread in TRACKS.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    free = dict.fromkeys(TRACKS, 0)
    for i, step in enumerate(steps):
        yield from _counters(step.start_seconds, step.num_reqs, step.num_tokens, step.num_padded_tokens)
        yield from _spans(step, free)
        if i + 1 == len(steps) or steps[i + 1].start_seconds > step.end_seconds + 1e-6:
            yield from _counters(step.end_seconds, 0, 0, 0)


def _spans(step: TimelineStep, free: dict[str, int]) -> Iterator[dict[str, Any]]:
    """
    The spans of a step.

    Args:
        step: The step.
        free: From when each track is free, in nanoseconds; moved on.
    """
    prepared, launch = step.start_seconds + step.prepare_seconds, step.launch_seconds
    launched = launch + step.host_seconds
    arguments = {
        "step": step.index,
        "mode": step.mode,
        "reason": step.reason,
        "requests": step.num_reqs,
        "tokens": step.num_tokens,
        "padded tokens": step.num_padded_tokens,
    }
    for track, label, start, end in (
        ("host", "prepare", step.start_seconds, prepared),
        ("host", "sync", prepared, launch),
        ("host", f"launch {step.mode}", launch, launched),
        ("device", f"forward {step.mode}", launch, launch + step.device_seconds),
        ("device", "sample", step.forward_end_seconds, step.end_seconds),
        ("update stream", "update", launched - step.update_seconds, launched),
    ):
        # Whole nanoseconds, so that spans that touch do not overlap by rounding.
        begin, stop = max(round(1e9 * start), free[track]), round(1e9 * end)
        if stop > begin:
            free[track] = stop
            yield {
                "ph": "X",
                "pid": 1,
                "tid": TRACKS[track],
                "name": label,
                "ts": begin / 1e3,
                "dur": (stop - begin) / 1e3,
                "args": arguments,
            }


def _counters(seconds: float, num_reqs: int, num_tokens: int, num_padded_tokens: int) -> Iterator[dict[str, Any]]:
    """
    What runs from here on.
    """
    time = {"ph": "C", "pid": 1, "ts": round(1e9 * seconds) / 1e3}
    yield time | {"name": "requests", "args": {"running": num_reqs}}
    yield time | {"name": "tokens", "args": {"scheduled": num_tokens, "padding": num_padded_tokens - num_tokens}}
