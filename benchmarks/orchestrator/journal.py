"""What checksums, epochs and checks of the journal cost: `python benchmarks/orchestrator/journal.py [DRAWS]`.

The same commits with and without the triggers that stamp every row, alternately; then marking all draws as trained as
one row and as a rewrite of every draw, and the checks at resume. Last an audit of a run of that many draws, with
rollout files of 8 rollouts a draw and 100 tokens a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrace.algorithms.base import RolloutView
from headrace.algorithms.grpo import Grpo
from headrace.orchestrator.commits import Commits
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.routing import route_actions
from headrace.rollout.types import Rollout, Sample, Task, Turn
from headrace.tools.audit import audit_run
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Clock, Draw, Entries, Outcome, Totals
from headrace.transport.journal_schema import check_wal, transaction
from headrace.transport.run_dir import RunDir

GROUP_SIZE = 8
DRAWS_PER_COMMIT = 16
TOKENS = 100
CONFIG = """
output_dir = "{root}"
max_steps = {steps}
seq_len = 256
[model]
name = "/no/such/model"
[orchestrator]
batch_size = 128
group_size = 8
keep_rollouts = 1000000
[[orchestrator.train.env]]
id = "reverse-text"
"""


def entries(step: int) -> Entries:
    first = DRAWS_PER_COMMIT * (step - 1)
    drawn = [Draw(i, "reverse-text", f"key{i:028d}", i) for i in range(first, first + DRAWS_PER_COMMIT)]
    outcomes = [Outcome(d.id, "", GROUP_SIZE, 800, {"zero_advantage": 1}, d.id, rewards(d.id)) for d in drawn]
    totals = Totals(step * GROUP_SIZE * DRAWS_PER_COMMIT, step * 800 * DRAWS_PER_COMMIT, {})
    totals.drops = {"zero_advantage": step * DRAWS_PER_COMMIT}
    return Entries(drawn, outcomes, totals, clock=Clock(float(step)))


def rewards(draw: int) -> list[tuple[str, float]]:
    return [("policy", ((draw + n) % 7) / 7) for n in range(GROUP_SIZE)]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the time that passed, and that of the CPU, which other work on the machine does not change."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def remove_stamps(journal: Journal) -> None:
    db = journal._db
    for (name,) in db.execute("SELECT name FROM temp.sqlite_schema WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER temp.{name}")


def measure_commits(directory: Path, steps: int) -> None:
    stamped, plain = Journal(directory / "stamped.sqlite"), Journal(directory / "plain.sqlite")
    remove_stamps(plain)
    times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for step in range(1, steps + 1):
        times["without"].append(seconds(lambda step=step: plain.commit(entries(step), step)))
        times["with"].append(seconds(lambda step=step: stamped.commit(entries(step), step)))
    for name, values in times.items():
        row(f"a commit of {DRAWS_PER_COMMIT} draws, {name} checksums (median)", medians_of(values))
    size = DRAWS_PER_COMMIT * steps
    row(f"mark {size:,} draws as trained: one row", seconds(lambda: stamped.mark_trained(steps)))

    def rewrite() -> None:
        with transaction(plain._db):
            plain._db.execute("UPDATE draws SET reason = 'trained' WHERE state = 'shipped'")

    row(f"mark {size:,} draws as trained: every draw", seconds(rewrite))
    row("check of the write-ahead log", seconds(lambda: check_wal(stamped.path)))
    for check in ("quick_check", "integrity_check"):
        row(f"PRAGMA {check}", seconds(lambda check=check: stamped._db.execute(f"PRAGMA {check}").fetchall()))
    row("integrity check and checksums of all rows", seconds(stamped.find_damage))
    stamped.close()
    for name in ("plain", "stamped"):
        with contextlib.closing(sqlite3.connect(directory / f"{name}.sqlite")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        print(f"{name}: {(directory / f'{name}.sqlite').stat().st_size / 1e6:.1f} MB")


async def write_run(run: RunDir, steps: int) -> None:
    algorithm = Grpo()
    with contextlib.closing(Journal(run.journal)) as journal:
        journal.start()
        commits = Commits(run, journal, keep_rollouts=10**6)
        for step in range(1, steps + 1):
            recorded = entries(step)
            kept: list[Rollout] = []
            for outcome in recorded.outcomes:
                group = [played(outcome.draw, place, reward) for place, (_, reward) in enumerate(outcome.rewards)]
                await algorithm.score_group([RolloutView(r, Task("reverse-text", {})) for r in group])
                for sample in (sample for rollout in group for sample in rollout.samples):
                    route_actions(sample, algorithm.action_loss_type)
                recorded.dropped.append((group[0], "zero_advantage"))
                kept += group[1:]
            samples = [BatchSample(r.samples[0], r.env, place) for place, r in enumerate(kept)]
            batch = Batch(step, 0, samples, [draw.id for draw in recorded.drawn])
            commits.ship(commits.prepare(batch, kept, recorded.dropped), recorded)


def measure_dropped(run: RunDir) -> None:
    """Commit the outcomes of 8 dropped groups, with and without the file of their rollouts."""
    run.root.mkdir()
    with contextlib.closing(Journal(run.journal)) as journal:
        commits = Commits(run, journal, keep_rollouts=10**6)
        times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for number in range(60):
            name = ("without", "with")[number % 2]
            drawn = [Draw(i, "env", f"key{i}", i) for i in range(8 * number, 8 * number + 8)]
            outcomes = [Outcome(d.id, "gated", GROUP_SIZE, 800, {"gated": GROUP_SIZE}) for d in drawn]
            recorded = Entries(drawn, outcomes, Totals())
            if name == "with":
                recorded.dropped = [(played(d.id, n, 0.0), "gated") for d in drawn for n in range(GROUP_SIZE)]
            times[name].append(seconds(lambda recorded=recorded: commits.commit(recorded)))
    for name, values in times.items():
        row(f"a commit of 64 dropped rollouts, {name} their file", medians_of(values))


def medians_of(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*values, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def played(draw: int, place: int, reward: float) -> Rollout:
    ids, logprobs, versions = np.arange(TOKENS), np.full(TOKENS, -0.5), np.zeros(TOKENS)
    turn = Turn(np.arange(8), ids, logprobs, versions, 1.0)
    mask = np.arange(8 + TOKENS) >= 8
    filled = [np.concatenate([np.zeros(8), values]) for values in (ids, logprobs, versions)]
    sample = Sample(filled[0], mask, filled[1], filled[2], 8)
    return Rollout(
        env="reverse-text", group_id=f"{draw}-1", draw_id=draw, episode=place, reward=reward,
        credited=GROUP_SIZE, turns=[turn], samples=[sample],
    )  # fmt: skip


def row(name: str, times: tuple[float, float]) -> None:
    print(f"{name:58} {1000 * times[0]:9.2f} ms, CPU {1000 * times[1]:9.2f} ms")


def main() -> None:
    steps = (int(sys.argv[1]) if len(sys.argv) > 1 else 10_000) // DRAWS_PER_COMMIT
    with tempfile.TemporaryDirectory() as directory:
        measure_commits(Path(directory), steps)
        measure_dropped(RunDir(Path(directory) / "dropped"))
        run = RunDir(Path(directory) / "run")
        run.root.mkdir()
        run.config.write_text(CONFIG.format(root=run.root, steps=steps))
        asyncio.run(write_run(run, steps))
        reports = []
        row(f"audit of {DRAWS_PER_COMMIT * steps:,} draws", seconds(lambda: reports.append(audit_run(run))))
        (report,) = reports
        print(f"{len(report.problems)} problems; not checked: {'; '.join(report.unchecked)}")


if __name__ == "__main__":
    main()
