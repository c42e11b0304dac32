"""Run directories as a run leaves them, with the numbers that a test gives: a configuration and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.config.files import dump
from headrace.observe.metrics import MetricsLog
from headrace.rollout.types import Rollout, RolloutError
from headrace.runfile.reading import put, validate
from headrace.runfile.run import RunConfig
from headrace.tools.evaluate.completions import Completion, CompletionsFile
from headrace.transport.files import write_atomically
from headrace.transport.rollout_files import write_eval_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir


def write_run(
    root: Path,
    rewards: Sequence[float],
    held_out: Mapping[int, float] | None = None,
    *,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A run with one reward per step, and avg@1 by version; `keys` are of its configuration, dotted."""
    tree: dict[str, Any] = {
        "output_dir": str(root),
        "max_steps": len(rewards) or 5,
        "seq_len": 64,
        "model": {"name": "a-model"},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    }
    for key, value in (keys or {}).items():
        put(tree, key.split("."), value)
    config, _ = validate(RunConfig, tree, "test")
    run = RunDir(root)
    write_atomically(run.config, dump(config).encode())
    orchestrator, trainer = MetricsLog(run.metrics, "orchestrator"), MetricsLog(run.metrics, "trainer")
    for step, reward in enumerate(rewards, 1):
        progress = {
            "rollouts": 8 * step,
            "seconds": 2.0 * step,
            "tokens_sampled": 100 * step,
            "tokens_trained": 90 * step,
        }
        values = {"reward/all/mean": reward, **{f"progress/{name}": value for name, value in progress.items()}}
        orchestrator.log(step, values)
        trainer.log(step, {"loss": 1.0 / step})
    for version, score in (held_out or {}).items():
        orchestrator.log(version, {"eval/reverse-text/avg@1": score})
    return root


def write_episodes(evaluation: Path, name: str, run: Path, correct: Mapping[str, Sequence[bool]]) -> None:
    """What `headrace eval` leaves about a run's model: by example, which of its samples are right."""
    folder = evaluation / name
    write_atomically(folder / "settings.json", json.dumps({"model": str((run / "model").resolve())}).encode())
    with closing(CompletionsFile(folder / "completions.jsonl")) as file:
        for key, samples in correct.items():
            for sample, right in enumerate(samples):
                file.append(Completion(key, sample, correct=right, reward=float(right)))


def write_evaluation(run: Path, step: int, env: str, rewards: Mapping[str, Sequence[float | None]]) -> None:
    """What an evaluation within a run leaves: by task, the reward of each episode; None: it failed."""
    path = RolloutKind.EVAL.path(RunDir(run).rollouts, step)
    failed = RolloutError("timeout")
    rollouts = [
        Rollout(env, task, f"{env}-{task}", episode=episode, error=failed)
        if reward is None
        else Rollout(env, task, f"{env}-{task}", episode=episode, reward=reward)
        for task, episodes in rewards.items()
        for episode, reward in enumerate(episodes)
    ]
    write_eval_rollouts(path, step, rollouts)
