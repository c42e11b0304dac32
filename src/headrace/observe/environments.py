"""What each environment of a run came to: its draws, what was trained on and what was lost, its rewards and scores.

Counts come from the journal, rewards and scores from the metrics, and why episodes failed from the newest files of
rollouts, which keep the messages. Whatever of these a run does not have is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe.history import Curve, History
from headrace.transport.run_dir import RolloutKind, RunDir

ENDS = 5
"""Train steps averaged at either end."""
NEWEST_FILES = 20
"""Files of rollouts that are looked through for errors."""


class EnvironmentReport(msgspec.Struct):
    """One entry of `environments` in `headrace summary --json`. None: there is no such thing."""

    name: str
    algorithm: str | None = None
    """None: it is only evaluated."""
    draws: int = 0
    rollouts_trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Rollouts, by reason."""
    error: str | None = None
    """The message that its failed episodes of the newest steps had most often."""
    reward_start: float | None = None
    reward_end: float | None = None
    eval_start: float | None = None
    """avg@k of the first evaluation and, below, of the last."""
    eval_end: float | None = None
    eval_failed: float = 0.0
    """The share of episodes of the last evaluation that failed, and are left out of its mean."""
    eval_error: str | None = None
    """The message that most of them had."""
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    """By reason, the message that those of the newest steps which failed for it had most often."""


def report(run: RunDir, history: History) -> list[EnvironmentReport]:
    """Those that were trained on first, as the run file has them."""
    algorithms = _algorithms(run)
    drawn, dropped = _counts(run)
    errors = _errors(list(RolloutKind.TRAIN.files(run.rollouts).values())[-NEWEST_FILES:])
    names = dict.fromkeys([*algorithms, *drawn, *sorted(history.eval_failures)])
    return [
        _with_rewards(
            EnvironmentReport(
                name,
                algorithms.get(name),
                drawn.get(name, 0),
                int(sum(float(record.get(f"rollouts/{name}", 0)) for record in history.steps.values())),
                dropped.get(name, {}),
                _commonest(errors.get(name, {})),
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
            entry.eval_error = _commonest(_errors([file]).get(entry.name, {}))
    return entry


def ends(curve: Curve) -> tuple[float, float]:
    """Where it begins and where it ends: the means of some steps at either end, none of which counts for both."""
    count = max(1, min(ENDS, len(curve) // 2))
    return _mean(curve[:count]), _mean(curve[-count:])


def _mean(points: Curve) -> float:
    return sum(value for _, value in points) / len(points)


def _algorithms(run: RunDir) -> dict[str, str]:
    """By training environment, from the saved configuration."""
    from headrace.config.files import read_toml

    if not run.config.is_file():
        return {}
    section: dict[str, Any] = read_toml(run.config).get("orchestrator", {})
    default = section.get("algo", {}).get("type", "grpo")
    environments = section.get("train", {}).get("env", [])
    return {env["name"]: env.get("algo", {}).get("type", default) for env in environments}


def _counts(run: RunDir) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Draws, and dropped rollouts by reason, of each training environment."""
    from contextlib import closing

    from headrace.transport.journal import Journal

    if not run.journal.is_file():
        return {}, {}
    with closing(Journal(run.journal, read_only=True)) as journal:
        return journal.drawn_per_env(), journal.drops_per_env()


def _commonest(errors: dict[str, str]) -> str | None:
    return next((f"{reason}: {words}" for reason, words in errors.items()), None)


def _errors(files: Sequence[Path]) -> dict[str, dict[str, str]]:
    """By environment, the commonest message of each reason for failures in these files, the commonest first."""
    import pyarrow.parquet as pq

    found: dict[str, Counter[tuple[str, str]]] = {}
    for file in files:
        table = pq.read_table(file, columns=["env", "error_reason", "error"])
        for row in table.to_pylist():
            if row["error"]:  # what was cancelled has no story to tell
                found.setdefault(row["env"], Counter())[row["error_reason"], row["error"]] += 1
    return {env: _by_reason(counts) for env, counts in found.items()}


def _by_reason(counts: Counter[tuple[str, str]]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for reason, message in sorted(counts, key=lambda failure: (-counts[failure], *failure)):
        messages.setdefault(reason, message)
    return messages


def table(entries: Sequence[EnvironmentReport]) -> list[list[str]]:
    """For people: a row of titles, then one per environment."""
    titles = ["environment", "algorithm", "draws", "trained", "reward", "held-out", "not trained on"]
    return [titles, *([cell or "-" for cell in _row(entry)] for entry in entries)]


IN_WORDS = {"max_steps": "left over at the end"}
"""A reason that every run has, and whose name reads like an error; docs/metrics.md lists the others."""


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Return rollouts that were not trained on, by reason: `24 left over at the end, 3 timeout`."""
    return ", ".join(f"{count:,} {IN_WORDS.get(reason, reason)}" for reason, count in sorted(dropped.items()))


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
    """A sentence for every environment of which episodes failed, the worst first, and one for each further reason."""
    failed = sorted((entry for entry in entries if entry.error), key=lambda entry: entry.rollouts_trained > 0)
    return [
        *(sentence for entry in failed for sentence in _failures_of(entry)),
        *(
            f"{entry.name}: {entry.eval_failed:.0%} of the episodes of its last evaluation failed, and are left out of "
            f"its mean: {entry.eval_error or 'logs/orchestrator.log says with what'}"
            for entry in entries
            if entry.eval_failed
        ),
    ]


def _failures_of(entry: EnvironmentReport) -> list[str]:
    others = [f"{reason}: {words}" for reason, words in entry.errors.items() if f"{reason}: {words}" != entry.error]
    return [
        f"{entry.name}: {_EXTENT[entry.rollouts_trained > 0]} failed, most often with {entry.error}",
        *(f"{entry.name}: others failed with {story}" for story in others),
    ]


_EXTENT = {True: "some episodes", False: "nothing was trained on, its episodes"}
