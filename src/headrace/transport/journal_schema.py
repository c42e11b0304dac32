"""Connections to the journal, its tables, the stamp of every row, checks for damage, and migration of older journals.

Every row has the epoch of its writer (the number of the orchestrator process, from `starts`) and a CRC-32 of its other
columns, which finds every single flipped bit. Temporary triggers of the writer's connection set both, so no statement
can leave them out; another program that changes a row leaves a checksum that does not match. SQLite's own integrity
check covers what is not in a row: pages, indices, free lists.

A write-ahead log has checksums of its own, but SQLite ignores everything from a damaged frame on without an error. So
the log is read here before SQLite opens it.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from headrace.errors import BadInput
from headrace.rollout.schema import check_schema
from headrace.transport.journal_files import copy_journal, has_wal, is_shared_between_hosts, wal_path

log = logging.getLogger(__name__)

JOURNAL_SCHEMA = 5
OLDEST_SCHEMA = 4
"""The oldest schema that is migrated."""
MAX_REPORTED_ROWS = 20
"""Damaged rows of one table that are reported."""
OTHER_ERRORS = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip
"""SQLite errors that are not caused by the content of the file."""
RESTORE = "Restore a copy of it. Without one, `headrace export` still exports the newest checkpoint."

_STAMP = ("epoch", "checksum")
_STAMP_COLUMNS = "epoch INTEGER, checksum INTEGER"

# A change of these definitions, comments aside, needs a new JOURNAL_SCHEMA: they are compared with those of the file.
TABLES = f"""
CREATE TABLE draws (
    id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task_key TEXT NOT NULL,
    position INTEGER NOT NULL,
    observed INTEGER,    -- rewards that its environment's sampler had observed; NULL if an older version drew it
    drawn_in INTEGER,    -- the epoch in which it was drawn
    state TEXT NOT NULL CHECK (state IN ('drawn', 'shipped', 'dropped')),
    step INTEGER,        -- the batch that contains it, or that was being collected when it was dropped
    reason TEXT,         -- why it was dropped
    rollouts INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    credited_tokens INTEGER NOT NULL DEFAULT 0,  -- of its credited rollouts, prompts included
    credit INTEGER,      -- its position in the order of credit
    rewards TEXT,        -- of its credited rollouts: [[agent, reward], ...]
    {_STAMP_COLUMNS}
);
CREATE INDEX draws_by_state ON draws (state, step);
CREATE TABLE drops (draw INTEGER NOT NULL, reason TEXT NOT NULL, rollouts INTEGER NOT NULL, {_STAMP_COLUMNS});
CREATE TABLE steps (step INTEGER PRIMARY KEY, totals TEXT NOT NULL, {_STAMP_COLUMNS});
CREATE TABLE algorithms (
    step INTEGER,
    env TEXT,
    state TEXT NOT NULL,
    algorithm TEXT,      -- its class, by import path
    {_STAMP_COLUMNS},
    PRIMARY KEY (step, env)
);
CREATE TABLE clock (step INTEGER PRIMARY KEY, seconds REAL NOT NULL, eval_tokens INTEGER NOT NULL, {_STAMP_COLUMNS});
CREATE TABLE data (
    slot TEXT,           -- train or eval
    env TEXT,
    examples INTEGER NOT NULL,
    digest TEXT NOT NULL,
    {_STAMP_COLUMNS},
    PRIMARY KEY (slot, env)
);
CREATE TABLE starts (  -- the orchestrator processes of the run
    number INTEGER PRIMARY KEY,
    settings TEXT,       -- digest of the settings that draws and credit depend on
    {_STAMP_COLUMNS}
);
CREATE TABLE covered (id INTEGER PRIMARY KEY CHECK (id = 1), step INTEGER NOT NULL, {_STAMP_COLUMNS});
CREATE TABLE files (
    name TEXT PRIMARY KEY,  -- relative to the run directory
    step INTEGER NOT NULL,  -- of the commit that recorded it; 0: no rewind removes it
    size INTEGER NOT NULL,
    digest TEXT NOT NULL,
    {_STAMP_COLUMNS}
);
CREATE VIEW draw_states AS  -- a shipped draw is trained once a complete checkpoint covers its step
    SELECT id, env, task_key, position, observed, step, reason, CASE
        WHEN state = 'shipped' AND step <= (SELECT COALESCE(MAX(step), 0) FROM covered) THEN 'trained' ELSE state
    END AS state FROM draws;
