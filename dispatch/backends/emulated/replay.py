"""What a capture notes, and how a replay goes through it."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch

from .device import Stream, hardware
from .events import ExternalEvent
from .faults import ClobberedError, StaleParameterError
from .mempool import address_of, clobbered, owners
from .program import Interpreted, Program, is_expressible
from .recorder import Task
from .schedule import Explore

if TYPE_CHECKING:
    from .graphs import NPUGraph


@attrs.define(eq=False)
class Wait:
    """
    A noted wait for an external event.
    """

    lane: Stream
    event: ExternalEvent

    def blocked_on(self) -> str:
        return f"{self.event}, recorded {self.event.num_records} times so far"


@attrs.define(eq=False)
class Note:
    """
    A noted record or reset of an external event.
    """

    lane: Stream
    run: Callable[[], None]


@attrs.define(eq=False)
class Mark:
    """
    A noted record of an event that other lanes wait for.
    """

    lane: Stream


@attrs.define(eq=False)
class MarkWait:
    """
    A noted wait for such a record.
    """

    lane: Stream
    mark: Mark


Item = Task | Wait | Note | Mark | MarkWait


Segment = tuple[Wait | None, list[Task | Note | Program]]


def segments(items: list[Item]) -> list[Segment]:
    """
    What runs between waits for external events, in the order in which it was noted: operators whose arguments stay
    as they are in programs, the others one by one.
    """
    segments: list[Segment] = [(None, [])]
    for is_program, group in itertools.groupby(items, key=lambda i: isinstance(i, Task) and is_expressible(i)):
        if is_program:
            segments[-1][1].append(Program([item for item in group if isinstance(item, Task)]))
            continue
        for item in group:
            if isinstance(item, Wait):
                segments.append((item, []))
            elif isinstance(item, Task | Note):
                segments[-1][1].append(item)
    return segments


def unjoined(items: list[Item], first: Stream | None) -> list[Stream]:
    """
    Lanes with work that the first lane does not wait for in the end.
    """
    joined: dict[Stream, int] = {}
    # Walk backwards: a lane is joined up to the latest mark that a joined item waits for.
    if first is not None:
        joined[first] = len(items)
    for position in range(len(items) - 1, -1, -1):
        item = items[position]
        if isinstance(item, MarkWait) and position < joined.get(item.lane, -1):
            mark = items.index(item.mark)
            joined[item.mark.lane] = max(joined.get(item.mark.lane, -1), mark + 1)
    last = {item.lane: position for position, item in enumerate(items) if not isinstance(item, Mark)}
    return [lane for lane, position in last.items() if position >= joined.get(lane, 0)]


class InlineReplay:
    """
    A replay in the order of capture.
    """

    def __init__(self, graph: "NPUGraph", segments: list[Segment]) -> None:
        self._graph = graph
        self._segments = segments
        self._position = -1

    def is_ready(self) -> bool:
        wait = self._segments[max(self._position, 0)][0]
        return wait is None or wait.event.is_set

    def blocked_on(self) -> str:
        wait = self._segments[self._position][0]
        assert wait is not None
        return wait.blocked_on()

    def run_through(self) -> bool:
        if self._position < 0:
            self._graph.begin_replay()
            self._position = 0
        if torch.is_inference_mode_enabled():  # as in vLLM's steps; entering it again would cost some
            return self._run()
        with torch.inference_mode():
            return self._run()

    advance = run_through

    def _run(self) -> bool:
        while self._position < len(self._segments):
            wait, items = self._segments[self._position]
            if wait is not None:
                if not wait.event.is_set:
                    return False
                wait.event.consume()
            with Interpreted():
                for item in items:
                    item.run()
            self._position += 1
        self._graph.end_replay()
        return True


class ExploredReplay:
    """
    A replay whose lanes advance one item at a time, as the schedule picks, with every read checked.
    """

    def __init__(self, graph: "NPUGraph", items: list[Item], schedule: Explore) -> None:
        self._graph = graph
        self._number = graph.num_replays
        self._schedule = schedule
        self._lanes = {lane: [item for item in items if item.lane is lane] for lane in graph.lanes}
        self._position = dict.fromkeys(self._lanes, 0)
        self._marks: set[Mark] = set()
        self._begun = False

    def is_ready(self) -> bool:
        following = self._next()
        return not following or any(self._blocked(item) is None for item in following)

    def blocked_on(self) -> str:
        return ", ".join(filter(None, map(self._blocked, self._next())))

    def advance(self) -> bool:
        if not self._begun:
            self._graph.begin_replay()
            self._begun = True
        ready = [item for item in self._next() if self._blocked(item) is None]
        if ready:
            item = self._schedule.pick(ready)
            self._position[item.lane] += 1
            self._run(item)
        if self._next():
            return False
        self._graph.end_replay()
        return True

    run_through = advance

    def _next(self) -> list[Item]:
        return [
            items[self._position[lane]] for lane, items in self._lanes.items() if self._position[lane] < len(items)
        ]

    def _blocked(self, item: Item) -> str | None:
        if isinstance(item, Wait) and not item.event.is_set:
            return f"{item.blocked_on()}, in replay {self._number} of {self._graph}"
        if isinstance(item, MarkWait) and item.mark not in self._marks:
            return f"a mark of {item.mark.lane}, in replay {self._number} of {self._graph}"
        return None

    def _run(self, item: Item) -> None:
        if isinstance(item, Mark):
            self._marks.add(item)
        elif isinstance(item, Wait):
            item.event.consume()
        elif isinstance(item, Note):
            item.run()
        elif isinstance(item, Task):
            if item.group is not None:
                self._refuse_stale(item)
                self._graph.refuse_freed((a, t) for t in item.reads if (a := address_of(t)) not in owners)
            run_checked(item)

    def _refuse_stale(self, task: Task) -> None:
        """
        Report a task that runs with the parameters of another replay.
        """
        group = task.group
        assert group is not None
        if group.num_applied != self._number:
            hardware.faults.append(
                StaleParameterError(
                    f"replay {self._number} of {self._graph} ran {task.overload} with stale parameters: "
                    f"{group.num_applied} updates were applied, {group.num_submitted} submitted"
                )
            )


def run_checked(task: Task) -> None:
    """
    Run *task*, and report it if it reads what another graph has overwritten.
    """
    for tensor in task.reads if clobbered else ():
        by = clobbered.get(address_of(tensor))
        if by is not None:
            msg = (
                f"{task.overload} read the output of a graph after it was clobbered by a replay of {by}; "
                "copy it before, or hold the tensor, not a weak reference"
            )
            hardware.faults.append(ClobberedError(msg))
    with torch.inference_mode():
        task.run()
