"""Which of the rollouts that a run saved were credited together: whole groups, step by step.

A group mostly lies in one file. Where a filter of the level before the batch took some of it, these are in the file of
an earlier step than the rest: they are kept until the rest is there, and the group counts for the step of its last one.
Each rollout says how many were credited with it, so that a group of which a part is nowhere is known for it: its file
is deleted by now, or the run was killed before the rest was trained on, and the draw was sampled again.

Left out, and counted: rollouts that failed or that are not to be trained on, which no algorithm has seen; groups given
up because they were too old or the run was over; groups of which a part is not in the chosen steps. Files of an older
version do not say how many there were: there a group is what was saved of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from headrace.orchestrator.journal_buffer import MAX_SAVED_DROPS
from headrace.transport.rollout_files import RolloutFiles, SavedRollout

GIVEN_UP = frozenset({"off_policy", "on_policy", "max_steps"})
"""Reasons for which the pipeline drops a whole group, whatever its credit."""

_COLUMNS = ("group_id", "credited", "env", "drop_reason", "error_reason", "trainable")


class _Known(msgspec.Struct):
    """What the files say of one group."""

    steps: set[int] = msgspec.field(default_factory=set)
    members: int = 0
    credited: int | None = None
    """How many there must be; None: an older file, which does not say."""
    given_up: str = ""


class CreditedGroups:
    """The groups in the chosen steps of a run, of all environments or of one. `left_out` counts rollouts by reason."""

    def __init__(
        self,
        files: RolloutFiles,
        steps: Sequence[int],
        env: str | None = None,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._files = files
        self._chosen = frozenset(steps)
        self._env = env
        self._known: dict[str, _Known] = {}
        self._waiting: dict[str, list[SavedRollout]] = {}
        saved = files.steps()
        for number, step in enumerate(saved):
            tell(number, len(saved))
            self._look_through(step)
        for known in self._known.values():
            reason = self._reason_against(known)
            if reason and known.steps & self._chosen:
                self.left_out[reason] += known.members

    def of_step(self, step: int) -> list[list[SavedRollout]]:
        """The groups that were complete with this step, as they were drawn; what was dropped is last in its episode.

        Steps must be asked for in order.
        """
        complete: list[list[SavedRollout]] = []
        for saved in self._files.read(step):
            rollout = saved.rollout
            known = self._known.get(rollout.group_id)
            if known is None or rollout.error is not None or not rollout.trainable or self._reason_against(known):
                continue
            group = self._waiting.setdefault(rollout.group_id, [])
            group.append(saved)
            if len(group) == known.members:
                complete.append(sorted(self._waiting.pop(rollout.group_id), key=lambda saved: saved.rollout.episode))
        return sorted(complete, key=lambda group: group[0].rollout.draw_id)

    def _look_through(self, step: int) -> None:
        rows = self._files.columns(step, _COLUMNS)
        dropped = [row for row in rows if row["drop_reason"] is not None]
        for row in rows:
            if self._env not in (None, row["env"]):
                continue
            if row["error_reason"] is not None or not row["trainable"]:
                if step in self._chosen:
                    self.left_out[row["error_reason"] or "not_trainable"] += 1
                continue
            known = self._known.setdefault(row["group_id"], _Known())
            known.steps.add(step)
            known.members += 1
            known.credited = row.get("credited")
            if row["drop_reason"] in GIVEN_UP:
                known.given_up = row["drop_reason"]
        if (
            len(dropped) == MAX_SAVED_DROPS
            and (cut := self._known.get(dropped[0]["group_id"]))
            and cut.credited is None
        ):
            cut.given_up = "incomplete"  # the file has no room for more, and this one may have begun before it

    def _reason_against(self, known: _Known) -> str:
        all_there = known.credited in (None, known.members) and known.steps <= self._chosen
        return known.given_up or ("" if all_there else "incomplete")
