"""Inputs of a comparison: the settings of runs with their differences, and scores per held-out example.

Scores come from a run's own evaluations (`rollouts/eval-step-N.parquet`) or from `headrace eval`, which writes a folder
per model with `completions.jsonl` and a `settings.json` that names the model's directory. Of two lines about one
episode, the later one counts. Failed episodes are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from headrace.config.monitors import MONITORS
from headrace.errors import BadInput
from headrace.runfile.reading import leaves
from headrace.runfile.run import SHARED
from headrace.tools.evaluate.completions import read_episodes
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir

Settings = dict[str, Any]
"""A configuration by dotted key, as in overrides."""

NOT_COMPARED = ("output_dir", *MONITORS, "inference.port", "trainer.weights.port")
"""Keys and sections that do not affect training."""
SEEDS = ("seed", *SHARED["seed"])
COPIES = {copy: source for source, copies in SHARED.items() for copy in copies}
"""By key: the shared key that it is filled from."""
ENVIRONMENT_SEED = re.compile(r"orchestrator\.(train|eval)\.env\.\d+\.args\.seed")
"""The seed of an environment, which is filled from the run's seed."""


def settings_of(tree: Mapping[str, Any]) -> Settings:
    """Return a saved configuration by dotted key, without the keys that are not compared."""
    ignored = (*NOT_COMPARED, *SHARED["output_dir"])
    inside = tuple(f"{section}." for section in ignored)
    return {key: value for key, value in leaves(tree).items() if key not in ignored and not key.startswith(inside)}


def differences(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Return the keys in which any two runs differ, with the value of every run; None if it is not set.

    A key that every run has filled from another, as `trainer.seed` from `seed`, is left out.
    """

    def source(key: str) -> str:
        if ENVIRONMENT_SEED.fullmatch(key):
            return "seed"
        copied = next((copy for copy in COPIES if f"{key}.".startswith(f"{copy}.")), None)
        return "" if copied is None else COPIES[copied] + key.removeprefix(copied)

    keys = dict.fromkeys(key for run in runs for key in run)
    values_by_key = {key: [run.get(key) for run in runs] for key in keys}
    return {
        key: values
        for key, values in values_by_key.items()
        if any(value != values[0] for value in values) and values_by_key.get(source(key)) != values
    }


def group_by_variant(runs: Sequence[Settings]) -> list[list[int]]:
    """Return the indices of runs grouped by their settings without seeds, in the order of first occurrence."""
    groups: list[tuple[Settings, list[int]]] = []
    for index, run in enumerate(runs):
        settings = _without_seed(run)
        group = next((indices for other, indices in groups if other == settings), None)
        if group is None:
            groups.append((settings, [index]))
        else:
            group.append(index)
    return [indices for _, indices in groups]


def _without_seed(run: Settings) -> Settings:
    seed = run.get("seed")
    return {
        key: value
        for key, value in run.items()
        if key not in SEEDS and not (ENVIRONMENT_SEED.fullmatch(key) and value == seed)
    }


Scores = dict[str, float]
"""By example key: the share of correct episodes, or their mean reward."""
COLUMNS = ("env", "task_key", "group_id", "episode", "trainable", "reward", "error_reason")


class _Settings(msgspec.Struct):
    model: str


def read_scores(evaluation: Path, runs: Sequence[Path]) -> list[Scores]:
    """Return the scores of each run's final model that `headrace eval` wrote; empty if it was not evaluated."""
    if not evaluation.is_dir():
        fix = "Create it with `headrace eval RUN... --output DIR`."
        raise BadInput("no such directory", key="--evaluation", value=evaluation, fix=fix)
    folders: dict[Path, Path] = {}
    for file in sorted(evaluation.rglob("settings.json")):
        try:
            folders[Path(msgspec.json.decode(file.read_bytes(), type=_Settings).model)] = file.parent
        except msgspec.DecodeError as error:
            raise BadInput(f"not written by headrace eval: {error}", file=file) from error
    scores = []
    for folder in [folders.get((RunDir(run).final_model).resolve()) for run in runs]:
        correct: dict[str, list[bool]] = {}
        for episode in read_episodes(folder / "completions.jsonl")[0].values() if folder else ():
            if not episode.error:
                correct.setdefault(episode.key, []).append(episode.correct)
        scores.append({key: fmean(samples) for key, samples in correct.items()})
    return scores


def read_own_scores(run: Path, step: int, environments: Iterable[str]) -> Scores:
    """Return mean rewards by example of a run's evaluation at `step`; empty unless it has all `environments`.

    Rewards are weighted so that their mean is the mean over environments.
    """
    rows = RolloutFiles(RunDir(run).rollouts, RolloutKind.EVAL).columns(step, COLUMNS)
    episodes: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        episodes.setdefault((row["group_id"], row["episode"]), []).append(row)
    rewards: dict[str, dict[str, list[float]]] = {name: {} for name in environments}
    for episode in episodes.values():
        env, task = episode[0]["env"], episode[0]["task_key"]
        if env in rewards and all(row["error_reason"] is None for row in episode):
            trained = [row["reward"] for row in episode if row["trainable"]] or [row["reward"] for row in episode]
            rewards[env].setdefault(task, []).append(fmean(trained))
    if not all(rewards.values()):
        return {}
    equal_share = sum(map(len, rewards.values())) / len(rewards)
    return {
        f"{env}/{task}": fmean(values) * equal_share / len(tasks)
        for env, tasks in rewards.items()
        for task, values in tasks.items()
    }
