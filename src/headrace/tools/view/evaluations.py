"""Evaluations of a run: scores with intervals by version, pass@k, and what changed per task between two versions."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.orchestrator.batch_metrics import pass_rates
from headrace.tools.evaluate.results import estimate
from headrace.tools.view.rollouts import file_of, read_rows, step_list
from headrace.tools.view.runs import ViewedRun, cached
from headrace.transport.run_dir import RolloutKind

COLUMNS = ["env", "task_key", "group_id", "episode", "trainable", "reward", "error_reason"]
SOLVED = 0.5
"""A task is solved if the mean reward of its episodes is above this, for flips."""
Tasks = dict[tuple[str, str], dict[str, list[Any]]]
"""By environment and task: the rewards of the episodes that did not fail, and the rows of all."""


def read_tasks(path: Path) -> Tasks:
    """Return the episodes of an evaluation by task; the reward of an episode is the mean over its trained agents."""

    def read() -> Tasks:
        episodes: dict[tuple[str, str, str, int], list[tuple[int, dict[str, Any]]]] = {}
        for number, row in enumerate(read_rows(path, COLUMNS)):
            key = (row["env"], row["task_key"], row["group_id"], row["episode"])
            episodes.setdefault(key, []).append((number, row))
        tasks: Tasks = {}
        for (env, task, _, _), members in episodes.items():
            entry = tasks.setdefault((env, task), {"rewards": [], "rows": [], "failed": []})
            entry["rows"] += [number for number, _ in members]
            rewards = [row["reward"] for _, row in members if row["trainable"]] or [row["reward"] for _, row in members]
            if any(row["error_reason"] is not None for _, row in members) or None in rewards:
                entry["failed"].append(members[0][0])
            else:
                entry["rewards"].append(fmean(rewards))
        return tasks

    tasks: Tasks = cached(path, "tasks", read)
    return tasks


def list_evaluations(run: ViewedRun) -> dict[str, Any]:
    """Return the scores of each environment by version; intervals and pass@k where the episodes are on disk."""
    names = [name for name in run.metrics.names() if name.startswith("eval/") and "/avg@" in name]
    scores = run.metrics.points(names)
    files = RolloutKind.EVAL.files(run.dir.rollouts)
    environments = []
    for name in names:
        env = name.removeprefix("eval/").rpartition("/avg@")[0]
        steps, values = scores[name]
        entry: dict[str, Any] = {
            "name": env, "version": steps.tolist(), "value": values.tolist(), "low": [], "high": [], "failed": [],
            "pass": {"version": [], "k": [], "value": []},
        }  # fmt: skip
        for version in entry["version"]:
            described = _describe(files[version], env) if version in files else None
            for key in ("low", "high", "failed"):
                entry[key].append(None if described is None else described[key])
            if described and described["pass"]:
                entry["pass"]["version"].append(version)
                entry["pass"]["k"] = list(described["pass"])
                entry["pass"]["value"].append(list(described["pass"].values()))
        environments.append(entry)
    return {"environments": environments, "saved": list(files)}


def _describe(path: Path, env: str) -> dict[str, Any] | None:
    """Return the interval of an evaluation's mean over tasks, the share of failed episodes, and pass@k."""

    def describe() -> dict[str, Any] | None:
        tasks = [entry for (name, _), entry in read_tasks(path).items() if name == env]
        scored = [entry["rewards"] for entry in tasks if entry["rewards"]]
        if not scored:
            return None
        mean = estimate([fmean(rewards) for rewards in scored])
        failed = sum(len(entry["failed"]) for entry in tasks)
        rates = pass_rates(scored, max(map(len, scored)), None)
        return {
            "low": mean.low,
            "high": mean.high,
            "failed": failed / (failed + sum(map(len, scored))),
            "pass": {k: fmean(values) for k, values in rates.items()},
        }

    described: dict[str, Any] | None = cached(path, f"evaluation of {env}", describe)
    return described


def compare_versions(run: ViewedRun, before: int, after: int) -> dict[str, Any]:
    """Return per task the scores of two versions, and which tasks were gained and lost."""
    tables = [read_tasks(file_of(run, RolloutKind.EVAL, version)) for version in (before, after)]
    previews = step_list(run, RolloutKind.EVAL, after)["rollouts"]["preview"]
    columns: dict[str, list[Any]] = {
        name: [] for name in (
            "env", "task_key", "before", "after", "samples_before", "samples_after", "flip", "rows_before",
            "rows_after", "preview",
        )
    }  # fmt: skip
    empty: dict[str, list[Any]] = {"rewards": [], "rows": [], "failed": []}
    for env, task in sorted({*tables[0], *tables[1]}):
        old, new = (table.get((env, task), empty) for table in tables)
        scores = [fmean(entry["rewards"]) if entry["rewards"] else None for entry in (old, new)]
        row = (
            env, task, *scores, len(old["rewards"]), len(new["rewards"]), _flip(*scores), old["rows"], new["rows"],
            previews[new["rows"][0]] if new["rows"] else "",
        )  # fmt: skip
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return {"before": before, "after": after, "tasks": columns}


def _flip(before: float | None, after: float | None) -> str:
    if before is None or after is None or (before > SOLVED) == (after > SOLVED):
        return ""
    return "gained" if after > SOLVED else "lost"
