"""Task groups: captured operators whose arguments can be replaced."""

import weakref

import attrs

from .device import Stream, hardware
from .recorder import Recorder, Task, UpdateRecorder
from .schedule import Call


@attrs.define(eq=False)
class TaskGroup:
    """
    Handle of captured operators.

    Args:
        task_group: The operators.
        num_submitted: Updates so far; the emulation's own, as the next.
        num_applied: Those that have taken effect.
    """

    task_group: tuple[Task, ...]
    num_submitted: int = 0
    num_applied: int = 0


def graph_task_group_begin(stream: Stream) -> None:
    """
    Start a group in the graph being captured on *stream*.
    """
    recorder = _recorder(stream)
    if recorder.group_start is not None:
        raise RuntimeError("graph_task_group_begin within a group")
    recorder.group_start = len(recorder.items)


def graph_task_group_end(stream: Stream) -> TaskGroup:
    """
    End the group.
    """
    recorder = _recorder(stream)
    if recorder.group_start is None:
        raise RuntimeError("graph_task_group_end without graph_task_group_begin")
    tasks = tuple(item for item in recorder.items[recorder.group_start :] if isinstance(item, Task))
    recorder.group_start = None
    group = TaskGroup(tasks)
    for task in tasks:
        task.group = group
    return group


_recorders: "weakref.WeakKeyDictionary[Stream, UpdateRecorder]" = weakref.WeakKeyDictionary()
_open: dict[Stream, TaskGroup] = {}


def graph_task_update_begin(stream: Stream, handle: TaskGroup) -> None:
    """
    Start to replace the arguments of a group: the operators called until `graph_task_update_end` must be those
    captured, and are not run.

    Raises:
        RuntimeError: *stream* is capturing, or an update is open on it.
    """
    hardware.refuse_while_capturing("update a task")
    if stream in _open:
        raise RuntimeError("graph_task_update_begin while an update is open on this stream")
    if stream not in _recorders:
        _recorders[stream] = UpdateRecorder()
    _open[stream] = handle
    _recorders[stream].begin(handle.task_group)


def graph_task_update_end(stream: Stream) -> None:
    """
    Submit the replacement to *stream*: it takes effect when all that the stream holds now has run.

    Raises:
        RuntimeError: Other operators were called than captured, in number or in kind; nothing is replaced.
    """
    group = _open.pop(stream, None)
    if group is None:
        raise RuntimeError("graph_task_update_end without graph_task_update_begin")
    calls = _recorders[stream].end()
    group.num_submitted += 1

    def apply() -> None:
        for task, (_, args, kwargs) in zip(group.task_group, calls, strict=True):
            task.bind(args, kwargs)
        group.num_applied += 1

    stream.submit(Call(apply))


def _recorder(stream: Stream) -> Recorder:
    if hardware.capturing is None or stream not in hardware.capturing.lanes:
        raise RuntimeError("graph task groups can only be used while the stream is capturing")
    recorder: Recorder = hardware.capturing.recorder
    return recorder
