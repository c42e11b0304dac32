"""The journal: a SQLite database with the state of every draw (a prompt taken from a source).

A draw is drawn, then shipped in a batch and trained, or dropped with a reason. Only the orchestrator writes. A draw
that was neither shipped nor dropped when the orchestrator died is sampled again under the same id, so no prompt is
lost. Draws that were never recorded are drawn again: the source is deterministic. Which draws are trained follows from
one row, the step that the newest checkpoint covers. A commit also records the files that belong to it.

All other state follows from the draws: totals are sums over outcomes, a curriculum observes rewards in the order of
credit, and an algorithm's state is the one right after the last group in that order whose outcome is recorded. So it
can be replayed and checked. Tables, checksums and the migration of older journals: `journal_schema`.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.rollout.digest import Fingerprint
from headrace.transport.files import draft_of, move, sync
from headrace.transport.journal_entries import (
    GROUP_FAILED,
    NO_FAILURE,
    ON_POLICY,
    AlgorithmState,
    Clock,
    Draw,
    DrawResult,
    Entries,
    FileRecord,
    Outcome,
    Totals,
)
from headrace.transport.journal_files import copy_journal, delete_journal, journals
from headrace.transport.journal_schema import (
    JOURNAL_SCHEMA,
    RESTORE,
    check_version,
    check_wal,
    connect_reader,
    connect_writer,
    find_damage,
    prepare_writer,
    reporting_damage,
    transaction,
)


class Journal:
    """The journal of a run: one connection, used from one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._copy: TemporaryDirectory[str] | None = None
        """Directory with the copy that is read, if another host may write the journal."""
        self.epoch = 0
        """Number of the orchestrator process that writes, or that has last written."""
        with reporting_damage(path):
            check_wal(path)
            if read_only:
                self._open_for_reading()
            else:
                self._open_for_writing()

    def _open_for_reading(self) -> None:
        self._file, self._copy = connect_reader(self.path)
        self._db = self._file
        version = check_version(self._file, self.path)
        if version == 0:
            fact = f"the journal is damaged: it has no tables. They may have been in {self.path.name}-wal"
            raise BadInput(fact, file=self.path, fix=RESTORE)
        self.has_checksums = version == JOURNAL_SCHEMA
        self.epoch = self._last_start()
        if not self.has_checksums:  # every query reads the present schema
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            self._file.backup(self._db)
            prepare_writer(self._db, self.path, lambda: self.epoch)

    def _open_for_writing(self) -> None:
        self._file = self._db = connect_writer(self.path)
        if check_version(self._db, self.path):
            self.refuse_damage()
            self.epoch = self._last_start()
        prepare_writer(self._db, self.path, lambda: self.epoch)
        self.has_checksums = True

    def close(self) -> None:
        self._db.close()
        self._file.close()
        if self._copy is not None:
            self._copy.cleanup()

    def find_damage(self) -> list[str]:
        """Return a sentence for each damage of the database file, found by SQLite or by the checksums of its rows."""
        with reporting_damage(self.path):
            return list(find_damage(self._file))

    def refuse_damage(self) -> None:
        """Raise `BadInput` if the database file is damaged."""
        if problems := self.find_damage():
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise BadInput(f"the journal is damaged: {problems[0]}{more}", file=self.path, fix=RESTORE)

    # -- writing --------------------------------------------------------------------------------------------------

    def start(self, settings: str | None = None) -> int:
        """Record a start of the orchestrator; return its epoch, counted from 1. A rewind does not undo this.

        `settings` is a digest of the settings that draws and credit depend on.
        """
        self.epoch = self._last_start() + 1
        self._db.execute("INSERT INTO starts (number, settings) VALUES (?, ?)", (self.epoch, settings))
        return self.epoch

    def exchange_data(self, slot: str, env: str, data: Fingerprint) -> Fingerprint | None:
        """Store the fingerprint of an environment's tasks; return the one of the previous start, if any."""
        before = self.data().get((slot, env))
        self._db.execute(
            "INSERT OR REPLACE INTO data (slot, env, examples, digest) VALUES (?, ?, ?, ?)",
            (slot, env, data.examples, data.digest),
        )
        return before

    def commit(
        self,
        entries: Entries,
        shipped: int | None = None,
        files: Sequence[FileRecord] = (),
        deleted: Sequence[str] = (),
    ) -> None:
        """Write the entries in one transaction. `shipped`: the step whose batch has the draws that were not dropped.

        `files` are recorded too. `deleted` are names of recorded files that the run deletes after the commit.
        """
        step = shipped if shipped is not None else self.last_step() + 1
        with transaction(self._db):
            self._insert_draws(entries.drawn)
            for outcome in entries.outcomes:
                self._record_outcome(outcome, step)
            self._db.executemany(
                "INSERT OR REPLACE INTO algorithms (step, env, state, algorithm) VALUES (?, ?, ?, ?)",
                [(step, env, state.json.decode(), state.algorithm) for env, state in entries.states.items()],
            )
            self._set_clock(step, entries.clock)
            if shipped is not None:
                totals = msgspec.json.encode(entries.totals).decode()
                self._db.execute("INSERT INTO steps (step, totals) VALUES (?, ?)", (shipped, totals))
            self._db.executemany("DELETE FROM files WHERE name = ?", [(name,) for name in deleted])
            self.record_files(files, step)

    def record_files(self, files: Sequence[FileRecord], step: int = 0) -> None:
        """Record files. A rewind to before `step` removes the records; no rewind does if `step` is 0."""
        self._db.executemany(
            "INSERT OR REPLACE INTO files (name, step, size, digest) VALUES (?, ?, ?, ?)",
            [(file.name, step, file.size, file.digest) for file in files],
        )

    def drop_open(self, reason: str) -> None:
        """Drop all open draws at the end of a run."""
        self._db.execute(
            "UPDATE draws SET state='dropped', reason=?, step=? WHERE state='drawn'", (reason, self.last_step() + 1)
        )

    def mark_trained(self, step: int) -> None:
        """Mark the draws of all batches through `step` as covered by a complete checkpoint."""
        if step > self.covered_step():
            self._db.execute("INSERT OR REPLACE INTO covered (id, step) VALUES (1, ?)", (step,))

    def rewind(self, step: int, *, keep_clock: bool = False) -> None:
        """Undo all outcomes after batch `step` shipped: later draws are open again, with the same ids.

        `keep_clock`: time and tokens since then still count.
        """
        db, clock = self._db, self.clock()
        with transaction(db):
            db.execute("DELETE FROM drops WHERE draw IN (SELECT id FROM draws WHERE step > ?)", (step,))
            db.execute(
                "UPDATE draws SET state='drawn', step=NULL, reason=NULL, rollouts=0, tokens=0, credit=NULL, "
                "rewards=NULL, credited_tokens=0 WHERE step > ?",
                (step,),
            )
            for table in ("steps", "algorithms", "clock", "files"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            db.execute("UPDATE covered SET step = ? WHERE step > ?", (step, step))
            if keep_clock:
                self._set_clock(step, clock)

    def _set_clock(self, step: int, clock: Clock) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO clock (step, seconds, eval_tokens) VALUES (?, ?, ?)",
            (step, clock.seconds, clock.eval_tokens),
        )

    def _insert_draws(self, draws: Sequence[Draw]) -> None:
        """Insert new draws, whose ids must be contiguous; draws that exist already are unchanged."""
        count = self._db.execute("SELECT COUNT(*) FROM draws").fetchone()[0]
        new = [draw.id for draw in draws if draw.id >= count]
        if new != list(range(count, count + len(new))):
            raise RuntimeError(f"the journal has {count} draws, but the next are {new[:3]}: some are missing")
        self._db.executemany(
            "INSERT OR IGNORE INTO draws (id, env, task_key, position, observed, drawn_in, state) "
            "VALUES (?, ?, ?, ?, ?, ?, 'drawn')",
            [(d.id, d.env, d.task_key, d.position, d.observed, self.epoch) for d in draws],
        )

    def _record_outcome(self, outcome: Outcome, step: int) -> None:
        rewards = None if outcome.credit is None else msgspec.json.encode(outcome.rewards).decode()
        changed = self._db.execute(
            "UPDATE draws SET state=?, reason=?, step=?, rollouts=?, tokens=?, credit=?, rewards=?, credited_tokens=? "
            "WHERE id=? AND state='drawn'",
            (
                "dropped" if outcome.reason else "shipped", outcome.reason or None, step,
                outcome.rollouts, outcome.tokens, outcome.credit, rewards, outcome.credited_tokens, outcome.draw,
            ),
        )  # fmt: skip
        if changed.rowcount != 1:
            raise RuntimeError(f"the outcome of draw {outcome.draw} is already in the journal, or it was never drawn")
        self._db.executemany(
            "INSERT INTO drops (draw, reason, rollouts) VALUES (?, ?, ?)",
            [(outcome.draw, reason, count) for reason, count in outcome.drops.items()],
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def rows(self, query: str, arguments: Sequence[object] = ()) -> list[Any]:
        with reporting_damage(self.path):
            return self._db.execute(query, arguments).fetchall()

    def _read_number(self, query: str) -> int:
        with reporting_damage(self.path):
            return int(self.rows(query)[0][0])

    def _last_start(self) -> int:
        return self._read_number("SELECT COALESCE(MAX(number), 0) FROM starts")

    def last_step(self) -> int:
        """Return the step of the newest committed batch; 0 before the first."""
        return self._read_number("SELECT COALESCE(MAX(step), 0) FROM steps")

    def covered_step(self) -> int:
        """Return the newest step that a complete checkpoint covers, as far as it is recorded."""
        return self._read_number("SELECT COALESCE(MAX(step), 0) FROM covered")

    def totals(self, through: int | None = None) -> Totals:
        """Return the sums over every outcome, or over those of the steps through `through`."""
        last = (1 << 62) if through is None else through
        ((rollouts, tokens),) = self.rows(
            "SELECT COALESCE(SUM(rollouts), 0), COALESCE(SUM(tokens), 0) FROM draws WHERE step <= ?", (last,)
        )
        drops = self.rows(
            "SELECT drops.reason, SUM(drops.rollouts) FROM drops JOIN draws ON draws.id = drops.draw "
            "WHERE draws.step <= ? GROUP BY 1",
            (last,),
        )
        return Totals(rollouts, tokens, dict(drops))

    def totals_by_step(self) -> dict[int, Totals]:
        """Return the totals that were committed with each step."""
        rows = self.rows("SELECT step, totals FROM steps ORDER BY step")
        with reporting_damage(self.path):
            return {step: msgspec.json.decode(totals, type=Totals) for step, totals in rows}

    def clock(self) -> Clock:
        rows = self.rows("SELECT seconds, eval_tokens FROM clock ORDER BY step DESC LIMIT 1")
        return Clock(*rows[0]) if rows else Clock()

    def data(self) -> dict[tuple[str, str], Fingerprint]:
        """Return the fingerprints of the tasks at the last start, by slot and environment."""
        rows = self.rows("SELECT slot, env, examples, digest FROM data")
        return {(slot, env): Fingerprint(*content) for slot, env, *content in rows}

    def files(self) -> dict[str, FileRecord]:
        """Return the recorded files, by name."""
        return {row[0]: FileRecord(*row) for row in self.rows("SELECT name, size, digest FROM files ORDER BY name")}

    def algorithm_states(self) -> dict[str, AlgorithmState]:
        """Return the newest state by environment."""
        return {env: states[max(states)] for env, states in self.states_by_step().items()}

    def states_by_step(self) -> dict[str, dict[int, AlgorithmState]]:
        """Return the last state of every step, by environment."""
        states: dict[str, dict[int, AlgorithmState]] = {}
        for env, step, algorithm, state in self.rows("SELECT env, step, algorithm, state FROM algorithms"):
            states.setdefault(env, {})[step] = AlgorithmState(algorithm, state.encode())
        return states

    def credits(self) -> Iterator[tuple[int, str, list[tuple[str, float]]]]:
        """Yield id, environment and rewards of every credited draw, in the order of credit."""
        query = "SELECT id, env, rewards FROM draws WHERE credit IS NOT NULL ORDER BY credit"
        for draw, env, rewards in self.rows(query):
            yield draw, env, self._decode_rewards(rewards)

    def outcomes(self) -> dict[int, list[Outcome]]:
        """Return the recorded outcomes by step, in the order of their draws."""
        drops: dict[int, dict[str, int]] = {}
        for draw, reason, count in self.rows("SELECT draw, reason, rollouts FROM drops"):
            drops.setdefault(draw, {})[reason] = count
        outcomes: dict[int, list[Outcome]] = {}
        for step, draw, reason, rollouts, tokens, credit, rewards, credited in self.rows(
            "SELECT step, id, reason, rollouts, tokens, credit, rewards, credited_tokens FROM draws "
            "WHERE step IS NOT NULL ORDER BY id"
        ):
            decoded = [] if rewards is None else self._decode_rewards(rewards)
            outcome = Outcome(draw, reason or "", rollouts, tokens, drops.get(draw, {}), credit, decoded, credited)
            outcomes.setdefault(step, []).append(outcome)
        return outcomes

    def settings_by_epoch(self) -> dict[int, str | None]:
        """Return the digest of the settings by epoch; None if an older version started it."""
        return dict(self.rows("SELECT number, settings FROM starts"))

    def epochs_by_draw(self) -> dict[int, tuple[int | None, int]]:
        """Return the epochs that recorded each draw and its outcome; None for a draw of an older Headrace version."""
        return {draw: (drawn, last) for draw, drawn, last in self.rows("SELECT id, drawn_in, epoch FROM draws")}

    def results(self) -> Iterator[DrawResult]:
        """Yield the result of every finished draw: credited ones in the order of credit, then the others by id."""
        rows = self.rows(
            "SELECT id, env, task_key, step, rollouts, reason, rewards, credited_tokens, "
            "id IN (SELECT draw FROM drops WHERE reason = ?) FROM draws WHERE step IS NOT NULL "
            "ORDER BY credit IS NULL, credit, id",
            (GROUP_FAILED,),
        )
        for draw, env, key, step, rollouts, reason, rewards, tokens, group_failed in rows:
            if rewards is not None:
                credited = [reward for _, reward in self._decode_rewards(rewards)]
                yield DrawResult(draw, env, key, credited, step=step, tokens=tokens, surplus=reason == ON_POLICY)
            else:
                failed = 0 if group_failed or reason in NO_FAILURE else rollouts
                yield DrawResult(draw, env, key, [], failed, step=step)

    def _decode_rewards(self, rewards: str) -> list[tuple[str, float]]:
        with reporting_damage(self.path):
            return _REWARDS.decode(rewards)

    def next_credit(self) -> int:
        """Return the next position in the order of credit."""
        return self._read_number("SELECT COALESCE(MAX(credit) + 1, 0) FROM draws")

    def draws(self) -> list[tuple[Draw, str, int | None, str | None]]:
        """Return every draw with its state, step and reason, oldest first."""
        columns = "id, env, task_key, position, observed, state, step, reason"
        return [(Draw(*row[:5]), *row[5:]) for row in self.rows(f"SELECT {columns} FROM draw_states ORDER BY id")]

    def open_draws(self) -> list[Draw]:
        """Return draws that are neither shipped nor dropped, oldest first."""
        columns = "id, env, task_key, position, observed"
        return [Draw(*row) for row in self.rows(f"SELECT {columns} FROM draws WHERE state = 'drawn' ORDER BY id")]

    def drawn_per_env(self) -> dict[str, int]:
        return dict(self.rows("SELECT env, COUNT(*) FROM draws GROUP BY env"))

    def drops_per_env(self) -> dict[str, dict[str, int]]:
        """Return the number of dropped rollouts by environment and reason."""
        drops: dict[str, dict[str, int]] = {}
        for env, reason, count in self.rows(
            "SELECT env, drops.reason, SUM(drops.rollouts) FROM drops JOIN draws ON draws.id = drops.draw GROUP BY 1, 2"
        ):
            drops.setdefault(env, {})[reason] = count
        return drops

    def count_states(self) -> dict[str, int]:
        """Return the number of draws in each state, dropped ones by reason (`dropped:REASON`)."""
        query = """
            SELECT CASE state WHEN 'dropped' THEN 'dropped:' || COALESCE(reason, '?') ELSE state END, COUNT(*)
            FROM draw_states GROUP BY 1
        """
        return dict(self.rows(query))


_REWARDS = msgspec.json.Decoder(list[tuple[str, float]])


def fork(source: Path, target: Path, step: int) -> None:
    """Copy a journal as it was when batch `step` had shipped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with closing(Journal(source, read_only=True)) as origin, closing(sqlite3.connect(target)) as copy:
        origin.refuse_damage()
        origin._file.backup(copy)
    with closing(Journal(target)) as journal:
        journal.rewind(step)
        journal._db.execute("DELETE FROM files")  # they stay with the source


def take_over(root: Path, epoch: int) -> Journal:
    """Copy the newest journal and open the copy for writing, as the journal of a new epoch.

    The newest journal is kept; older ones are deleted. The caller holds the epoch, so older epochs can announce no
    batch that is missing in the copy.
    """
    older, target = journals(root), root / f"journal-{epoch}.sqlite"
    draft = draft_of(target)
    with TemporaryDirectory(prefix="headrace-journal-") as local:  # on a local file system, which supports locks
        path = Path(local) / target.name
        if older:
            *outdated, newest = older.values()
            check_wal(newest)
            copy_journal(newest, path)
            try:
                with closing(Journal(path, read_only=True)) as copy:
                    copy.refuse_damage()
            except BadInput as error:
                error.file = newest
                raise
            for each in outdated:
                delete_journal(each)
        else:
            Journal(path).close()
        with closing(sqlite3.connect(path)) as database:  # moves the content of the log into the database file
            database.execute("PRAGMA journal_mode=DELETE")
        shutil.copyfile(path, draft)
    sync(draft)
    move(draft, target)
    sync(root)
    return Journal(target)
