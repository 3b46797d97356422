"""
The parameters of attention that a FULL graph cannot read from memory.

Theory of operation
-------------------
An attention operator takes lengths from the host. A graph has them baked in as they were at capture, so every
replay needs each captured operator to be issued again, under a task update, with the step's own metadata. The
update runs on a stream of its own, and the graph waits for it right before the operator:

    compute stream, in the graph, a layer     wait(event)  reset(event)  attention
    update stream, a layer                    update(attention)  record(event)

The event is one flag. A record that comes while the flag is set, or between the wait of one replay and the reset
behind it, is lost, and the next replay waits for ever (vllm-ascend #4233). Others make the host wait for the
previous replay before they start the next; here the update stream waits, which costs the host nothing:

    update stream waits for the compute stream;  replay;  update

So the updates of a replay come after the previous replay has consumed its events, and the replay itself, submitted
behind the mark, is not waited for. Devices whose streams are partitioned want the updates first; the flags then
stand when the replay comes, and the same mark keeps them apart from the previous one.

If an update fails, the replay is under way and must not hang: the events it still waits for are recorded without
an update, its results are worthless, the error goes to the caller, and the graph is not replayed again until it
has been captured anew. Records are kept by the whole descriptor: two graphs with equal numbers of tokens are two
graphs.

An operator computes in a workspace, which is baked in like a length. A graph has one, which the operators of all
its layers share, because they run one after another; it is taken at capture, held as long as the graph, and large
enough for every step, so that neither a replay nor an update allocates.
"""

from collections.abc import Callable, Hashable, KeysView, Mapping
from functools import partial
from typing import Any, Protocol

import attrs

from .errors import ReplayError
from .step_plan import BatchDescriptor

Issue = Callable[[Any], None]
"""Issues one attention operator with the metadata given."""


class TaskBackend(Protocol):
    """
    A device that can replace the arguments of captured operators.
    """

    update_stream: Any
    """The device's stream that updates run on; one for all graphs, those of a drafter included."""

    def record_task(self, run: Callable[[], None]) -> Any:
        """
        Capture a wait for an update, then the operator that *run* issues; return its handle.
        """
        ...

    def order_updates(self) -> None:
        """
        Let updates to come wait for the replays submitted so far.
        """
        ...

    def update_task(self, handle: Any, run: Callable[[], None]) -> None:
        """
        Replace the operator's arguments by those that *run* issues it with, and let the graph go on.
        """
        ...

    def release_task(self, handle: Any) -> None:
        """
        Let the graph go on without an update.
        """
        ...


@attrs.frozen
class AttentionTask:
    """
    One captured attention operator.
    """

    layer_name: str
    handle: Any
    issue: Issue


class AttentionParams:
    """
    Records attention operators at capture and refreshes them with every replay.

    Args:
        backend: The device.
        update_first: Submit the updates before the replay.
    """

    def __init__(self, backend: TaskBackend, *, update_first: bool = False) -> None:
        self.backend = backend
        self.update_first = update_first
        self._tasks: dict[BatchDescriptor, list[AttentionTask]] = {}
        self._workspaces: dict[BatchDescriptor, dict[Hashable, Any]] = {}
        self._broken: dict[BatchDescriptor, BaseException] = {}

    @property
    def descriptors(self) -> KeysView[BatchDescriptor]:
        """
        The graphs that anything was recorded for.
        """
        return self._tasks.keys()

    def record(self, descriptor: BatchDescriptor, layer_name: str, issue: Issue, metadata: Any) -> None:
        """
        Capture the attention of one layer as part of the graph of *descriptor*.
        """
        handle = self.backend.record_task(partial(issue, metadata))
        self._tasks.setdefault(descriptor, []).append(AttentionTask(layer_name, handle, issue))

    def workspace(self, descriptor: BatchDescriptor, shape: Hashable, allocate: Callable[[], Any]) -> Any:
        """
        The workspace for operators of *shape* in the graph of *descriptor*, held until the graph is forgotten.

        Args:
            descriptor: The graph being captured.
            shape: What the size of a workspace depends on, besides lengths.
            allocate: Makes a workspace that is enough for all lengths, a tensor or what else has `nbytes`. Called
                once a shape; its result is dropped if the graph holds one as large.
        """
        held = self._workspaces.setdefault(descriptor, {})
        if shape not in held:
            held[shape] = max([*held.values(), allocate()], key=lambda workspace: int(workspace.nbytes))
        return held[shape]

    def replay(self, descriptor: BatchDescriptor, metadata: Mapping[str, Any], replay: Callable[[], Any]) -> Any:
        """
        Replay the graph of *descriptor* with the parameters of this step; the host does not wait.

        Args:
            descriptor: The graph.
            metadata: By layer name, what the layer's operator is issued with.
            replay: Submits the replay; its result is returned.

        Raises:
            ReplayError: A layer of the graph has no metadata, or an earlier update of it failed; nothing was
                submitted.
        """
        tasks = self._tasks.get(descriptor, ())
        missing = [task.layer_name for task in tasks if metadata.get(task.layer_name) is None]
        if missing:
            raise ReplayError(f"no attention metadata for {', '.join(missing)} in a replay of {descriptor}")

        self.order_updates(descriptor)
        if self.update_first:
            self.update(descriptor, metadata.__getitem__)
            return replay()
        output = replay()
        self.update(descriptor, metadata.__getitem__)
        return output

    def order_updates(self, descriptor: BatchDescriptor) -> None:
        """
        Prepare a replay that the caller submits, and updates, himself; `replay` does all three.

        Raises:
            ReplayError: An earlier update of the graph failed, so it must not be replayed.
        """
        self._refuse_broken(descriptor)
        self.backend.order_updates()

    def update(self, descriptor: BatchDescriptor, metadata_of: Callable[[str], Any]) -> None:
        """
        Update the graph of *descriptor*, layer by layer as captured, for a replay that `order_updates` prepared.

        Args:
            descriptor: The graph.
            metadata_of: Tells what a layer's operator is issued with. Whatever it raises is an update that failed.
        """
        num_updated = 0
        try:
            self._refuse_broken(descriptor)
            for task in self._tasks.get(descriptor, ()):
                self.backend.update_task(task.handle, partial(task.issue, metadata_of(task.layer_name)))
                num_updated += 1
        except BaseException as exc:
            self.abandon(descriptor, exc, num_updated)
            raise

    def abandon(self, descriptor: BatchDescriptor, cause: BaseException, num_updated: int = 0) -> None:
        """
        Let a replay under way come to its end, with worthless results, and refuse the graph until it is captured
        again.

        Args:
            descriptor: The graph.
            cause: Why its layers cannot be updated.
            num_updated: Layers that have been.
        """
        self._broken.setdefault(descriptor, cause)
        if not self.update_first:
            for task in self._tasks.get(descriptor, [])[num_updated:]:
                self.backend.release_task(task.handle)

    def _refuse_broken(self, descriptor: BatchDescriptor) -> None:
        if descriptor in self._broken:
            msg = f"{descriptor} must be captured again before it is replayed: an update of its parameters failed"
            raise ReplayError(msg) from self._broken[descriptor]

    def forget(self, descriptor: BatchDescriptor) -> None:
        """
        Drop what was recorded for *descriptor*, whose graph is released or failed to be captured.
        """
        self._tasks.pop(descriptor, None)
        self._workspaces.pop(descriptor, None)
        self._broken.pop(descriptor, None)
