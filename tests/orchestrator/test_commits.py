"""A kill before or after any write leaves a journal and rollout files that agree, and loses no draw."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace.orchestrator.audit import find_violations
from headrace.orchestrator.commits import Commits
from headrace.rollout.batch import Batch
from headrace.rollout.types import Rollout
from headrace.tools.audit import find_damaged_files, find_rollout_violations
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import NOT_TRAINABLE, Draw, Entries, Outcome, Totals
from headrace.transport.run_dir import RunDir

STEPS = 2
KEEP_ROLLOUTS = 1


class Killed(BaseException):
    """Stands for the end of the process: what has been written stays, and nothing else happens."""


class World:
    """A run whose process ends at the `fatal`-th write, and is started again."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(root)
        self.writes = 0
        self.fatal = 0
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        for owner, name in (
            (os, "replace"),
            (Path, "unlink"),
            (pq.ParquetWriter, "write_table"),
            (Journal, "commit"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._pass_point()
            result = write(*arguments, **options)
            self._pass_point()
            return result

        return counted

    def _pass_point(self) -> None:
        self.writes += 1
        if self.writes == self.fatal:
            raise Killed

    def play(self) -> None:
        """Do what a process does: recover, then every commit whose outcomes are not recorded."""
        journal = Journal(self.run.journal)
        journal._db.execute("PRAGMA synchronous=OFF")  # what is written outlives a kill without it
        journal.start()
        self.run.batches.recover(journal.last_step())
        commits = Commits(self.run, journal, KEEP_ROLLOUTS)
        commits.delete_uncommitted()
        for step, (first, second, third) in steps():
            done = {outcome.draw for outcomes in journal.outcomes().values() for outcome in outcomes}
            for draw in (first, second):
                if draw not in done:
                    commits.commit(self.entries(journal, dropped(draw, "gated")))
            if third not in done:
                kept, entries = [rollout(third), rollout(third)], self.entries(journal, partly_dropped(third))
                commits.ship(commits.prepare(Batch(step, 0, [], [third]), kept, entries.dropped), entries)
        last = 3 * STEPS
        if last not in {draw.id for draw, state, *_ in journal.draws() if state == "dropped"}:
            commits.commit(self.entries(journal, dropped(last, "max_steps")))

    def entries(self, journal: Journal, done: tuple[Outcome, list[tuple[Rollout, str]]]) -> Entries:
        outcome, lost = done
        drawn = [Draw(outcome.draw, "env", f"key{outcome.draw}", outcome.draw)]
        totals = journal.totals()
        totals.add(outcome)
        return Entries(drawn, [outcome], totals, dropped=lost)

    def disagreements(self) -> list[str]:
        journal = Journal(self.run.journal, read_only=True)
        damaged = find_damaged_files(self.run, journal)
        rollouts = find_rollout_violations(self.run, journal, damaged)
        return [*damaged.values(), *find_violations(self.run, journal), *rollouts]


def steps() -> Iterator[tuple[int, range]]:
    return ((step, range(3 * step - 3, 3 * step)) for step in range(1, STEPS + 1))


def rollout(draw: int) -> Rollout:
    return Rollout(env="env", draw_id=draw, reward=float(draw), credited=2)


def dropped(draw: int, reason: str) -> tuple[Outcome, list[tuple[Rollout, str]]]:
    rewards = [("policy", float(draw))] * 2
    rollouts = [(rollout(draw), reason) for _ in range(2)]
    return Outcome(draw, reason, 2, 0, {reason: 2}, credit=draw, rewards=rewards), rollouts


def partly_dropped(draw: int) -> tuple[Outcome, list[tuple[Rollout, str]]]:
    """Two rollouts are shipped, one failed, and one is of an agent that is not trained."""
    lost = [(Rollout(env="env", draw_id=draw), reason) for reason in ("timeout", NOT_TRAINABLE)]
    return Outcome(draw, "", 4, 0, {"timeout": 1}, credit=draw, rewards=[("policy", float(draw))] * 2), lost


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_journal_and_rollout_files_agree_after_a_kill_at_any_write(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for fatal in itertools.count(1, stride):
        with monkeypatch.context() as patch:
            world = World(tmp_path / str(fatal), patch)
            world.fatal = fatal
            try:
                world.play()
            except Killed:
                assert world.disagreements() == [], f"after the kill at write {fatal}"
                world.play()
            else:
                break
            assert world.disagreements() == [], f"at the end, after the kill at write {fatal}"
            assert Journal(world.run.journal).totals() == Totals(8 * STEPS + 2, 0, drops())
            assert world.run.batches.steps() == list(range(1, STEPS + 1))
            names = sorted(path.name for path in world.run.rollouts.iterdir())
            assert names == ["dropped-00000003-000001.parquet", "step-00000002.parquet"]
    assert fatal > 50


def drops() -> dict[str, int]:
    return {"gated": 4 * STEPS, "timeout": STEPS, "max_steps": 2}
