"""The groups of a run's saved rollouts that were credited together, step by step.

The rollouts of a group are mostly in one file. If a pre-batch filter dropped some of them, these are in the file of an
earlier step: they are kept until the rest is read, and the group belongs to the step of its last rollout. Each rollout
has the number of rollouts credited with it, so an incomplete group is recognized: its file was deleted, or the run was
killed before the rest was trained on and the draw was sampled again.

Left out, and counted: failed and untrainable rollouts, which no algorithm received; groups cancelled because of their
age or the end of the run; groups that are not completely in the chosen steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.rollout_tables import SavedRollout

CANCELLED = frozenset({"off_policy", "on_policy", "max_steps"})
"""Drop reasons of whole groups, independent of their credit."""

_COLUMNS = ("group_id", "credited", "env", "drop_reason", "error_reason", "trainable")


class _SavedGroup(msgspec.Struct):
    """What the files have of one group."""

    steps: set[int] = msgspec.field(default_factory=set)
    members: int = 0
    credited: int = 0
    """Number of rollouts that were credited together."""
    left_out_reason: str = ""


class CreditedGroups:
    """The groups in the chosen steps of a run, of all environments or of one. `left_out` counts rollouts by reason.

    `report_progress` is called with the number of files read and of all files.
    """

    def __init__(
        self,
        files: RolloutFiles,
        steps: Sequence[int],
        env: str | None = None,
        report_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._files = files
        self._chosen = frozenset(steps)
        self._env = env
        self._groups: dict[str, _SavedGroup] = {}
        self._incomplete: dict[str, list[SavedRollout]] = {}
        saved = files.steps()
        for number, step in enumerate(saved):
            report_progress(number, len(saved))
            self._scan(step)
        for group in self._groups.values():
            reason = self._reason_to_leave_out(group)
            if reason and group.steps & self._chosen:
                self.left_out[reason] += group.members

    def of_step(self, step: int) -> list[list[SavedRollout]]:
        """Return the groups that are complete with this step, by draw; rollouts by episode, dropped ones last.

        Steps must be requested in order.
        """
        complete: list[list[SavedRollout]] = []
        for saved in self._files.read(step):
            rollout = saved.rollout
            group = self._groups.get(rollout.group_id)
            if group is None or rollout.error is not None or not rollout.trainable or self._reason_to_leave_out(group):
                continue
            members = self._incomplete.setdefault(rollout.group_id, [])
            members.append(saved)
            if len(members) == group.members:
                complete.append(sorted(self._incomplete.pop(rollout.group_id), key=lambda saved: saved.rollout.episode))
        return sorted(complete, key=lambda members: members[0].rollout.draw_id)

    def _scan(self, step: int) -> None:
        for row in self._files.columns(step, _COLUMNS):
            if self._env not in (None, row["env"]):
                continue
            if row["error_reason"] is not None or not row["trainable"]:
                if step in self._chosen:
                    self.left_out[row["error_reason"] or "not_trainable"] += 1
                continue
            group = self._groups.setdefault(row["group_id"], _SavedGroup())
            group.steps.add(step)
            group.members += 1
            group.credited = row["credited"]
            if row["drop_reason"] in CANCELLED:
                group.left_out_reason = row["drop_reason"]

    def _reason_to_leave_out(self, group: _SavedGroup) -> str:
        is_complete = group.credited == group.members and group.steps <= self._chosen
        return group.left_out_reason or ("" if is_complete else "incomplete")
