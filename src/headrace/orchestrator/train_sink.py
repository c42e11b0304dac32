"""From arrivals to batches: rollouts become samples, groups get credit, batches get filtered.

Three levels. `process_rollout` runs as each arrives; `process_group` when a group's last episode is in;
`process_batch` on what is about to ship. A rollout that a pre-batch filter rejects takes no slot; one that a
post-batch filter rejects keeps its slot and is not shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Group, Rollout


class Filter(msgspec.Struct):
    """A named test on one rollout. Without `enforce` it only counts."""

    name: str
    matches: Callable[[Rollout], bool]
    enforce: bool


class ScoredGroup(msgspec.Struct):
    """A complete group after credit and pre-batch filters. Empty `rollouts`: the whole draw is lost to `reason`."""

    group: Group
    rollouts: list[Rollout]
    dropped: list[tuple[Rollout, str]]
    reason: str = ""
    """Why no rollout is left, if none is."""

    @property
    def oldest_version(self) -> int:
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=self.group.opened_version)


class ReadyBatch(msgspec.Struct):
    """Groups whose rollouts fill a batch, with what survived the post-batch filters."""

    groups: list[ScoredGroup]
    kept: list[Rollout]
    dropped: list[tuple[Rollout, str]]

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout that holds a slot."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    def kept_groups(self) -> list[ScoredGroup]:
        """Groups of which something ships."""
        kept = {rollout.group_id for rollout in self.kept}
        return [group for group in self.groups if group.group.id in kept]

    def lost_groups(self) -> list[ScoredGroup]:
        """Groups of which nothing ships."""
        kept = {rollout.group_id for rollout in self.kept}
        return [group for group in self.groups if group.group.id not in kept]

    def dropped_reason(self, group: ScoredGroup) -> str:
        """Why a group of which nothing was kept was not."""
        return _commonest(reason for rollout, reason in self.dropped if rollout.group_id == group.group.id)


class TrainSink:
    """Collects training rollouts, by environment credited by its algorithm."""

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        pre_filters: Sequence[Filter],
        post_filters: Sequence[Filter],
        seq_len: int,
    ) -> None:
        self._algorithms = algorithms
        self._pre_filters = pre_filters
        self._post_filters = post_filters
        self._seq_len = seq_len
        self._arrived: dict[str, list[Rollout]] = {}
        self._ready: list[ScoredGroup] = []
        self._filter_hits: dict[str, float] = {}

    @property
    def ready_rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self._ready)

    @property
    def ready_tokens(self) -> int:
        return sum(len(sample) for group in self._ready for r in group.rollouts for sample in r.samples)

    async def process_rollout(self, rollout: Rollout) -> None:
        """On arrival: merge its turns into samples, give rollout-local credit."""
        if rollout.error is None:
            rollout.samples = [s.truncated(self._seq_len) for s in merge_turns(rollout.turns)]
            rollout.stop_reason = rollout.stop_reason or rollout.turns[-1].finish_reason
            if rollout.trainable:
                await self._algorithms[rollout.env].score_rollout(RolloutView(rollout))

    def add(self, rollout: Rollout) -> None:
        """Keep a processed rollout until its group is complete."""
        self._arrived.setdefault(rollout.group_id, []).append(rollout)

    async def process_group(self, group: Group) -> ScoredGroup:
        """The group is complete: drop errors, credit the survivors among themselves, apply pre-batch filters."""
        rollouts = self._arrived.pop(group.id, [])
        dropped = [(rollout, rollout.error.reason) for rollout in rollouts if rollout.error is not None]
        alive = [rollout for rollout in rollouts if rollout.error is None and rollout.trainable]
        if alive:
            await self._algorithms[group.task.env].score_group([RolloutView(rollout) for rollout in alive])
        kept, filtered = self._apply(self._pre_filters, alive, "pre_filters")
        dropped += filtered
        scored = ScoredGroup(group, kept, dropped)
        if not kept:
            scored.reason = _commonest(reason for _, reason in dropped)
        else:
            self._ready.append(scored)
        return scored

    def drop_ready(self, unwanted: Callable[[ScoredGroup], bool]) -> list[ScoredGroup]:
        """Take finished groups out again, for example because they have aged past use."""
        gone = [group for group in self._ready if unwanted(group)]
        self._ready = [group for group in self._ready if not unwanted(group)]
        return gone

    def take_batch(self, full: Callable[[int, int], bool]) -> ReadyBatch | None:
        """The oldest groups that make a batch, `full(rollouts, tokens)`, after post-batch filters; None if too few."""
        rollouts = tokens = 0
        for count, group in enumerate(self._ready, 1):
            rollouts += len(group.rollouts)
            tokens += sum(len(sample) for rollout in group.rollouts for sample in rollout.samples)
            if full(rollouts, tokens):
                groups, self._ready = self._ready[:count], self._ready[count:]
                slots = [rollout for taken in groups for rollout in taken.rollouts]
                kept, dropped = self._apply(self._post_filters, slots, "filters")
                return ReadyBatch(groups, kept, dropped)
        return None

    def take_filter_hits(self) -> dict[str, float]:
        """Matches of each filter since the last call, enforced or not, as `pre_filters/NAME` and `filters/NAME`."""
        hits, self._filter_hits = self._filter_hits, {}
        return hits

    async def process_batch(self, rollouts: Sequence[Rollout]) -> None:
        """Let each environment's algorithm see its survivors once more, now that calls to other models pay."""
        by_env: dict[str, list[RolloutView]] = {}
        for rollout in rollouts:
            by_env.setdefault(rollout.env, []).append(RolloutView(rollout))
        for env, views in by_env.items():
            await self._algorithms[env].score_batch(views)

    def _apply(
        self, filters: Sequence[Filter], rollouts: Iterable[Rollout], slot: str
    ) -> tuple[list[Rollout], list[tuple[Rollout, str]]]:
        kept: list[Rollout] = []
        dropped: list[tuple[Rollout, str]] = []
        for rollout in rollouts:
            match = next((entry for entry in filters if entry.matches(rollout)), None)
            if match is not None:
                key = f"{slot}/{match.name}"
                self._filter_hits[key] = self._filter_hits.get(key, 0) + 1
            if match is not None and match.enforce:
                dropped.append((rollout, match.name))
            else:
                kept.append(rollout)
        return kept, dropped


def _commonest(reasons: Iterable[str]) -> str:
    counted = list(reasons)
    return max(set(counted), key=lambda reason: (counted.count(reason), reason)) if counted else "not_trainable"
