"""Scheduler of episodes: which one starts next, within a limit on episodes in flight. No clock, sockets or tasks.

Training and evaluation share the limit. Priority: queued evaluation, then the rest of the open training group, then a
new training group if the current batch needs more rollouts. Nothing is cancelled for evaluation: training episodes
drain as they finish, and new ones start while the last evaluation episodes run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.orchestrator.signals import Episode, Kind
from headrace.rollout.types import Group, Rollout


class _OpenGroup(msgspec.Struct, eq=False):
    """A group whose episodes have not all arrived, with the numbers of started and arrived ones."""

    group: Group
    kind: Kind
    dispatched: int = 0
    arrived: int = 0
    cancelled: str = ""
    """Reason why the group was cancelled, if it was."""
    rollouts: dict[int, list[Rollout]] = msgspec.field(default_factory=dict)
    """By the index of their episode."""

    @property
    def is_complete(self) -> bool:
        return self.arrived == (self.dispatched if self.cancelled else self.group.size)


class CompleteGroup(msgspec.Struct):
    """A group of which every started episode has arrived, and no more will be started."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]
    cancelled: str = ""
    """Why it was cancelled, if it was."""


class EpisodeScheduler:
    """Chooses the episode that starts next; `open_group` draws the next training prompt and returns its group.

    Groups are opened while fewer training episodes are open than wanted. With `whole_groups` an arrived episode counts
    as open until its group is complete, so no surplus is started, and training groups are returned in the order in
    which they were opened. Without, it does not count, so the slots stay busy while groups wait for stragglers.
    `max_inflight` may change at any time.
    """

    def __init__(self, max_inflight: int, open_group: Callable[[], Group], whole_groups: bool = False) -> None:
        self.max_inflight, self._open_group, self._whole_groups = max_inflight, open_group, whole_groups
        self.groups: dict[str, _OpenGroup] = {}
        """Groups of training and evaluation that are not complete, by id."""
        self._ordered: deque[_OpenGroup] = deque()
        """With `whole_groups`, the open training groups in their order."""
        self._starting: _OpenGroup | None = None
        """The training group with episodes that are not started."""
        self._eval_queue: deque[_OpenGroup] = deque()
        self._inflight: dict[int, Episode] = {}
        self._next_id = 0
        self.open_episodes = 0
        """Training episodes of groups that are neither complete nor cancelled."""
        self._missing = 0
        """Those open episodes that have not arrived."""
        self.queued_evals = 0
        """Evaluation episodes that are not started."""
        self.inflight = {Kind.TRAIN: 0, Kind.EVAL: 0}

    @property
    def free_slots(self) -> int:
        """Return how many episodes may start; 0 while more are in flight than a lowered limit allows."""
        return max(0, self.max_inflight - len(self._inflight))

    def queue_eval(self, groups: Iterable[Group]) -> None:
        for group in groups:
            open_group = self.groups[group.id] = _OpenGroup(group, Kind.EVAL)
            self._eval_queue.append(open_group)
            self.queued_evals += group.size

    def next_episode(self, wanted: int, may_begin: bool = True) -> Episode | None:
        """Return the episode to start now; None if there is no free slot or no work.

        `wanted` is the number of open training episodes to reach; `may_begin`: whether another group may be started.
        """
        if self.free_slots <= 0:
            return None
        evaluates = bool(self._eval_queue) and (may_begin or self._eval_queue[0].dispatched > 0)
        if not evaluates and self._starting is None:
            counted = self.open_episodes if self._whole_groups else self._missing
            if counted >= wanted or not may_begin or self._eval_queue:
                return None
            group = self._open_group()
            self._starting = self.groups[group.id] = _OpenGroup(group, Kind.TRAIN)
            if self._whole_groups:
                self._ordered.append(self._starting)
            self.open_episodes += group.size
            self._missing += group.size
        open_group = self._eval_queue[0] if evaluates else self._starting
        assert open_group is not None
        group = open_group.group
        if not (may_begin or open_group.dispatched):
            return None
        if group.together and not open_group.dispatched and self.free_slots < group.size:
            return None  # wait until all of its episodes can start together
        episode = Episode(self._next_id, open_group.kind, group, open_group.dispatched)
        self._next_id += 1
        open_group.dispatched += 1
        self._inflight[episode.id] = episode
        self.inflight[episode.kind] += 1
        self.queued_evals -= evaluates
        if open_group.dispatched == group.size:
            if evaluates:
                self._eval_queue.popleft()
            else:
                self._starting = None
        return episode

    def arrive(self, episode: Episode, rollouts: Iterable[Rollout]) -> list[CompleteGroup]:
        """Record the end of an episode; return the groups that are complete now."""
        del self._inflight[episode.id]
        self.inflight[episode.kind] -= 1
        open_group = self.groups[episode.group.id]
        open_group.arrived += 1
        if open_group.kind is Kind.TRAIN and not open_group.cancelled:
            self._missing -= 1
        open_group.rollouts[episode.index] = list(rollouts)
        if not open_group.is_complete:
            return []
        ordered = self._whole_groups and open_group.kind is Kind.TRAIN and not open_group.cancelled
        return self._close_ordered() if ordered else [self._close(open_group)]

    def _close_ordered(self) -> list[CompleteGroup]:
        """Close the complete groups up to the first open one."""
        closed = []
        while self._ordered and self._ordered[0].is_complete:
            closed.append(self._close(self._ordered.popleft()))
        return closed

    def cancel(self, unwanted: Callable[[Group], bool], reason: str) -> tuple[list[Episode], list[CompleteGroup]]:
        """Cancel the training groups that match.

        Return their episodes in flight, which must still arrive, and the groups that are complete because nothing of
        them is in flight.
        """
        training = [group for group in self.groups.values() if group.kind is Kind.TRAIN and not group.cancelled]
        matching = [open_group for open_group in training if unwanted(open_group.group)]
        for open_group in matching:
            open_group.cancelled = reason
            self.open_episodes -= open_group.group.size
            self._missing -= open_group.group.size - open_group.arrived
            if self._starting is open_group:
                self._starting = None
        self._ordered = deque(open_group for open_group in self._ordered if not open_group.cancelled)
        finished = [
            self._close(open_group) for open_group in matching if open_group.is_complete
        ] + self._close_ordered()
        ids = {open_group.group.id for open_group in matching}
        return [episode for episode in self._inflight.values() if episode.group.id in ids], finished

    def _close(self, open_group: _OpenGroup) -> CompleteGroup:
        del self.groups[open_group.group.id]
        if open_group.kind is Kind.TRAIN and not open_group.cancelled:
            self.open_episodes -= open_group.group.size
        # Sorted by index, not by arrival, so that a repeated run gives the same group.
        rollouts = [rollout for _, several in sorted(open_group.rollouts.items()) for rollout in several]
        return CompleteGroup(open_group.kind, open_group.group, rollouts, open_group.cancelled)
