"""Credit over again: what an algorithm makes of rollouts that another one, or the same, has credited before.

Its hooks run in their order on copies that lack all credit: each rollout, each group, the rollouts of a step that are
left, and then the routing of their tokens. Filters that look at a rollout and not at its credit decide as they did;
only whether a rollout has any advantage is asked anew.

Left out on purpose: episodes. A run under the other algorithm would have sampled others from the second step on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.algorithms.base import Algorithm, RolloutView, Survivor
from headrace.errors import Failure
from headrace.orchestrator.filters.zero_advantage import has_no_advantage
from headrace.rollout.routing import route_actions
from headrace.rollout.types import TRUNCATED, Rollout, Sample, Task


class RescoreFailed(Failure):
    """An algorithm raised on saved rollouts. The message names both."""


class Member(msgspec.Struct):
    """A rollout that was credited with its group, as it was saved."""

    rollout: Rollout
    task: Task
    trained: bool
    """Whether it was shipped."""
    excluded: bool = False
    """Whether a filter took it that does not ask for credit: it trains under no algorithm."""


class Rescored(msgspec.Struct):
    """A rollout twice: as it was credited then, and as it would be now."""

    then: Rollout
    now: Rollout
    trained: bool
    trains: bool
    drop: str = ""
    """Why the algorithm itself would not train on it, for people."""


async def rescore(
    groups: Sequence[Sequence[Member]], algorithm: Algorithm, *, drop_without_advantage: bool
) -> list[Rescored]:
    """Credit the groups of one step and one environment, in their order.

    `drop_without_advantage`: the run does not ship a rollout without any advantage.
    """
    found: list[Rescored] = []
    survivors: list[tuple[Rescored, Survivor]] = []
    for group in groups:
        members = [(member, RolloutView(uncredited(member.rollout), member.task)) for member in group]
        await _credit([view for _, view in members], algorithm)
        for member, view in members:
            dropped = member.excluded or (drop_without_advantage and has_no_advantage(view.rollout))
            entry = Rescored(member.rollout, view.rollout, member.trained, not dropped)
            found.append(entry)
            if entry.trains:
                survivors.append((entry, Survivor(view.rollout, view.task)))
    await _finish(survivors, algorithm)
    return found


def uncredited(rollout: Rollout) -> Rollout:
    """A copy as it was before any credit; tokens are shared, and nobody changes those."""
    return msgspec.structs.replace(rollout, samples=[_bare(sample) for sample in rollout.samples])


def _bare(sample: Sample) -> Sample:
    made_by_merging = {name: values for name, values in sample.streams.items() if name == TRUNCATED}
    return msgspec.structs.replace(sample, streams=made_by_merging)


async def _credit(views: Sequence[RolloutView], algorithm: Algorithm) -> None:
    try:
        for view in views:
            await algorithm.score_rollout(view)
        await algorithm.score_group(views)
    except Failure:
        raise
    except Exception as error:
        first = views[0].rollout
        raise _failed(algorithm, f"group {first.group_id} (task {first.task_key} of {first.env})", error) from error


async def _finish(survivors: Sequence[tuple[Rescored, Survivor]], algorithm: Algorithm) -> None:
    """Score what would ship, and send its tokens to the loss that the algorithm declares."""
    if not survivors:
        return
    try:
        await algorithm.score_batch([survivor for _, survivor in survivors])
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
