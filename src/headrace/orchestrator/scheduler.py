"""What to run next: the decisions of the pipeline, as a state machine without clock, sockets or tasks.

One limit on episodes in flight serves training and evaluation. Waiting evaluation goes first; then the rest of a group
that is already open; then a new group, if the batch that is being collected still wants rollouts. Nothing is cancelled
for evaluation: training work drains as it finishes, and resumes while the evaluation's tail runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec

from headrace.rollout.types import Group


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Episode(msgspec.Struct, frozen=True):
    """One run of an environment on a task: the unit that takes a permit."""

    id: int
    kind: Kind
    group: Group
    index: int
    """Its place in the group."""

    @property
    def env(self) -> str:
        return self.group.task.env


class _OpenGroup(msgspec.Struct):
    group: Group
    kind: Kind
    dispatched: int = 0
    arrived: int = 0
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        return self.arrived == (self.dispatched if self.cancelled else self.group.size)


class Scheduler:
    """`open_group` draws the next training prompt and makes a group of it."""

    def __init__(self, max_inflight: int, open_group: Callable[[], Group]) -> None:
        self.max_inflight = max_inflight
        self._open_group = open_group
        self._groups: dict[str, _OpenGroup] = {}
        self._partly_dispatched: _OpenGroup | None = None
        self._eval_queue: deque[tuple[_OpenGroup, int]] = deque()
        self._inflight: dict[int, Episode] = {}
        self._next_id = 0
        self.open_rollouts = 0
        """Training rollouts of groups that are neither complete nor cancelled, dispatched or still to be."""
        self.inflight = {Kind.TRAIN: 0, Kind.EVAL: 0}

    @property
    def available_permits(self) -> int:
        return self.max_inflight - len(self._inflight)

    @property
    def open_groups(self) -> int:
        """Groups, of training and evaluation, with an episode in flight or still to start."""
        return len(self._groups)

    @property
    def queued_evals(self) -> int:
        return len(self._eval_queue)

    def queue_eval(self, groups: Iterable[Group]) -> None:
        for group in groups:
            open_group = self._groups[group.id] = _OpenGroup(group, Kind.EVAL)
            self._eval_queue.extend((open_group, index) for index in range(group.size))

    def next_episode(self, wanted: int) -> Episode | None:
        """The episode to start now, if there is a permit and work; `wanted` open training rollouts are welcome."""
        if self.available_permits <= 0:
            return None
        if self._eval_queue:
            return self._dispatch(*self._eval_queue.popleft())
        if self._partly_dispatched is None:
            if self.open_rollouts >= wanted:
                return None
            group = self._open_group()
            self._partly_dispatched = self._groups[group.id] = _OpenGroup(group, Kind.TRAIN)
            self.open_rollouts += group.size
        open_group = self._partly_dispatched
        episode = self._dispatch(open_group, open_group.dispatched)
        if open_group.dispatched == open_group.group.size:
            self._partly_dispatched = None
        return episode

    def arrive(self, episode: Episode) -> bool:
        """Take back the permit. True if this was the group's last episode: groups finish by counting."""
        del self._inflight[episode.id]
        self.inflight[episode.kind] -= 1
        open_group = self._groups[episode.group.id]
        open_group.arrived += 1
        if not open_group.complete:
            return False
        self._close(open_group)
        return True

    def cancel(self, unwanted: Callable[[Group], bool]) -> tuple[list[Episode], list[Group]]:
        """Give up the training groups that match.

        Returns their episodes in flight, which must still arrive, and the groups that have nothing in flight and are
        thereby complete.
        """
        matching = [
            open_group
            for open_group in self._groups.values()
            if open_group.kind is Kind.TRAIN and not open_group.cancelled and unwanted(open_group.group)
        ]
        for open_group in matching:
            open_group.cancelled = True
            self.open_rollouts -= open_group.group.size
            if self._partly_dispatched is open_group:
                self._partly_dispatched = None
        finished = [open_group for open_group in matching if open_group.complete]
        for open_group in finished:
            self._close(open_group)
        ids = {open_group.group.id for open_group in matching}
        inflight = [episode for episode in self._inflight.values() if episode.group.id in ids]
        return inflight, [open_group.group for open_group in finished]

    def _dispatch(self, open_group: _OpenGroup, index: int) -> Episode:
        episode = Episode(self._next_id, open_group.kind, open_group.group, index)
        self._next_id += 1
        open_group.dispatched += 1
        self._inflight[episode.id] = episode
        self.inflight[episode.kind] += 1
        return episode

    def _close(self, open_group: _OpenGroup) -> None:
        del self._groups[open_group.group.id]
        if open_group.kind is Kind.TRAIN and not open_group.cancelled:
            self.open_rollouts -= open_group.group.size
