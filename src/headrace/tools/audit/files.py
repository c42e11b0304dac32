"""Files of a run against its journal: digests, the rollouts of every draw, and the samples of every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import Failure
from headrace.rollout.types import ROUTES, TOKEN_ARRAYS, Sample
from headrace.tools.audit.report import shortened
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import NOT_TRAINABLE, FileRecord, Outcome
from headrace.transport.rollout_files import RolloutFiles, dropped_files, read_columns
from headrace.transport.run_dir import RolloutKind, RunDir

_COLUMNS = ("draw_id", "agent", "reward", "credited", "drop_reason", "completion_tokens")

Rows = Sequence[dict[str, Any]]


def find_damaged_files(run: RunDir, journal: Journal) -> dict[Path, str]:
    """Return a sentence for each recorded file that differs from its record, or is missing.

    Missing batches are left out: the trainer deletes those that a checkpoint covers.
    """
    damaged = {}
    for name, record in journal.files().items():
        path = run.root / name
        if path.is_file():
            if FileRecord.of(run.root, path) != record:
                damaged[path] = f"{path} is damaged: its content does not match the digest in the journal"
        elif path.parent != run.batches.directory and name in journal.files():  # else the run has deleted it meanwhile
            damaged[path] = f"{path} is missing"
    return damaged


def find_rollout_violations(run: RunDir, journal: Journal, damaged: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sentence for each draw whose saved rollouts are not those that the journal has."""
    last, outcomes = journal.last_step(), journal.outcomes()
    recorded = {run.root / name for name in journal.files()}
    old = {draw for draw, (drawn_in, _) in journal.epochs().items() if drawn_in is None}
    saved = {step: [path] for step, path in RolloutKind.TRAIN.files(run.rollouts).items() if step <= last}
    for step in range(min(saved, default=last + 1), last + 1):  # the run deletes only the oldest
        if step not in saved:
            yield f"{RolloutKind.TRAIN.path(run.rollouts, step)} is missing"
    saved[last + 1] = [path for path in dropped_files(run.rollouts, last + 1) if path in recorded]
    for step, paths in saved.items():
        if damaged.keys() & set(paths):
            continue
        try:
            rows = [row for path in paths for row in read_columns(path, _COLUMNS)]
        except Failure as error:
            yield str(error)
            continue
        whole = recorded.issuperset(paths)
        left_out = old if whole else set()  # older versions lost some of the dropped rollouts
        rows = [row for row in rows if row["draw_id"] not in left_out]
        here = {outcome.draw: outcome for outcome in outcomes.get(step, []) if outcome.draw not in left_out}
        differing = _compare_rows(rows, here) if whole else _compare_kept_rows(rows, here)
        yield from shortened(f"rollouts of step {step}: {problem}" for problem in differing)


def _by_draw(rows: Rows) -> dict[int, list[dict[str, Any]]]:
    draws: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        draws.setdefault(row["draw_id"], []).append(row)
    return draws


def _compare_rows(rows: Rows, outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Compare every rollout of a step with the outcomes of its draws."""
    saved = _by_draw(rows)
    for draw in sorted(saved.keys() | {draw for draw, outcome in outcomes.items() if outcome.rollouts}):
        if draw not in outcomes:
            yield f"draw {draw} has rollouts here, but the journal has no outcome of it in this step"
            continue
        outcome, own = outcomes[draw], saved.get(draw, [])
        drops = Counter(row["drop_reason"] for row in own if row["drop_reason"] not in (None, NOT_TRAINABLE))
        pairs = {
            "rollouts": (len(own), outcome.rollouts),
            "sampled tokens": (sum(row["completion_tokens"] for row in own), outcome.tokens),
            "dropped rollouts": (dict(drops), outcome.drops),
            "rewards": (_rewards(own), sorted(outcome.rewards)),
        }
        for name, (here, recorded) in pairs.items():
            if here != recorded:
                yield f"the {name} of draw {draw} are {here}, but {recorded} in the journal"


def _compare_kept_rows(rows: Rows, outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Compare the shipped rollouts of a step; older versions saved dropped ones in the files of other steps."""
    saved = _by_draw([row for row in rows if row["drop_reason"] is None])
    shipped = {draw for draw, outcome in outcomes.items() if not outcome.reason}
    for draw in sorted(saved.keys() ^ shipped):
        yield f"draw {draw} " + ("is not shipped in the journal" if draw in saved else "has no shipped rollout here")
    for draw in sorted(saved.keys() & shipped):
        if Counter(_rewards(saved[draw])) - Counter(outcomes[draw].rewards):
            recorded = sorted(outcomes[draw].rewards)
            yield f"the rewards of draw {draw} are {_rewards(saved[draw])}, but {recorded} in the journal"


def _rewards(rows: Rows) -> list[tuple[str, float]]:
    """Return agent and reward of the credited rollouts."""
    return sorted((row["agent"], row["reward"]) for row in rows if row["credited"])


def find_batch_violations(run: RunDir, damaged: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sentence for each batch on disk whose samples are not those of the step's rollouts."""
    files = RolloutFiles(run.rollouts)
    for step in sorted(set(run.batches.steps()) & set(files.steps())):
        path, rollouts = run.batches.path(step), RolloutKind.TRAIN.path(run.rollouts, step)
        if damaged.keys() & {path, rollouts}:
            continue
        try:
            shipped = [entry.sample for entry in run.batches.read(step).samples]
            kept = [saved.rollout for saved in files.read(step) if not saved.drop_reason]
        except FileNotFoundError:  # a checkpoint covers it by now
            continue
        except Failure as error:
            yield str(error)
            continue
        saved = [sample for rollout in kept for sample in rollout.samples]
        if len(shipped) != len(saved):
            yield f"{path} has {len(shipped)} samples, but {rollouts} has {len(saved)}"
            continue
        differing = ((number, _difference(*pair)) for number, pair in enumerate(zip(shipped, saved, strict=True)))
        yield from shortened(
            f"sample {number} of {path} has other {name} than in {rollouts}" for number, name in differing if name
        )


def _difference(one: Sample, other: Sample) -> str:
    """Return the name of a stream in which two samples differ; empty if they are equal. Routes are in batches only."""
    names = one.streams.keys() - {ROUTES}
    if names != other.streams.keys():
        return "streams"
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in TOKEN_ARRAYS}
    pairs |= {name: (one.streams[name], other.streams[name]) for name in names}
    return next((name for name, arrays in pairs.items() if not np.array_equal(*arrays, equal_nan=True)), "")
