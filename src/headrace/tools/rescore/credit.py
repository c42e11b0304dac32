"""The credit of saved rollouts under another algorithm.

The algorithm's hooks run in their order on copies without credit: each rollout, each group, the remaining rollouts of a
step, and then the routing of their tokens. Filters that read only the rollout decide as they did; only the filter of
rollouts without any advantage decides again.

Left out on purpose: episodes. A run with the other algorithm would have sampled others from the second step on.

The rollouts of a group are mostly in one file. If a pre-batch filter dropped some of them, these are in the file of an
earlier step: they are kept until the rest is read, and the group belongs to the step of its last rollout. Each rollout
has the number of rollouts credited with it, so an incomplete group is recognized: its file was deleted, or the run was
killed before the rest was trained on and the draw was sampled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView, Survivor
from headrace.algorithms.length_penalties import LengthPenalty
from headrace.errors import Failure
from headrace.orchestrator.filters import has_no_advantage
from headrace.rollout.credit import Cohort, center
from headrace.rollout.routing import route_actions
from headrace.rollout.types import LATENTS, TRUNCATED, Rollout, Task
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.rollout_tables import SavedRollout


class RescoreFailed(Failure):
    """An algorithm raised an error on saved rollouts. The message names both."""


class Member(msgspec.Struct):
    """A saved rollout that was credited with its group."""

    rollout: Rollout
    task: Task
    trained: bool
    """Whether it was shipped to the trainer."""
    excluded: bool = False
    """Whether a filter dropped it independently of its credit: it trains under no algorithm."""


class Rescored(msgspec.Struct):
    """A rollout with its saved credit (then) and its new credit (now)."""

    then: Rollout
    now: Rollout
    trained: bool
    trains: bool
    drop: str = ""
    """Why the algorithm itself would not train on it."""


async def rescore(
    groups: Sequence[Sequence[Member]],
    algorithm: Algorithm,
    *,
    drop_without_advantage: bool,
    states: Mapping[int, Any] = MappingProxyType({}),
    penalty: LengthPenalty | None = None,
) -> list[Rescored]:
    """Credit the groups of one step and one environment, in their order.

    `drop_without_advantage`: the run does not ship a rollout without any advantage. `states` has, by draw, the state of
    the algorithm before a group; without one, the algorithm keeps its state. A `penalty` is added to the credit.
    """
    rescored: list[Rescored] = []
    survivors: list[tuple[Rescored, Survivor]] = []
    for group in groups:
        views = [RolloutView(uncredited(member.rollout), member.task) for member in group]
        await _credit(views, algorithm, states, penalty)
        for member, view in zip(group, views, strict=True):
            dropped = member.excluded or (drop_without_advantage and has_no_advantage(view.rollout))
            entry = Rescored(member.rollout, view.rollout, member.trained, not dropped)
            rescored.append(entry)
            if entry.trains:
                survivors.append((entry, Survivor(view.rollout, view.task)))
    await _ship(survivors, algorithm)
    return rescored


def uncredited(rollout: Rollout) -> Rollout:
    """Return a copy without credit; tokens are shared."""
    samples = [
        msgspec.structs.replace(sample, streams={n: v for n, v in sample.streams.items() if n in (TRUNCATED, LATENTS)})
        for sample in rollout.samples
    ]
    return msgspec.structs.replace(rollout, samples=samples)


async def _credit(
    views: Sequence[RolloutView], algorithm: Algorithm, states: Mapping[int, Any], penalty: LengthPenalty | None
) -> None:
    first = views[0].rollout
    try:
        for view in views:
            await algorithm.credit_rollout(view)
        if first.draw_id in states:
            algorithm.load_state(states[first.draw_id])
        await algorithm.credit_group(views)
        if penalty is not None:
            _add_penalty(views, penalty, algorithm)
    except Failure:
        raise
    except Exception as error:
        raise _failed(algorithm, f"group {first.group_id} (task {first.task_key} of {first.env})", error) from error


def _add_penalty(group: Sequence[RolloutView], penalty: LengthPenalty, algorithm: Algorithm) -> None:
    """Add the centered term of a length penalty to the advantages of all tokens after the prompt."""
    term = penalty(Cohort.of([view.rollout for view in group]), algorithm.tally)
    for view, bonus in zip(group, center(term), strict=True):
        for sample in view.samples:
            if "advantages" not in sample.streams:
                raise ValueError("it gives no advantages that a length penalty could be added to")
            credit = sample.streams["advantages"].astype(np.float64)
            credit[sample.prompt_length :] += bonus
            sample.set_stream("advantages", credit)


async def _ship(survivors: Sequence[tuple[Rescored, Survivor]], algorithm: Algorithm) -> None:
    """Call `score_batch`, and route the tokens to the loss of the algorithm."""
    if not survivors:
        return
    try:
        await algorithm.credit_batch([survivor for _, survivor in survivors])
    except Failure:
        raise
    except Exception as error:
        raise _failed(algorithm, f"a batch of {survivors[0][1].rollout.env}", error) from error
    for entry, survivor in survivors:
        if survivor.drop_reason:
            entry.trains, entry.drop = False, f"{survivor.drop_reason}: {survivor.drop_detail}"
            continue
        for sample in survivor.samples:
            route_actions(sample, algorithm.action_loss_type)


def _failed(algorithm: Algorithm, what: str, error: Exception) -> RescoreFailed:
    return RescoreFailed(f"{type(algorithm).__name__} failed on {what}: {type(error).__name__}: {error}")


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
    """The groups in the chosen steps of a run that were credited together. `left_out` counts rollouts by reason.

    Left out are failed and untrainable rollouts, which no algorithm received; groups cancelled because of their age or
    the end of the run; groups that are not completely in the chosen steps.
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
