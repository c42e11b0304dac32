"""What one training step looked like from the orchestrator: numbers per environment and over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from headrace.observe.metrics import spread
from headrace.orchestrator.signals import TrainBatch
from headrace.rollout.types import Rollout
from headrace.rollout.version import staleness

QUANTILES = {
    "advantages/p5": 0.05,
    "advantages/p25": 0.25,
    "advantages/p50": 0.5,
    "advantages/p75": 0.75,
    "advantages/p95": 0.95,
}


def step_metrics(step: int, batch: TrainBatch) -> dict[str, float]:
    """Metrics of a batch, over every rollout that holds a slot in it."""
    rollouts = batch.rollouts
    values: dict[str, float] = {}
    by_env: dict[str, list[Rollout]] = {"all": rollouts}
    for rollout in rollouts:
        by_env.setdefault(rollout.env, []).append(rollout)
    for env, chosen in by_env.items():
        values |= _of_environment(env, chosen)
    values |= {f"rollouts/{env}": count for env, count in Counter(rollout.env for rollout in batch.kept).items()}
    values |= _of_groups(batch) | batch.tallies
    values["effective_batch_size"] = len(batch.kept) / len(rollouts)
    values["time/scoring"] = batch.seconds
    ages = [staleness(step, version) for r in batch.kept if (version := r.oldest_version) is not None]
    values |= spread("off_policy/staleness", ages)
    values |= _of_advantages([mean for r in rollouts if (mean := r.mean_advantage) is not None])
    for reason in {rollout.stop_reason for rollout in rollouts}:
        values[f"stop_condition/{reason}"] = sum(r.stop_reason == reason for r in rollouts) / len(rollouts)
    return values


def _of_advantages(means: Sequence[float]) -> dict[str, float]:
    """Return mean, ends and quantiles; monitors get the whole histogram from the step's file."""
    if not means:
        return {}
    quantiles = np.quantile(means, list(QUANTILES.values())).tolist()
    return {**spread("advantages", means), **dict(zip(QUANTILES, quantiles, strict=True))}


def _of_environment(env: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
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
        rewards = [rollout.reward for rollout in rollouts if rollout.agent == agent]
        values[f"reward/{env}/{agent}"] = sum(rewards) / len(rewards)
    for name in {name for rollout in rollouts for name in rollout.metrics}:
        known = [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
        values[f"metrics/{env}/{name}"] = sum(known) / len(known)
    return values


def _of_groups(batch: TrainBatch) -> dict[str, float]:
    """Groups in which every reward is 1, or none is above 0: they teach nothing by comparison."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in batch.groups]
    return {
        "solve_all": sum(all(r >= 1.0 for r in group) for group in rewards) / len(rewards),
        "solve_none": sum(all(r <= 0.0 for r in group) for group in rewards) / len(rewards),
    }
