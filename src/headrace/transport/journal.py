"""The journal: a SQLite database with the state of every draw (a prompt taken from a source).

A draw is drawn, then shipped in a batch and trained, or dropped with a reason. Only the orchestrator writes. A draw
that was neither shipped nor dropped when the orchestrator died is sampled again under the same id, so no prompt is
lost. Draws that were never recorded are drawn again: the source is deterministic.

Everything else is a fold over the draws: totals are sums over outcomes, a curriculum observes rewards in the order of
credit, and an algorithm's state is the one right after the last group in that order whose outcome is recorded. So all
of them can be replayed and checked.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.errors import BadInput
from headrace.rollout.batch import check_schema
from headrace.rollout.fingerprint import Fingerprint

log = logging.getLogger(__name__)

JOURNAL_SCHEMA = 4

GROUP_FAILED = "group_failed"
"""Drop reason of a successful rollout in a group that could not be scored because another one failed."""
ON_POLICY = "on_policy"
"""Drop reason of what is left over when a step ships, with `max_async_level = 0`."""
NO_FAILURE = frozenset({"off_policy", ON_POLICY, "max_steps", "task_gone", "not_trainable", "cancelled"})
"""Reasons for a draw without credit that do not count as failures of its environment."""

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")

_TABLES = """
CREATE TABLE IF NOT EXISTS draws (
    id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task_key TEXT NOT NULL,
    position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('drawn', 'shipped', 'trained', 'dropped')),
    step INTEGER,        -- the batch that contains it, or that was being collected when it was dropped
    reason TEXT,         -- why it was dropped
    rollouts INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    credited_tokens INTEGER NOT NULL DEFAULT 0,  -- of its credited rollouts, prompts included
    credit INTEGER,      -- its position in the order of credit
    rewards TEXT         -- of its credited rollouts: [[agent, reward], ...]
);
CREATE INDEX IF NOT EXISTS draws_by_state ON draws (state, step);
CREATE TABLE IF NOT EXISTS drops (draw INTEGER NOT NULL, reason TEXT NOT NULL, rollouts INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, totals TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS algorithms (
    step INTEGER,
    env TEXT,
    state TEXT NOT NULL,
    algorithm TEXT,      -- its class, by import path
    PRIMARY KEY (step, env)
);
CREATE TABLE IF NOT EXISTS clock (step INTEGER PRIMARY KEY, seconds REAL NOT NULL, eval_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS data (
    slot TEXT,           -- train or eval
    env TEXT,
    examples INTEGER NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (slot, env)
);
CREATE TABLE IF NOT EXISTS starts (number INTEGER PRIMARY KEY);  -- the orchestrator processes of the run
"""


class Draw(msgspec.Struct, frozen=True):
    """One prompt taken from a source: the `position`-th of its environment."""

    id: int
    env: str
    task_key: str
    position: int


class Outcome(msgspec.Struct):
    """The outcome of a draw and of its rollouts."""

    draw: int
    reason: str = ""
    """Why it was dropped; empty if it was shipped."""
    rollouts: int = 0
    tokens: int = 0
    drops: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of its rollouts that were not shipped, by reason."""
    credit: int | None = None
    rewards: list[tuple[str, float]] = msgspec.field(default_factory=list)
    """Agent and reward of each credited rollout, in the order in which the algorithm received them."""
    credited_tokens: int = 0
    """Of these rollouts, prompts included."""


class Lesson(msgspec.Struct):
    """The result of a finished draw, as curricula and circuit breakers observe it."""

    draw: int
    env: str
    task_key: str
    rewards: list[float]
    """Of its credited rollouts; empty if none was credited."""
    failed: int = 0
    """Number of its episodes, if no rollout was credited because all of them failed."""
    error: str = ""
    """Reason and detail of the last failure, for messages; not in the journal."""
    step: int = 0
    """The batch that was being collected when it finished."""
    tokens: int = 0
    """Tokens of its credited rollouts, prompts included; 0 if unknown."""
    surplus: bool = False
    """Whether it was dropped after its credit because the batch was full without it, at level 0. Known afterwards."""


class Totals(msgspec.Struct):
    """Sums over all draws that have an outcome, over restarts."""

    rollouts: int = 0
    tokens: int = 0
    drops: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.rollouts += outcome.rollouts
        self.tokens += outcome.tokens
        for reason, count in outcome.drops.items():
            self.drops[reason] = self.drops.get(reason, 0) + count

    def copy(self) -> Totals:
        return Totals(self.rollouts, self.tokens, dict(self.drops))


class Clock(msgspec.Struct, frozen=True):
    """Time and evaluation tokens of the whole run."""

    seconds: float = 0.0
    eval_tokens: int = 0


class AlgorithmState(msgspec.Struct, frozen=True):
    """The saved state of an algorithm."""

    algorithm: str
    """Its class, as `package.module:Name`."""
    json: bytes


class Entries(msgspec.Struct):
    """The content of one commit. Totals and states are those after its outcomes."""

    drawn: list[Draw]
    outcomes: list[Outcome]
    totals: Totals
    states: dict[str, AlgorithmState] = msgspec.field(default_factory=dict)
    """By environment."""
    clock: Clock = Clock()


class Journal:
    """The journal of a run: one connection, used from one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        try:
            self._open(path, read_only)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # such as a full disk
                raise
            raise BadInput(
                f"the journal is damaged: {error}",
                file=path,
                fix="Restore a copy of it. Without one, `headrace export` still exports the newest checkpoint.",
            ) from error

    def _open(self, path: Path, read_only: bool) -> None:
        if read_only:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            _check(self._db, path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # The orchestrator calls from worker threads, one at a time.
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        network = network_file_system(path.parent)
        wanted = "DELETE" if network else "WAL"  # a write-ahead log needs shared memory between its readers
        mode = self._db.execute(f"PRAGMA journal_mode={wanted}").fetchone()[0]
        log.info("journal: %s, SQLite journal mode %s%s", path, mode, f" (file system: {network})" if network else "")
        self._db.execute("PRAGMA synchronous=FULL")
        _check(self._db, path)
        self._db.executescript(f"{_TABLES} PRAGMA user_version={JOURNAL_SCHEMA};")

    def close(self) -> None:
        self._db.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Record a start of the orchestrator; return its number, from 1. Not undone by a rewind."""
        return int(self._db.execute("INSERT INTO starts DEFAULT VALUES").lastrowid or 0)

    def exchange_data(self, slot: str, env: str, data: Fingerprint) -> Fingerprint | None:
        """Store the fingerprint of an environment's tasks; return the one of the previous start, if any."""
        row = self._db.execute("SELECT examples, digest FROM data WHERE slot = ? AND env = ?", (slot, env)).fetchone()
        self._db.execute("INSERT OR REPLACE INTO data VALUES (?, ?, ?, ?)", (slot, env, data.examples, data.digest))
        return Fingerprint(*row) if row else None

    def commit(self, entries: Entries, shipped: int | None = None) -> None:
        """Write the entries in one transaction. `shipped`: the step whose batch has the draws that were not dropped."""
        step = shipped if shipped is not None else self.last_step() + 1
        with _transaction(self._db):
            self._insert_draws(entries.drawn)
            for outcome in entries.outcomes:
                self._record_outcome(outcome, step)
            self._db.executemany(
                "INSERT OR REPLACE INTO algorithms (step, env, state, algorithm) VALUES (?, ?, ?, ?)",
                [(step, env, state.json.decode(), state.algorithm) for env, state in entries.states.items()],
            )
            self._db.execute(
                "INSERT OR REPLACE INTO clock VALUES (?, ?, ?)",
                (step, entries.clock.seconds, entries.clock.eval_tokens),
            )
            if shipped is not None:
                totals = msgspec.json.encode(entries.totals).decode()
                self._db.execute("INSERT INTO steps VALUES (?, ?)", (shipped, totals))

    def drop_open(self, reason: str) -> None:
        """Drop all open draws at the end of a run."""
        self._db.execute(
            "UPDATE draws SET state='dropped', reason=?, step=? WHERE state='drawn'", (reason, self.last_step() + 1)
        )

    def mark_trained(self, step: int) -> None:
        """Mark the draws of all batches through `step` as covered by a complete checkpoint."""
        self._db.execute("UPDATE draws SET state='trained' WHERE state='shipped' AND step <= ?", (step,))

    def reopen(self) -> None:
        """Rewind to the last shipped batch, but keep the clock: the current step starts again."""
        clock, last = self.clock(), self.last_step()
        with _transaction(self._db):
            _rewind(self._db, last)
            self._db.execute("INSERT OR REPLACE INTO clock VALUES (?, ?, ?)", (last, clock.seconds, clock.eval_tokens))

    def rewind(self, step: int) -> None:
        """Rewind to the moment when batch `step` had shipped: later draws are open again, with the same ids."""
        with _transaction(self._db):
            _rewind(self._db, step)

    def _insert_draws(self, draws: Sequence[Draw]) -> None:
        """Insert new draws, whose ids must be contiguous; draws that exist already are unchanged."""
        count = self._db.execute("SELECT COUNT(*) FROM draws").fetchone()[0]
        new = [draw.id for draw in draws if draw.id >= count]
        if new != list(range(count, count + len(new))):
            raise RuntimeError(f"the journal has {count} draws, but the next are {new[:3]}: some are missing")
        self._db.executemany(
            "INSERT OR IGNORE INTO draws (id, env, task_key, position, state) VALUES (?, ?, ?, ?, 'drawn')",
            [(d.id, d.env, d.task_key, d.position) for d in draws],
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
            "INSERT INTO drops VALUES (?, ?, ?)",
            [(outcome.draw, reason, count) for reason, count in outcome.drops.items()],
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def last_step(self) -> int:
        """Return the step of the newest committed batch; 0 before the first."""
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    def totals(self, through: int | None = None) -> Totals:
        """Return the sums over every outcome, or over those of the steps through `through`."""
        last = (1 << 62) if through is None else through
        rollouts, tokens = self._db.execute(
            "SELECT COALESCE(SUM(rollouts), 0), COALESCE(SUM(tokens), 0) FROM draws WHERE step <= ?", (last,)
        ).fetchone()
        drops = self._db.execute(
            "SELECT drops.reason, SUM(drops.rollouts) FROM drops JOIN draws ON draws.id = drops.draw "
            "WHERE draws.step <= ? GROUP BY 1",
            (last,),
        )
        return Totals(rollouts, tokens, dict(drops.fetchall()))

    def totals_at(self) -> dict[int, Totals]:
        """Return the totals that were committed with each step."""
        rows = self._db.execute("SELECT step, totals FROM steps ORDER BY step")
        return {step: msgspec.json.decode(totals, type=Totals) for step, totals in rows}

    def clock(self) -> Clock:
        row = self._db.execute("SELECT seconds, eval_tokens FROM clock ORDER BY step DESC LIMIT 1").fetchone()
        return Clock(*row) if row else Clock()

    def algorithm_states(self) -> dict[str, AlgorithmState]:
        """Return the newest state by environment."""
        rows = self._db.execute("SELECT env, algorithm, state, MAX(step) FROM algorithms GROUP BY env")
        return {env: AlgorithmState(algorithm, state.encode()) for env, algorithm, state, _ in rows}

    def credits(self) -> Iterator[tuple[int, str, list[tuple[str, float]]]]:
        """Yield id, environment and rewards of every credited draw, in the order of credit."""
        rows = self._db.execute("SELECT id, env, rewards FROM draws WHERE credit IS NOT NULL ORDER BY credit")
        for draw, env, rewards in rows:
            yield draw, env, _decode_rewards(rewards)

    def lessons(self) -> Iterator[Lesson]:
        """Yield the result of every finished draw: credited ones in the order of credit, then the others by id."""
        rows = self._db.execute(
            "SELECT id, env, task_key, step, rollouts, reason, rewards, credited_tokens, "
            "id IN (SELECT draw FROM drops WHERE reason = ?) FROM draws WHERE step IS NOT NULL "
            "ORDER BY credit IS NULL, credit, id",
            (GROUP_FAILED,),
        )
        for draw, env, key, step, rollouts, reason, rewards, tokens, partly in rows:
            if rewards is not None:
                credited = [reward for _, reward in _decode_rewards(rewards)]
                yield Lesson(draw, env, key, credited, step=step, tokens=tokens, surplus=reason == ON_POLICY)
            else:
                yield Lesson(draw, env, key, [], 0 if partly or reason in NO_FAILURE else rollouts, step=step)

    def next_credit(self) -> int:
        """Return the next position in the order of credit."""
        return int(self._db.execute("SELECT COALESCE(MAX(credit) + 1, 0) FROM draws").fetchone()[0])

    def draws(self) -> list[tuple[Draw, str, int | None, str | None]]:
        """Return every draw with its state, step and reason, oldest first."""
        rows = self._db.execute("SELECT id, env, task_key, position, state, step, reason FROM draws ORDER BY id")
        return [(Draw(*row[:4]), *row[4:]) for row in rows]

    def open_draws(self) -> list[Draw]:
        """Return draws that are neither shipped nor dropped, oldest first."""
        rows = self._db.execute("SELECT id, env, task_key, position FROM draws WHERE state = 'drawn' ORDER BY id")
        return [Draw(*row) for row in rows]

    def drawn_per_env(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT env, COUNT(*) FROM draws GROUP BY env").fetchall())

    def drops_per_env(self) -> dict[str, dict[str, int]]:
        """Return the number of dropped rollouts by environment and reason."""
        drops: dict[str, dict[str, int]] = {}
        for env, reason, count in self._db.execute(
            "SELECT env, drops.reason, SUM(drops.rollouts) FROM drops JOIN draws ON draws.id = drops.draw GROUP BY 1, 2"
        ):
            drops.setdefault(env, {})[reason] = count
        return drops

    def states(self) -> dict[str, int]:
        """Return the number of draws in each state, dropped ones by reason (`dropped:REASON`)."""
        query = """
            SELECT CASE state WHEN 'dropped' THEN 'dropped:' || COALESCE(reason, '?') ELSE state END, COUNT(*)
            FROM draws GROUP BY 1
        """
        return dict(self._db.execute(query).fetchall())


_decode_rewards = msgspec.json.Decoder(list[tuple[str, float]]).decode


def fork(source: Path, target: Path, step: int) -> None:
    """Copy a journal as it was when batch `step` had shipped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    origin, copy = sqlite3.connect(source), sqlite3.connect(target, isolation_level=None)
    try:
        origin.backup(copy)
        _check(copy, source)
        with _transaction(copy):
            _rewind(copy, step)
    finally:
        origin.close()
        copy.close()


def _rewind(db: sqlite3.Connection, step: int) -> None:
    db.execute("DELETE FROM drops WHERE draw IN (SELECT id FROM draws WHERE step > ?)", (step,))
    db.execute(
        "UPDATE draws SET state='drawn', step=NULL, reason=NULL, rollouts=0, tokens=0, credit=NULL, rewards=NULL, "
        "credited_tokens=0 WHERE step > ?",
        (step,),
    )
    for table in ("steps", "algorithms", "clock"):
        db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise if this version of Headrace cannot read the journal."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if 0 < version < JOURNAL_SCHEMA:
        raise BadInput(
            f"written by an older Headrace (schema {version}, this one reads {JOURNAL_SCHEMA})",
            file=path,
            fix="Finish the run with that version, or start a new one from its newest checkpoint's model.",
        )
    check_schema(version, str(path), newest=JOURNAL_SCHEMA)


def network_file_system(directory: Path) -> str | None:
    """Return the type of file system of a directory if it is a network file system."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return None
    resolved, best = directory.resolve(), (0, "")
    for line in table.read_text().splitlines():
        fields, _, source = line.partition(" - ")
        mount_point, kind = Path(fields.split()[4]), source.split()[0]
        if resolved.is_relative_to(mount_point):
            best = max(best, (len(mount_point.parts), kind))
    return best[1] if best[1].startswith(_NETWORK_FILE_SYSTEMS) else None


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """BEGIN ... COMMIT, or ROLLBACK when the block raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
