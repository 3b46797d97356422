"""The Chrome trace of a run."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch.bench import timeline
from aclgraph_dispatch.bench.timeline import TRACKS, TimelineStep, write_timeline
from aclgraph_dispatch.errors import ConfigError

FULL = TimelineStep(
    0, 1.0, "FULL", "padded", 3, 3, 4, prepare_seconds=0.002, sync_seconds=0.001, host_seconds=0.005,
    update_seconds=0.004, device_seconds=0.010, sample_seconds=0.003,
)  # fmt: skip


def trace_of(steps: Sequence[TimelineStep], path: Path) -> dict[str, Any]:
    """
    What was written of *steps*.
    """
    write_timeline(steps, path)
    return json.loads(path.read_text())


def spans(trace: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """
    Name, begin and end of the spans of each track, in microseconds.
    """
    names = {
        event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append((event["name"], event["ts"], round(event["ts"] + event["dur"], 3)))
    return dict(tracks)


def test_layout(tmp_path: Path) -> None:
    """
    Preparation, sync, then launch and forward side by side, the update at the launch's end; sampling after both.
    """
    expected = {
        "host": [
            ("prepare", 1_000_000, 1_002_000),
            ("sync", 1_002_000, 1_003_000),
            ("launch FULL", 1_003_000, 1_008_000),
        ],
        "device": [("forward FULL", 1_003_000, 1_013_000), ("sample", 1_013_000, 1_016_000)],
        "update stream": [("update", 1_004_000, 1_008_000)],
    }

    assert expected == spans(trace_of([FULL], tmp_path / "trace.json"))


def test_waits_for_host(tmp_path: Path) -> None:
    """
    Sampling waits for a host that takes longer than the device; what takes no time is left out.
    """
    step = TimelineStep(
        0, 0.0, "NONE", "mixed", 1, 9, 9, host_seconds=0.02, device_seconds=0.01, sample_seconds=0.001
    )

    expected = {
        "host": [("launch NONE", 0, 20_000)],
        "device": [("forward NONE", 0, 10_000), ("sample", 20_000, 21_000)],
    }

    assert expected == spans(trace_of([step], tmp_path / "trace.json"))


def test_counters(tmp_path: Path) -> None:
    """
    Requests and paddings are counted from a step's start, and none while nothing runs.
    """
    steps = [FULL, attrs.evolve(FULL, index=1, start_seconds=2.0)]
    events = trace_of(steps, tmp_path / "trace.json")["traceEvents"]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    busy, idle = {"scheduled": 3, "padding": 1}, {"scheduled": 0, "padding": 0}

    assert [e for e in counters if e[0] == "requests"] == [
        ("requests", 1_000_000, {"running": 3}),
        ("requests", 1_016_000, {"running": 0}),
        ("requests", 2_000_000, {"running": 3}),
        ("requests", 2_016_000, {"running": 0}),
    ]
    assert [busy, idle, busy, idle] == [e[2] for e in counters if e[0] == "tokens"]


seconds = st.one_of(st.just(0.0), st.floats(1e-7, 0.5))


@st.composite
def runs(draw: st.DrawFn) -> list[TimelineStep]:
    """
    Steps one after the other, with and without pauses.
    """
    steps, now = [], draw(seconds)
    for i in range(draw(st.integers(0, 20))):
        host = draw(seconds)
        step = TimelineStep(
            i, now, draw(st.sampled_from(["FULL", "PIECEWISE", "NONE"])), "exact", 1, 1, 1,
            prepare_seconds=draw(seconds), sync_seconds=draw(seconds), host_seconds=host,
            update_seconds=draw(st.floats(0, 1)) * host, device_seconds=draw(seconds),
            sample_seconds=draw(seconds),
        )  # fmt: skip
        steps.append(step)
        now = step.end_seconds + draw(seconds)
    return steps


@given(runs())
def test_tracks(tmp_path_factory: pytest.TempPathFactory, steps: list[TimelineStep]) -> None:
    """
    Spans of a track never overlap, none is outside the run, and each track's time is what its steps say.
    """
    tracks = spans(trace_of(steps, tmp_path_factory.mktemp("timeline") / "trace.json"))
    told = {
        "host": sum(s.prepare_seconds + s.sync_seconds + s.host_seconds for s in steps),
        "device": sum(s.device_seconds + s.sample_seconds for s in steps),
        "update stream": sum(s.update_seconds for s in steps),
    }

    assert set(tracks) <= set(TRACKS)
    for track in TRACKS:
        found = tracks.get(track, [])
        assert all(before[2] <= after[1] for before, after in pairwise(found))
        assert all(1e6 * steps[0].start_seconds - 0.001 <= begin < end for _, begin, end in found)
        assert all(end <= 1e6 * steps[-1].end_seconds + 0.001 for _, _, end in found)
        assert sum(end - begin for _, begin, end in found) == pytest.approx(1e6 * told[track], abs=0.2)


def test_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of a long run the first steps are written, and the file says so.
    """
    monkeypatch.setattr(timeline, "MAX_STEPS", 2)
    steps = [attrs.evolve(FULL, index=i, start_seconds=float(i)) for i in range(5)]
    trace = trace_of(steps, tmp_path / "trace.json")
    process = next(event for event in trace["traceEvents"] if event["name"] == "process_name")

    assert trace["otherData"] == {"num_steps": 5, "num_steps_shown": 2, "steps": "the first 2 of 5 steps"}
    assert process["args"]["name"] == "run, the first 2 of 5 steps"
    assert {0, 1} == {event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"}


def test_whole_run(tmp_path: Path) -> None:
    """
    Of a short run, and of an empty one, all is written.
    """
    assert trace_of([FULL], tmp_path / "trace.json")["otherData"]["steps"] == "all 1 steps"
    assert trace_of([], tmp_path / "trace.json")["otherData"]["steps"] == "all 0 steps"


def test_out_of_order(tmp_path: Path) -> None:
    """
    Steps that overlap are refused, and what was in the file stays.
    """
    path = tmp_path / "trace.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="step 1 must not begin before step 0 ends"):
        write_timeline([FULL, attrs.evolve(FULL, index=1, start_seconds=1.01)], path)

    assert path.read_text() == "before"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"start_seconds": -1.0}, {"device_seconds": float("nan")}, {"update_seconds": 0.006}]
)
def test_illegal_steps(changes: dict[str, float]) -> None:
    """
    Times are finite, not negative, and the update is a part of the launch.
    """
    with pytest.raises(ValueError):
        attrs.evolve(FULL, **changes)


def test_no_folder(tmp_path: Path) -> None:
    """
    A folder that is not there gives one clear error.
    """
    with pytest.raises(ConfigError, match=r"trace\.json cannot be written: No such file"):
        write_timeline([FULL], tmp_path / "nowhere" / "trace.json")
