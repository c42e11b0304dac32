"""The life of one prompt in the journal: drawn, sampled, credited, then trained or dropped, and what a restart did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import fmean
from typing import Any

import msgspec

from headrace.tools.view.rollouts import step_list
from headrace.tools.view.runs import NotFound, ViewedRun
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RolloutKind

MAX_LISTED = 1000
NEAR_STEPS = 8
"""Files before and after a draw's step that are searched for its rollouts."""


@contextmanager
def open_journal(run: ViewedRun) -> Iterator[Journal]:
    path = run.dir.journal
    if not path.is_file():
        raise NotFound("it has no journal", key="run", value=run.name)
    with closing(Journal(path, read_only=True)) as journal:
        yield journal


def list_draws(run: ViewedRun, offset: int, limit: int, filters: dict[str, str]) -> dict[str, Any]:
    """Return the draws of a run, the newest first; `filters` may choose a `state`, an `env` and a `task_key`."""
    conditions = [f"s.{name} = ?" for name, value in filters.items() if value]
    chosen = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    arguments = [value for value in filters.values() if value]
    with open_journal(run) as journal:
        total = journal.rows(f"SELECT COUNT(*) FROM draw_states s{chosen}", arguments)[0][0]
        rows = journal.rows(
            "SELECT s.id, s.env, s.task_key, s.position, s.state, s.step, s.reason, d.rewards FROM draw_states s "
            f"JOIN draws d ON d.id = s.id{chosen} ORDER BY s.id DESC LIMIT ? OFFSET ?",
            [*arguments, min(limit, MAX_LISTED), offset],
        )
        counts = journal.count_states()
        environments = list(journal.drawn_per_env())
    names = ("id", "env", "task_key", "position", "state", "step", "reason")
    columns: dict[str, list[Any]] = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    columns["reward"] = [_mean_reward(row[-1]) for row in rows]
    return {"total": total, "states": counts, "environments": environments, "draws": columns}


def _rewards(text: str | None) -> list[tuple[str, float | None]]:
    return [] if text is None else msgspec.json.decode(text)


def _mean_reward(text: str | None) -> float | None:
    rewards = [reward for _, reward in _rewards(text) if reward is not None]
    return fmean(rewards) if rewards else None


def describe_draw(run: ViewedRun, draw: int) -> dict[str, Any]:
    """Return everything that is recorded about a draw, in the order in which it happened."""
    with open_journal(run) as journal:
        names = (
            "env", "task_key", "position", "observed", "drawn_in", "step", "reason", "rollouts", "tokens", "credit",
            "rewards", "epoch",
        )  # fmt: skip
        matches = journal.rows(f"SELECT {', '.join(names)} FROM draws WHERE id = ?", [draw])
        if not matches:
            raise NotFound("no such draw in the journal", key="draw", value=draw)
        row = dict(zip(names, matches[0], strict=True))
        row["state"] = journal.rows("SELECT state FROM draw_states WHERE id = ?", [draw])[0][0]
        drops = dict(journal.rows("SELECT reason, rollouts FROM drops WHERE draw = ?", [draw]))
        covered = journal.covered_step()
        same = journal.rows(
            "SELECT s.id, s.state, s.step, d.rewards FROM draw_states s JOIN draws d ON d.id = s.id "
            "WHERE s.env = ? AND s.task_key = ? AND s.id != ? ORDER BY s.id LIMIT 200",
            [row["env"], row["task_key"], draw],
        )
    saved = _saved(run, draw, row["step"])
    return {
        "id": draw,
        **{
            name: row[name] for name in ("env", "task_key", "position", "state", "step", "reason", "rollouts", "tokens")
        },
        "epoch": row["drawn_in"],
        "rewards": _rewards(row["rewards"]),
        "drops": drops,
        "events": list(_events(row, drops, saved, covered)),
        "saved": saved,
        "same_task": [
            {"id": id, "state": state, "step": step, "reward": _mean_reward(rewards)}
            for id, state, step, rewards in same
        ],
    }


def _events(
    row: dict[str, Any], drops: dict[str, int], saved: list[dict[str, Any]], covered: int
) -> Iterator[dict[str, Any]]:
    def event(what: str, detail: str, step: int | None = None) -> dict[str, Any]:
        return {"what": what, "step": step, "detail": detail}

    process = "" if row["drawn_in"] is None else f" by orchestrator process {row['drawn_in']}"
    yield event("drawn", f"prompt {row['position']} of {row['env']}{process}")
    if row["drawn_in"] is not None and row["epoch"] is not None and row["epoch"] > row["drawn_in"]:
        first = row["drawn_in"] + 1
        which = f"process {first}" if first == row["epoch"] else f"processes {first} to {row['epoch']}"
        yield event("restart", f"the orchestrator was started again ({which}): unfinished draws are sampled again")
    versions = [v for entry in saved for v in (entry["version_min"], entry["version_max"]) if v is not None]
    if versions:
        ends = (min(versions), max(versions))
        which = f"version {ends[0]}" if ends[0] == ends[1] else f"versions {ends[0]} to {ends[1]}"
        yield event("sampled", f"{row['rollouts'] or len(saved)} rollouts by {which}")
    if row["credit"] is not None:
        yield event("credited", f"number {row['credit']} in the order of credit", row["step"])
    for reason, count in drops.items():
        yield event("dropped", f"{count} rollouts: {reason}", row["step"])
    if row["state"] == "dropped":
        yield event("dropped", f"the whole draw: {row['reason']}", row["step"])
    if row["state"] in ("shipped", "trained"):
        yield event("shipped", f"in batch {row['step']}", row["step"])
    if row["state"] == "trained":
        yield event("trained", f"a checkpoint of step {covered} contains it", row["step"])


def _saved(run: ViewedRun, draw: int, step: int | None) -> list[dict[str, Any]]:
    """Return the rollouts of a draw in the files around its step."""
    if step is None:
        return []
    entries = []
    for other in RolloutKind.TRAIN.files(run.dir.rollouts):
        if abs(other - step) > NEAR_STEPS:
            continue
        listed = step_list(run, RolloutKind.TRAIN, other)
        columns = listed["rollouts"]
        names = ("reward", "version_min", "version_max", "drop_reason")
        for group in listed["groups"]:
            if group["draw"] == draw:
                entries += [
                    {"step": other, "row": row, **{name: columns[name][row] for name in names}} for row in group["rows"]
                ]
    return entries
