"""The numbers of one evaluation of an environment: `eval/ENV/...`. Pure functions.

Failed episodes are left out of every mean and counted as `errors`: a broken tool must not look like a worse model.
An episode with several agents comes to the mean over those that are trained, or over all where none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.observe.metrics import spread
from headrace.orchestrator.signals import EvalBatch, ScoredGroup
from headrace.rollout.pass_at_k import pass_rates
from headrace.rollout.types import Rollout

CORRECT = "correct"
"""The reward or metric that says whether an episode is right, where an environment has one."""

NOTICE_ABOVE = 0.05
"""The share of failed episodes above which the user is notified."""

Episode = list[Rollout]
"""The rollouts of one episode, none of which failed."""


def epoch_metrics(batch: EvalBatch) -> dict[str, float]:
    """Return the metrics of a finished evaluation; where every episode failed, `errors` alone."""
    episodes = sum(len({rollout.episode for rollout in _rollouts(group)}) for group in batch.groups)
    groups = [finished for group in batch.groups if (finished := _finished(group))]
    values = {"errors": (episodes - sum(map(len, groups))) / episodes}
    if groups:
        k = batch.group_size
        values[f"avg@{k}"] = _mean_over_tasks(groups, _reward)
        values |= _pass_metrics(groups, batch.solved, k)
        values |= _agent_metrics(groups, k)
        values |= _rollout_metrics([rollout for group in groups for episode in group for rollout in episode])
    return {f"eval/{batch.env}/{name}": value for name, value in values.items()}


def failure_notice(batch: EvalBatch) -> str | None:
    """Return a sentence if more than `NOTICE_ABOVE` of the episodes failed, with the commonest reason."""
    share = batch.metrics[f"eval/{batch.env}/errors"]
    if share <= NOTICE_ABOVE:
        return None
    errors = Counter(rollout.error for rollout in batch.rollouts if rollout.error is not None)
    (error, _), *_ = errors.most_common(1)
    left_out = "there is no score" if share == 1.0 else "the score is over the others"
    return (
        f"evaluation of {batch.env} at version {batch.version.step}: {share:.0%} of the episodes failed, so that "
        f"{left_out}; most often with {error.reason}: {error.detail}"
    )


def is_empty(rollout: Rollout) -> bool:
    """Return whether the last reply has neither text nor a tool call; thoughts alone are no answer."""
    replies = [message for message in rollout.messages if message.get("role") == "assistant"]
    if not replies:
        return rollout.completion_tokens == 0
    content = replies[-1].get("content")
    return not (content.strip() if isinstance(content, str) else content) and not replies[-1].get("tool_calls")


def _rollouts(group: ScoredGroup) -> list[Rollout]:
    return [*group.rollouts, *(rollout for rollout, _ in group.dropped)]


def _finished(group: ScoredGroup) -> list[Episode]:
    """Return the episodes of a task in which nothing failed."""
    by_episode: dict[int, Episode] = {}
    for rollout in _rollouts(group):
        by_episode.setdefault(rollout.episode, []).append(rollout)
    return [rollouts for rollouts in by_episode.values() if all(rollout.error is None for rollout in rollouts)]


def _value(episode: Episode, read: Callable[[Rollout], float]) -> float:
    return _mean([read(rollout) for rollout in [r for r in episode if r.trainable] or episode])


def _reward(rollout: Rollout) -> float:
    return rollout.reward


def _correctness(rollout: Rollout) -> float:
    return (rollout.rewards | rollout.metrics).get(CORRECT, rollout.reward)


def _mean_over_tasks(groups: Sequence[Sequence[Episode]], read: Callable[[Rollout], float]) -> float:
    """Return the mean over tasks of the mean over a task's episodes: a failure does not make its task count less."""
    return _mean([_mean([_value(episode, read) for episode in group]) for group in groups])


def _pass_metrics(groups: Sequence[Sequence[Episode]], solved: float | None, k: int) -> dict[str, float]:
    """Return pass@1, 2, 4, ... k, over the tasks with enough episodes; nothing where rewards are not binary."""
    read = _correctness if solved is None else _reward
    values = [[_value(episode, read) for episode in group] for group in groups]
    return {f"pass@{size}": _mean(rates) for size, rates in pass_rates(values, k, solved).items()}


def _agent_metrics(groups: Sequence[Sequence[Episode]], k: int) -> dict[str, float]:
    """Return the mean reward of each trained agent, where there are several: one may play often, or not at all."""
    rewards: dict[str, list[float]] = {}
    for rollout in (rollout for group in groups for episode in group for rollout in episode):
        if rollout.trainable:
            rewards.setdefault(rollout.agent, []).append(rollout.reward)
    return {f"{agent}/avg@{k}": _mean(rewards[agent]) for agent in sorted(rewards)} if len(rewards) > 1 else {}


def _rollout_metrics(finished: Sequence[Rollout]) -> dict[str, float]:
    values = {
        "truncated": _mean([rollout.truncated for rollout in finished]),
        "empty": _mean([is_empty(rollout) for rollout in finished]),
        **spread("decode_len", (rollout.completion_tokens for rollout in finished)),
        **spread("num_turns", (len(rollout.turns) for rollout in finished)),
    }
    oldest = [version for rollout in finished if (version := rollout.oldest_version) is not None]
    newest = [version for rollout in finished if (version := rollout.newest_version) is not None]
    if oldest and newest:  # what a script plays has no sampled token
        values |= {"version/min": min(oldest), "version/max": max(newest)}
    for name in sorted({name for rollout in finished for name in rollout.metrics}):
        values[f"metrics/{name}"] = _mean([r.metrics[name] for r in finished if name in r.metrics])
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
