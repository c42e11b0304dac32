"""Metrics of one training batch, per environment and over all, and of one evaluation (`eval/ENV/...`). Pure functions.

Failed evaluation episodes are left out of every mean and counted as `errors`: a broken tool must not look like a worse
model. The value of an episode with several agents is the mean over the trained agents, or over all if none is trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from headrace.observe.histograms import count
from headrace.observe.metrics import spread
from headrace.orchestrator.signals import EvalBatch, ScoredGroup, TrainBatch
from headrace.rollout.types import Rollout
from headrace.rollout.version import staleness

QUANTILES = {
    "advantages/p5": 0.05,
    "advantages/p25": 0.25,
    "advantages/p50": 0.5,
    "advantages/p75": 0.75,
    "advantages/p95": 0.95,
}
CORRECT = "correct"
"""Name of the reward or metric that is 1 for a correct episode, if an environment has one."""
MAX_FAILED_SHARE = 0.05
"""Share of failed evaluation episodes above which the user is notified."""

Episode = list[Rollout]
"""The rollouts of one episode, none of which failed."""


def step_metrics(step: int, batch: TrainBatch) -> dict[str, float]:
    """Return the metrics of a batch, over the rollouts of all its groups."""
    rollouts = batch.rollouts
    values: dict[str, float] = {}
    by_env: dict[str, list[Rollout]] = {"all": rollouts}
    for rollout in rollouts:
        by_env.setdefault(rollout.env, []).append(rollout)
    for env, selected in by_env.items():
        values |= _environment_metrics(env, selected)
    values |= {f"rollouts/{env}": count for env, count in Counter(rollout.env for rollout in batch.kept).items()}
    # Groups in which every reward is 1, or none is above 0, have no signal by comparison.
    rewards = [[rollout.reward for rollout in group.rollouts] for group in batch.groups]
    values["solve_all"] = sum(all(r >= 1.0 for r in group) for group in rewards) / len(rewards)
    values["solve_none"] = sum(all(r <= 0.0 for r in group) for group in rewards) / len(rewards)
    values |= batch.tallies
    values["effective_batch_size"] = len(batch.kept) / len(rollouts)
    values["time/scoring"] = batch.seconds
    ages = [staleness(step, version) for r in batch.kept if (version := r.oldest_version) is not None]
    values |= spread("off_policy/staleness", ages)
    if means := [mean for r in rollouts if (mean := r.mean_advantage) is not None]:
        quantiles = np.quantile(means, list(QUANTILES.values())).tolist()
        values |= {**spread("advantages", means), **dict(zip(QUANTILES, quantiles, strict=True))}
    for reason in {rollout.stop_reason for rollout in rollouts}:
        values[f"stop_condition/{reason}"] = sum(r.stop_reason == reason for r in rollouts) / len(rollouts)
    return values


def step_histograms(batch: TrainBatch) -> dict[str, str]:
    """Return the histograms of a batch as they are recorded, over the rollouts of all its groups."""
    advantages = [mean for r in batch.rollouts if (mean := r.mean_advantage) is not None]
    lengths = count("decode_len", (rollout.completion_tokens for rollout in batch.rollouts))
    return {
        "histogram/decode_len": lengths.encode(),
        **({"histogram/advantages": count("advantages", advantages).encode()} if advantages else {}),
    }


def _environment_metrics(env: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    values = {
        **spread(f"reward/{env}", [r.reward for r in rollouts]),
        **spread(f"seq_len/{env}", [sum(len(s) for s in r.samples) for r in rollouts]),
        **spread(f"prefill_len/{env}", [sum(s.prompt_length for s in r.samples) for r in rollouts]),
        **spread(f"decode_len/{env}", [r.completion_tokens for r in rollouts]),
        **spread(f"num_turns/{env}", [len(r.turns) for r in rollouts]),
        **spread(f"samples_per_rollout/{env}", [len(r.samples) for r in rollouts]),
    }
    agents = {rollout.agent for rollout in rollouts}
    for agent in agents if len(agents) > 1 and env != "all" else ():
        values[f"reward/{env}/{agent}"] = _mean([r.reward for r in rollouts if r.agent == agent])
    for name in {name for rollout in rollouts for name in rollout.metrics}:
        values[f"metrics/{env}/{name}"] = _mean([r.metrics[name] for r in rollouts if name in r.metrics])
    return values


def eval_metrics(batch: EvalBatch) -> dict[str, float]:
    """Return the metrics of a finished evaluation; only `errors` if every episode failed."""
    episodes = sum(len({rollout.episode for rollout in group.all_rollouts}) for group in batch.groups)
    groups = [finished for group in batch.groups if (finished := _finished_episodes(group))]
    values = {"errors": (episodes - sum(map(len, groups))) / episodes}
    if groups:
        k = batch.group_size
        rewards = [[_episode_mean(episode, lambda rollout: rollout.reward) for episode in group] for group in groups]
        values[f"avg@{k}"] = _mean([_mean(group) for group in rewards])  # by task: a failure keeps its task's weight
        # pass@1, 2, 4, ... k over the tasks with enough episodes; none if rewards are not binary.
        correct = rewards
        if batch.solved is None:
            correct = [
                [_episode_mean(e, lambda r: (r.rewards | r.metrics).get(CORRECT, r.reward)) for e in g] for g in groups
            ]
        values |= {f"pass@{size}": _mean(rates) for size, rates in pass_rates(correct, k, batch.solved).items()}
        rollouts = [rollout for group in groups for episode in group for rollout in episode]
        by_agent: dict[str, list[float]] = {}  # an agent may play several times in an episode, or not at all
        for rollout in rollouts:
            if rollout.trainable:
                by_agent.setdefault(rollout.agent, []).append(rollout.reward)
        if len(by_agent) > 1:
            values |= {f"{agent}/avg@{k}": _mean(by_agent[agent]) for agent in sorted(by_agent)}
        values |= _rollout_metrics(rollouts)
    return {f"eval/{batch.env}/{name}": value for name, value in values.items()}


def failure_notice(batch: EvalBatch) -> str | None:
    """Return a sentence with the most common error if more than `MAX_FAILED_SHARE` of the episodes failed."""
    share = batch.metrics[f"eval/{batch.env}/errors"]
    if share <= MAX_FAILED_SHARE:
        return None
    errors = Counter(rollout.error for rollout in batch.rollouts if rollout.error is not None)
    (error, _), *_ = errors.most_common(1)
    consequence = "there is no score" if share == 1.0 else "the score is over the others"
    return (
        f"evaluation of {batch.env} at version {batch.version.step}: {share:.0%} of the episodes failed, so "
        f"{consequence}; most common error: {error.reason}: {error.detail}"
    )


def is_empty(rollout: Rollout) -> bool:
    """Return whether the last reply has neither text nor a tool call; reasoning alone does not count."""
    replies = [message for message in rollout.messages if message.get("role") == "assistant"]
    if not replies:
        return rollout.completion_tokens == 0
    content = replies[-1].get("content")
    return not (content.strip() if isinstance(content, str) else content) and not replies[-1].get("tool_calls")


def _finished_episodes(group: ScoredGroup) -> list[Episode]:
    """Return the episodes of a task in which no rollout failed."""
    by_episode: dict[int, Episode] = {}
    for rollout in group.all_rollouts:
        by_episode.setdefault(rollout.episode, []).append(rollout)
    return [rollouts for rollouts in by_episode.values() if all(rollout.error is None for rollout in rollouts)]


def _episode_mean(episode: Episode, read: Callable[[Rollout], float]) -> float:
    """Return the mean of `read` over the trained agents, or over all if none is trained."""
    return _mean([read(rollout) for rollout in [r for r in episode if r.trainable] or episode])


def _rollout_metrics(finished: Sequence[Rollout]) -> dict[str, float]:
    values = {
        "truncated": _mean([rollout.truncated for rollout in finished]),
        "empty": _mean([is_empty(rollout) for rollout in finished]),
        **spread("decode_len", (rollout.completion_tokens for rollout in finished)),
        **spread("num_turns", (len(rollout.turns) for rollout in finished)),
    }
    oldest = [version for rollout in finished if (version := rollout.oldest_version) is not None]
    newest = [version for rollout in finished if (version := rollout.newest_version) is not None]
    if oldest and newest:  # scripted replies have no sampled token
        values |= {"version/min": min(oldest), "version/max": max(newest)}
    for name in sorted({name for rollout in finished for name in rollout.metrics}):
        values[f"metrics/{name}"] = _mean([r.metrics[name] for r in finished if name in r.metrics])
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), unbiased, for n samples of which c are correct."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} is not defined for {samples} samples with {correct} correct")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_rates(tasks: Sequence[Sequence[float]], samples: int, solved: float | None) -> dict[int, list[float]]:
    """Return pass@k per task for each k: powers of two, and `samples` itself; tasks with fewer than k values left out.

    `tasks` are the values of the episodes that did not fail, per task. An episode is correct if its value is at least
    `solved`. None: if it is 1; the result is empty if a value is neither 0 nor 1.
    """
    if solved is None and not all(value in (0.0, 1.0) for values in tasks for value in values):
        return {}
    threshold = 1.0 if solved is None else solved
    counts = [(len(values), sum(value >= threshold for value in values)) for values in tasks]
    ks = sorted({*(2**power for power in range(samples.bit_length())), samples})
    rates = {k: [pass_at_k(count, correct, k) for count, correct in counts if count >= k] for k in ks}
    return {k: per_task for k, per_task in rates.items() if per_task}
