"""Results of each environment of a run: draws, trained and dropped rollouts, rewards and evaluation scores.

Counts come from the journal, rewards and scores from the metrics, and error messages from the newest rollout files.
What a run does not have is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe.metrics import Curve, History
from headrace.transport.run_dir import RolloutKind, RunDir

END_STEPS = 5
"""Train steps averaged at either end of a curve."""
MAX_ERROR_FILES = 20
"""Newest rollout files that are searched for errors."""


class EnvironmentReport(msgspec.Struct):
    """An entry of `environments` in `headrace summary --json`. None: not available."""

    name: str
    algorithm: str | None = None
    """None: only evaluated."""
    draws: int = 0
    rollouts_trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Rollouts by reason."""
    error: str | None = None
    """Most common error of the newest steps."""
    reward_start: float | None = None
    reward_end: float | None = None
    eval_start: float | None = None
    """avg@k of the first evaluation, and below of the last."""
    eval_end: float | None = None
    eval_failed: float = 0.0
    """Share of episodes of the last evaluation that failed; its mean is over the others."""
    eval_error: str | None = None
    """Most common error of them."""
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    """Most common message of each error reason in the newest steps."""


def report_environments(run: RunDir, history: History) -> list[EnvironmentReport]:
    """Return a report per environment: trained ones first, in the order of the run file."""
    algorithms = _algorithms(run)
    drawn, dropped = _counts(run)
    errors = _errors(list(RolloutKind.TRAIN.files(run.rollouts).values())[-MAX_ERROR_FILES:])
    names = dict.fromkeys([*algorithms, *drawn, *sorted(history.eval_failures)])
    return [
        _with_rewards(
            EnvironmentReport(
                name,
                algorithms.get(name),
                drawn.get(name, 0),
                int(sum(float(record.get(f"rollouts/{name}", 0)) for record in history.steps.values())),
                dropped.get(name, {}),
                _first_error(errors.get(name, {})),
                errors=errors.get(name, {}),
            ),
            history,
            run,
        )
        for name in names
    ]


def _with_rewards(entry: EnvironmentReport, history: History, run: RunDir) -> EnvironmentReport:
    if curve := history.train_reward(entry.name):
        entry.reward_start, entry.reward_end = ends(curve)
    if scores := sorted(history.evals.get(entry.name, {}).items()):
        entry.eval_start, entry.eval_end = scores[0][1], scores[-1][1]
    if shares := history.eval_failures.get(entry.name):
        last = max(shares)
        entry.eval_failed = shares[last]
        file = RolloutKind.EVAL.path(run.rollouts, last)
        if entry.eval_failed and file.exists():
            entry.eval_error = _first_error(_errors([file]).get(entry.name, {}))
    return entry


def ends(curve: Curve) -> tuple[float, float]:
    """Return the means of a few steps at the beginning and at the end of a curve; no step counts twice."""
    count = max(1, min(END_STEPS, len(curve) // 2))
    first, last = ([value for _, value in points] for points in (curve[:count], curve[-count:]))
    return sum(first) / count, sum(last) / count


def _algorithms(run: RunDir) -> dict[str, str]:
    """Return the algorithm of each training environment, from the saved configuration."""
    from headrace.config.files import read_toml

    if not run.config.is_file():
        return {}
    section: dict[str, Any] = read_toml(run.config).get("orchestrator", {})
    default = section.get("algo", {}).get("type", "grpo")
    environments = section.get("train", {}).get("env", [])
    return {env["name"]: env.get("algo", {}).get("type", default) for env in environments}


def _counts(run: RunDir) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return draws, and dropped rollouts by reason, of each training environment."""
    from contextlib import closing

    from headrace.transport.journal import Journal

    if not run.journal.is_file():
        return {}, {}
    with closing(Journal(run.journal, read_only=True)) as journal:
        return journal.drawn_per_env(), journal.drops_per_env()


def _first_error(errors: dict[str, str]) -> str | None:
    return next((f"{reason}: {message}" for reason, message in errors.items()), None)


def _errors(files: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Return by environment the most common message of each error reason in these files, most common first."""
    import pyarrow.parquet as pq

    counts: dict[str, Counter[tuple[str, str]]] = {}
    for file in files:
        table = pq.read_table(file, columns=["env", "error_reason", "error"])
        for row in table.to_pylist():
            if row["error"]:  # cancelled episodes have no message
                counts.setdefault(row["env"], Counter())[row["error_reason"], row["error"]] += 1
    messages: dict[str, dict[str, str]] = {env: {} for env in counts}
    for env, errors in counts.items():
        for (reason, message), _ in sorted(errors.items(), key=lambda item: (-item[1], *item[0])):
            messages[env].setdefault(reason, message)
    return messages


def table(entries: Sequence[EnvironmentReport]) -> list[list[str]]:
    """Return the cells of a table: a row of titles, then a row per environment."""
    titles = ["environment", "algorithm", "draws", "trained", "reward", "held-out", "not trained on"]
    return [titles, *([cell or "-" for cell in _row(entry)] for entry in entries)]


REASON_TEXTS = {"max_steps": "left over at the end"}
"""Texts of reasons that read like errors and are none; docs/reference/metrics.md lists all reasons."""


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Return rollouts that were not trained on, by reason: `24 left over at the end, 3 timeout`."""
    return ", ".join(f"{count:,} {REASON_TEXTS.get(reason, reason)}" for reason, count in sorted(dropped.items()))


def _row(entry: EnvironmentReport) -> list[str]:
    trains = entry.algorithm is not None or entry.draws > 0
    return [
        entry.name,
        entry.algorithm or "",
        f"{entry.draws:,}" if trains else "",
        f"{entry.rollouts_trained:,}" if trains else "",
        _change(entry.reward_start, entry.reward_end),
        _change(entry.eval_start, entry.eval_end),
        dropped_text(entry.dropped),
    ]


def _change(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f"{start:.3f} → {end:.3f}"


def failures(entries: Sequence[EnvironmentReport]) -> list[str]:
    """Return a sentence for every environment with failed episodes, the worst first, and for each further reason."""
    failed = sorted((entry for entry in entries if entry.error), key=lambda entry: entry.rollouts_trained > 0)
    sentences = []
    for entry in failed:
        subject = "some episodes" if entry.rollouts_trained else "nothing was trained on, its episodes"
        sentences.append(f"{entry.name}: {subject} failed, most often with {entry.error}")
        errors = [f"{reason}: {message}" for reason, message in entry.errors.items()]
        sentences += [f"{entry.name}: others failed with {error}" for error in errors if error != entry.error]
    return sentences + [
        f"{entry.name}: {entry.eval_failed:.0%} of the episodes of its last evaluation failed, and are left out of "
        f"its mean: {entry.eval_error or 'the errors are in logs/orchestrator.log'}"
        for entry in entries
        if entry.eval_failed
    ]
