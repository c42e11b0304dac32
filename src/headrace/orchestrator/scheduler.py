"""What to run next: permits, groups and their order, without clock, sockets or tasks.

One limit on episodes in flight serves training and evaluation. Waiting evaluation goes first; then the rest of a group
that is already open; then a new group, if the batch that is being collected still wants rollouts. Nothing is cancelled
for evaluation: training work drains as it finishes, and resumes while the evaluation's tail runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.orchestrator.signals import Episode, Kind, ScoredGroup
from headrace.rollout.types import Group, Rollout


class _OpenGroup(msgspec.Struct, eq=False):
    group: Group
    kind: Kind
    dispatched: int = 0
    arrived: int = 0
    cancelled: str = ""
    """Why no more of it is started, if so."""
    rollouts: dict[int, list[Rollout]] = msgspec.field(default_factory=dict)
    """By the place of their episode in the group."""

    @property
    def in_order(self) -> list[Rollout]:
        """Not as they happened to arrive: the same run gives the same group."""
        return [rollout for _, rollouts in sorted(self.rollouts.items()) for rollout in rollouts]

    @property
    def complete(self) -> bool:
        return self.arrived == (self.dispatched if self.cancelled else self.group.size)


class CompleteGroup(msgspec.Struct):
    """Every episode of it that was started has arrived, and no more will be started."""

    kind: Kind
    group: Group
    rollouts: list[Rollout]
    cancelled: str = ""

    def given_up(self) -> ScoredGroup:
        """A cancelled one: whatever arrived of it is dropped, without credit."""
        reason = self.cancelled
        dropped = [(rollout, reason if rollout.error is None else rollout.error.reason) for rollout in self.rollouts]
        tokens = sum(rollout.completion_tokens for rollout in self.rollouts)
        return ScoredGroup(
            self.kind, self.group, [], dropped, reason, arrived=len(self.rollouts), sampled_tokens=tokens
        )


class Scheduler:
    """`open_group` draws the next training prompt and makes a group of it.

    Groups are opened as long as fewer training episodes are open than are wanted. With `whole_groups` an episode that
    has arrived counts until its group is complete, so that nothing is started in vain, and training groups come back in
    the order in which they were opened; without, it does not, so that permits stay busy while groups wait for their
    stragglers. `max_inflight` may change at any time.
    """

    def __init__(self, max_inflight: int, open_group: Callable[[], Group], whole_groups: bool = False) -> None:
        self.max_inflight = max_inflight
        self._whole_groups = whole_groups
        self._open_group = open_group
        self._groups: dict[str, _OpenGroup] = {}
        self._line: deque[_OpenGroup] = deque()
        """With `whole_groups`, those of training as they were opened."""
        self._starting: _OpenGroup | None = None
        """The training group of which not every episode has been started."""
        self._eval_queue: deque[_OpenGroup] = deque()
        self._inflight: dict[int, Episode] = {}
        self._next_id = 0
        self.open_episodes = 0
        """Training episodes of groups that are neither complete nor cancelled."""
        self._missing = 0
        """Of them, those that have not arrived."""
        self.queued_evals = 0
        """Evaluation episodes that wait for a permit."""
        self.inflight = {Kind.TRAIN: 0, Kind.EVAL: 0}

    @property
    def available_permits(self) -> int:
        """None as long as there are more episodes than a limit that was lowered allows."""
        return max(0, self.max_inflight - len(self._inflight))

    @property
    def open_groups(self) -> int:
        """Groups, of training and evaluation, with an episode in flight or still to start."""
        return len(self._groups)

    def queue_eval(self, groups: Iterable[Group]) -> None:
        for group in groups:
            open_group = self._groups[group.id] = _OpenGroup(group, Kind.EVAL)
            self._eval_queue.append(open_group)
            self.queued_evals += group.size

    def next_episode(self, wanted: int, may_begin: bool = True) -> Episode | None:
        """The episode to start now, if there is a permit and work.

        `wanted` open training episodes are welcome; `may_begin` is whether another task may begin at all.
        """
        if self.available_permits <= 0:
            return None
        if self._eval_queue and (may_begin or self._eval_queue[0].dispatched):
            return self._next_of_eval()
        if self._starting is None:
            counted = self.open_episodes if self._whole_groups else self._missing
            if counted >= wanted or not may_begin or self._eval_queue:
                return None
            group = self._open_group()
            self._starting = self._groups[group.id] = _OpenGroup(group, Kind.TRAIN)
            if self._whole_groups:
                self._line.append(self._starting)
            self.open_episodes += group.size
            self._missing += group.size
        open_group = self._starting
        if not self._has_room_for(open_group) or not (may_begin or open_group.dispatched):
            return None
        episode = self._dispatch(open_group)
        if open_group.dispatched == open_group.group.size:
            self._starting = None
        return episode

    def _next_of_eval(self) -> Episode | None:
        open_group = self._eval_queue[0]
        if not self._has_room_for(open_group):
            return None
        self.queued_evals -= 1
        episode = self._dispatch(open_group)
        if open_group.dispatched == open_group.group.size:
            self._eval_queue.popleft()
        return episode

    def _has_room_for(self, open_group: _OpenGroup) -> bool:
        """A group that belongs together takes all its permits at once; until there are enough, nobody else starts."""
        group = open_group.group
        return not group.together or open_group.dispatched > 0 or self.available_permits >= group.size

    def arrive(self, episode: Episode, rollouts: Iterable[Rollout]) -> list[CompleteGroup]:
        """Take back the permit. The groups that are complete now: they finish by counting."""
        del self._inflight[episode.id]
        self.inflight[episode.kind] -= 1
        open_group = self._groups[episode.group.id]
        open_group.arrived += 1
        if open_group.kind is Kind.TRAIN and not open_group.cancelled:
            self._missing -= 1
        open_group.rollouts[episode.index] = list(rollouts)
        if not open_group.complete:
            return []
        in_line = self._whole_groups and open_group.kind is Kind.TRAIN and not open_group.cancelled
        return self._first_in_line() if in_line else [self._close(open_group)]

    def _first_in_line(self) -> list[CompleteGroup]:
        """Those that wait for none opened before them."""
        closed = []
        while self._line and self._line[0].complete:
            closed.append(self._close(self._line.popleft()))
        return closed

    def cancel(self, unwanted: Callable[[Group], bool], reason: str) -> tuple[list[Episode], list[CompleteGroup]]:
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
            open_group.cancelled = reason
            self.open_episodes -= open_group.group.size
            self._missing -= open_group.group.size - open_group.arrived
            if self._starting is open_group:
                self._starting = None
        self._line = deque(open_group for open_group in self._line if not open_group.cancelled)
        finished = [self._close(open_group) for open_group in matching if open_group.complete] + self._first_in_line()
        ids = {open_group.group.id for open_group in matching}
        inflight = [episode for episode in self._inflight.values() if episode.group.id in ids]
        return inflight, finished

    def _dispatch(self, open_group: _OpenGroup) -> Episode:
        episode = Episode(self._next_id, open_group.kind, open_group.group, open_group.dispatched)
        self._next_id += 1
        open_group.dispatched += 1
        self._inflight[episode.id] = episode
        self.inflight[episode.kind] += 1
        return episode

    def _close(self, open_group: _OpenGroup) -> CompleteGroup:
        del self._groups[open_group.group.id]
        if open_group.kind is Kind.TRAIN and not open_group.cancelled:
            self.open_episodes -= open_group.group.size
        return CompleteGroup(open_group.kind, open_group.group, open_group.in_order, open_group.cancelled)
