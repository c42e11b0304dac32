"""Scores per held-out example: from a run's own evaluations, or from what `headrace eval` wrote.

A run has `rollouts/eval-step-N.parquet`. `headrace eval` leaves a folder per model with `completions.jsonl`; its
`settings.json` names the model's directory, and thus the run. Of two lines about one episode the later one counts.
Episodes that failed are left out of both, as in the evaluations themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir

Scores = dict[str, float]
"""By the key of an example: the share of its episodes that are right, or their mean reward."""
COLUMNS = ("env", "task_key", "group_id", "episode", "trainable", "reward", "error_reason")


class _Settings(msgspec.Struct):
    model: str


class _Episode(msgspec.Struct):
    key: str
    sample: int
    correct: bool = False
    error: str = ""


def read_scores(evaluation: Path, runs: Sequence[Path]) -> list[Scores]:
    """Those of each run's final model, in the order of the runs; nothing for one that was not evaluated."""
    if not evaluation.is_dir():
        raise BadInput(
            "no such directory",
            key="--evaluation",
            value=evaluation,
            fix="`headrace eval RUN... --output DIR` makes one.",
        )
    folders = {_model_of(file): file.parent for file in sorted(evaluation.rglob("settings.json"))}
    found = [folders.get((RunDir(run).final_model).resolve()) for run in runs]
    return [{} if folder is None else _read(folder / "completions.jsonl") for folder in found]


def read_own_scores(run: Path, step: int, environments: Iterable[str]) -> Scores:
    """Return the mean rewards of the examples that a run evaluated at `step`, weighted so that their mean is the mean
    over `environments`; nothing unless it evaluated all of these at that step.
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


def _model_of(settings: Path) -> Path:
    try:
        return Path(msgspec.json.decode(settings.read_bytes(), type=_Settings).model)
    except msgspec.DecodeError as error:
        raise BadInput(f"not written by headrace eval: {error}", file=settings) from error


def _read(path: Path) -> Scores:
    episodes: dict[str, dict[int, bool]] = {}
    decoder = msgspec.json.Decoder(_Episode)
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            episode = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BadInput(f"not an episode: {error}", file=path, line=number) from error
        if not episode.error:  # what failed says nothing about the model
            episodes.setdefault(episode.key, {})[episode.sample] = episode.correct
    return {key: sum(samples.values()) / len(samples) for key, samples in episodes.items()}
