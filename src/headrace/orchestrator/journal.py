"""The one truth about every draw: drawn, then shipped in a batch and trained, or dropped with a reason.

SQLite, written by the orchestrator alone. A draw that was neither shipped nor dropped when the orchestrator died is
sampled again under the same id: compute may be lost, prompts are not. Draws that were never recorded need no record:
the source is deterministic and draws them again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from headrace.rollout.batch import SCHEMA, check_schema

log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE IF NOT EXISTS draws (
    id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task_key TEXT NOT NULL,
    position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('drawn', 'shipped', 'trained', 'dropped')),
    step INTEGER,
    reason TEXT
);
CREATE INDEX IF NOT EXISTS draws_by_state ON draws (state);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, totals TEXT NOT NULL);
"""


class Draw(msgspec.Struct, frozen=True):
    """One prompt taken from a source: the `position`-th of its environment."""

    id: int
    env: str
    task_key: str
    position: int


class Totals(msgspec.Struct):
    """Counts over the whole run, restarts included."""

    rollouts: int = 0
    tokens_sampled: int = 0
    seconds: float = 0.0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class Journal:
    """One connection, used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The orchestrator calls from a worker thread, never from two at once.
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            log.info("journal: this file system has no shared memory for WAL, using a rollback journal (%s)", mode)
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        check_schema(version, str(path))
        self._db.executescript(_TABLES)
        self._db.execute(f"PRAGMA user_version={SCHEMA}")

    def close(self) -> None:
        self._db.close()

    def ship(
        self, step: int, drawn: Iterable[Draw], shipped: Iterable[int], dropped: dict[int, str], totals: Totals
    ) -> None:
        """Commit one step: which draws its batch carries, which were dropped since the last, and the counts so far."""
        with self._transaction():
            self._insert(drawn)
            self._db.executemany(
                "UPDATE draws SET state='shipped', step=? WHERE id=? AND state='drawn'", [(step, i) for i in shipped]
            )
            self._drop(step, dropped)
            self._save_totals(step, totals)

    def close_session(self, drawn: Iterable[Draw], dropped: dict[int, str], totals: Totals) -> None:
        """Commit what happened after the newest batch."""
        step = self.last_step()
        with self._transaction():
            self._insert(drawn)
            self._drop(step + 1, dropped)
            self._save_totals(step, totals)

    def drop_open(self, reason: str) -> None:
        """Nothing more will be trained: close whatever is still open."""
        self._db.execute(
            "UPDATE draws SET state='dropped', reason=?, step=? WHERE state='drawn'", (reason, self.last_step() + 1)
        )

    def _save_totals(self, step: int, totals: Totals) -> None:
        self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (step, msgspec.json.encode(totals).decode()))

    def mark_trained(self, step: int) -> None:
        """A complete checkpoint covers every batch through `step`."""
        self._db.execute("UPDATE draws SET state='trained' WHERE state='shipped' AND step <= ?", (step,))

    def last_step(self) -> int:
        """The newest committed batch; 0 before the first."""
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    def totals(self) -> Totals:
        row = self._db.execute("SELECT totals FROM steps ORDER BY step DESC LIMIT 1").fetchone()
        return msgspec.json.decode(row[0], type=Totals) if row else Totals()

    def open_draws(self) -> list[Draw]:
        """Drawn but neither shipped nor dropped, oldest first."""
        rows = self._db.execute("SELECT id, env, task_key, position FROM draws WHERE state='drawn' ORDER BY id")
        return [Draw(*row) for row in rows]

    def drawn_per_env(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT env, COUNT(*) FROM draws GROUP BY env").fetchall())

    def states(self) -> dict[str, int]:
        """How many draws are in each state, dropped ones by reason (`dropped:REASON`)."""
        query = (
            "SELECT CASE state WHEN 'dropped' THEN 'dropped:' || reason ELSE state END, COUNT(*) FROM draws GROUP BY 1"
        )
        return dict(self._db.execute(query).fetchall())

    def _insert(self, draws: Iterable[Draw]) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO draws (id, env, task_key, position, state) VALUES (?, ?, ?, ?, 'drawn')",
            [(d.id, d.env, d.task_key, d.position) for d in draws],
        )

    def _drop(self, step: int, dropped: dict[int, str]) -> None:
        """`step` is the batch that was being collected."""
        self._db.executemany(
            "UPDATE draws SET state='dropped', reason=?, step=? WHERE id=? AND state='drawn'",
            [(reason, step, draw_id) for draw_id, reason in dropped.items()],
        )

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN ... COMMIT, or ROLLBACK when the block raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.db.execute("COMMIT" if kind is None else "ROLLBACK")


def fork(source: Path, target: Path, step: int) -> None:
    """Copy a journal as it was when batch `step` had shipped: what came later is open again, under the same ids."""
    target.parent.mkdir(parents=True, exist_ok=True)
    origin, copy = sqlite3.connect(source), sqlite3.connect(target)
    try:
        origin.backup(copy)
        with copy:
            copy.execute(
                "UPDATE draws SET state='drawn', step=NULL, reason=NULL WHERE state != 'drawn' AND step > ?", (step,)
            )
            copy.execute("DELETE FROM steps WHERE step > ?", (step,))
    finally:
        origin.close()
        copy.close()