"""


def connect_reader(path: Path) -> tuple[sqlite3.Connection, TemporaryDirectory[str] | None]:
    """Open a journal for reading; if another host may write it, a copy of it in the returned directory."""
    source, copy, options = path, None, "mode=ro"
    if is_shared_between_hosts(path.parent):
        copy = TemporaryDirectory(prefix="headrace-journal-")
        source = Path(copy.name) / path.name
        copy_journal(path, source)
        options = "mode=rw"  # SQLite recovers the copy from its log
    if is_at_rest(source):
        options = "mode=ro&immutable=1"
    return sqlite3.connect(f"{source.absolute().as_uri()}?{options}", uri=True), copy


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open or create a journal for writing from several threads, one at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = is_shared_between_hosts(path.parent)
    address = f"{path.absolute().as_uri()}?vfs=unix-none" if shared else path
    db = sqlite3.connect(address, uri=shared, check_same_thread=False, isolation_level=None)
    if shared:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # the index of the log is in memory, not in a file
    mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    log.info("journal: %s, SQLite journal mode %s%s", path, mode, ", between hosts" if shared else "")
    db.execute("PRAGMA synchronous=FULL")
    return db


def is_at_rest(path: Path) -> bool:
    """Return whether no process writes the journal: its last writer has removed the write-ahead log.

    SQLite can then read it without files beside it, which it would create and leave behind.
    """
    with open(path, "rb") as file:
        uses_log = file.read(20)[18:] == b"\x02\x02"
    return uses_log and not has_wal(path)


def prepare_writer(db: sqlite3.Connection, path: Path, epoch: Callable[[], int]) -> None:
    """Create or migrate the tables of a checked journal, and stamp every row that the connection writes."""
    version = check_version(db, path)
    if version == OLDEST_SCHEMA:
        _migrate(db, epoch)
        return
    if version == 0:
        with transaction(db):
            _create_tables(db)
    _stamp_writes(db, epoch)


def check_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the schema number of a journal, 0 for an empty file; raise if this version of Headrace cannot read it."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if 0 < version < OLDEST_SCHEMA:
        fact = f"written by an older Headrace (schema {version}, this one reads {OLDEST_SCHEMA} to {JOURNAL_SCHEMA})"
        fix = "Finish the run with that version, or start a new one from its newest checkpoint's model."
        raise BadInput(fact, file=path, fix=fix)
    check_schema(version, str(path), newest=JOURNAL_SCHEMA)
    return version


def _create_tables(db: sqlite3.Connection) -> None:
    for statement in re.sub("--.*", "", TABLES).split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA user_version={JOURNAL_SCHEMA}")


def _stamp_writes(db: sqlite3.Connection, epoch: Callable[[], int]) -> None:
    db.create_function("row_checksum", -1, lambda *values: _checksum(values), deterministic=True)
    db.create_function("writer_epoch", 0, epoch)
    for table, columns in _tables(db).items():
        for event in ("INSERT", f"UPDATE OF {', '.join(columns)}"):
            db.execute(
                f"CREATE TEMP TRIGGER stamp_{table}_{event[:6]} AFTER {event} ON main.{table} BEGIN UPDATE {table} "
                f"SET epoch = writer_epoch(), checksum = row_checksum({', '.join(f'NEW.{c}' for c in columns)}, "
                "writer_epoch()) WHERE rowid = NEW.rowid; END"
            )


def _tables(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the columns of each table, without the stamp."""
    names = [name for (name,) in db.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table' ORDER BY name")]
    return {
        name: [column for _, column, *_ in db.execute(f"PRAGMA main.table_info({name})") if column not in _STAMP]
        for name in names
    }


def _checksum(values: tuple[object, ...]) -> int:
    return zlib.crc32(msgspec.msgpack.encode(values))


def _migrate(db: sqlite3.Connection, epoch: Callable[[], int]) -> None:
    """Rebuild the tables of an older schema in one transaction; its rows get their first stamps."""
    with transaction(db):
        old = _tables(db)
        covered = db.execute("SELECT MAX(step) FROM draws WHERE state = 'trained'").fetchone()[0]
        db.execute("UPDATE draws SET state = 'shipped' WHERE state = 'trained'")
        db.execute("DROP INDEX draws_by_state")
        for table in old:
            db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        _create_tables(db)
        _stamp_writes(db, epoch)
        if covered is not None:
            db.execute("INSERT INTO covered (id, step) VALUES (1, ?)", (covered,))
        for table, columns in old.items():
            names = ", ".join(columns)
            db.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM old_{table}")
            db.execute(f"DROP TABLE old_{table}")


# -- damage ------------------------------------------------------------------------------------------------------------


@contextmanager
def reporting_damage(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of decoding that mean a damaged journal into `BadInput`."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except (sqlite3.DatabaseError, msgspec.DecodeError, ValueError, TypeError) as error:  # such as text in a number
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in OTHER_ERRORS:
            raise
        raise BadInput(f"the journal is damaged: {error}", file=path, fix=RESTORE) from error


def find_damage(db: sqlite3.Connection) -> Iterator[str]:
    """Yield a sentence for each damage of the database; rows are checked only if the schema has checksums."""
    for (line,) in db.execute(f"PRAGMA integrity_check({MAX_REPORTED_ROWS})"):
        if line != "ok":
            yield f"SQLite's integrity check: {line}"
    if db.execute("PRAGMA user_version").fetchone()[0] != JOURNAL_SCHEMA:
        if "covered" in _tables(db):
            yield "its schema number does not match its tables"
        return
    if _definitions(db) != _definitions(_EMPTY_JOURNAL):
        yield "its tables are not those that Headrace creates"
        return
    db.text_factory = lambda content: content.decode(errors="surrogateescape")  # damaged text may not be UTF-8
    try:
        for table, columns in _tables(db).items():
            rows = db.execute(f"SELECT rowid, {', '.join(columns)}, {', '.join(_STAMP)} FROM main.{table}")
            damaged = (row[0] for row in rows if not _is_whole(row[1:]))
            for rowid in islice(damaged, MAX_REPORTED_ROWS):
                yield f"row {rowid} of table {table} does not match its checksum"
    finally:
        db.text_factory = str


def _is_whole(row: tuple[object, ...]) -> bool:
    try:
        return _checksum(row[:-1]) == row[-1]
    except UnicodeEncodeError:
        return False


def _definitions(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    rows = db.execute("SELECT type, name, tbl_name, sql FROM main.sqlite_schema ORDER BY type, name").fetchall()
    return [(*row[:3], " ".join(str(row[3]).split())) for row in rows]


_EMPTY_JOURNAL = sqlite3.connect(":memory:", check_same_thread=False)
"""An empty journal, to compare table definitions with."""
_create_tables(_EMPTY_JOURNAL)

_WAL_HEADER = struct.Struct(">8I")
_FRAME_HEADER = struct.Struct(">6I")


def check_wal(path: Path) -> None:
    """Raise `BadInput` if SQLite would ignore a part of the write-ahead log because of damage in it.

    A transaction that was being written when the process was killed is not damage: nothing comes after it.
    """
    wal = wal_path(path)
    content = wal.read_bytes() if has_wal(path) else b""
    while content and (place := _find_ignored_part(content)) is not None:
        reread = wal.read_bytes() if has_wal(path) else b""
        if reread == content:  # else a process was writing
            raise BadInput(
                f"the journal's write-ahead log is damaged at byte {place}: the commits from there on are lost",
                file=wal,
                fix=f"Restore copies of it and of {path.name} from the same time. Without them, delete both to start "
                "over, or export the newest checkpoint with `headrace export`.",
            )
        content = reread


def _find_ignored_part(log: bytes) -> int | None:
    """Return the offset of the first damage in bytes, if frames of the current log follow it; None otherwise."""
    if len(log) < _WAL_HEADER.size:
        return 0
    magic, _, page_size, _, *salts, sum0, sum1 = _WAL_HEADER.unpack_from(log)
    order = ">" if magic & 1 else "<"
    sums = _wal_checksum(log[: _WAL_HEADER.size - 8], (0, 0), order)
    if magic & ~1 != 0x377F0682 or sums != (sum0, sum1):
        return 0
    size, damaged = _FRAME_HEADER.size + page_size, None
    for start in range(_WAL_HEADER.size, len(log) - size + 1, size):
        _, _, *frame_salts, sum0, sum1 = _FRAME_HEADER.unpack_from(log, start)
        if damaged is None:
            covered = log[start : start + 8] + log[start + _FRAME_HEADER.size : start + size]
            sums = _wal_checksum(covered, sums, order)
            if frame_salts != salts or sums != (sum0, sum1):
                damaged = start
        elif frame_salts == salts:
            return damaged
    return None


def _wal_checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    """Return SQLite's running checksum (a, b) of a write-ahead log after `content`.

    Each pair of words (x, y) changes it to a' = a + x + b, b' = b + y + a': a product with [[1, 1], [1, 2]], modulo
    2**32. The powers of that matrix are Fibonacci numbers, so the sums over all pairs are dot products.
    """
    words = np.frombuffer(content, f"{order}u4").astype(np.uint32).reshape(-1, 2)
    words[:, 1] += words[:, 0]
    words = np.concatenate([np.array([sums], np.uint32), words])
    powers = _matrix_powers(len(words))
    first = powers[:, :2] * words
    second = powers[:, 1:] * words
    return int(first.sum(dtype=np.uint32)), int(second.sum(dtype=np.uint32))


@cache
def _matrix_powers(count: int) -> np.ndarray:
    """Return the entries (1, 1), (1, 2) and (2, 2) of [[1, 1], [1, 2]] to the powers `count - 1` to 0."""
    powers = [(1, 0, 1)]
    for _ in range(count - 1):
        one, two, three = powers[-1]
        powers.append(((one + two) % 2**32, (two + three) % 2**32, (two + 2 * three) % 2**32))
    return np.array(powers[::-1], np.uint32)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block as a transaction, which is rolled back if the block raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
