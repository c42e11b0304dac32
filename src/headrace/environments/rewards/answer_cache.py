"""A cache of a judge's replies: the most recently used in memory, and all of them in a file, if there is one.

The file is an SQLite database to which several processes may append at a time; entries never change, and a process
that is killed loses the entry that it was writing.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from pathlib import Path

from headrace.errors import BadInput

log = logging.getLogger(__name__)

SCHEMA = 1
LOCK_TIMEOUT_S = 10.0
"""Time to wait for another process that writes."""


class AnswerCache:
    """An LRU cache of `in_memory` entries, backed by the file `path` if there is one. It reopens after `close`.

    A file that fails later (a full disk) is logged once, and the cache goes on in memory.
    """

    def __init__(self, path: Path | None = None, in_memory: int = 10_000) -> None:
        self._path = path
        self._in_memory = in_memory
        self._latest: OrderedDict[str, str] = OrderedDict()
        self._opened: sqlite3.Connection | None = None
        self._reported = False
        self._file()  # refuse an unusable file now

    def get(self, key: str) -> str | None:
        if key not in self._latest:
            rows = self._execute("SELECT answer FROM answers WHERE key = ?", key)
            if rows:
                self._keep(key, rows[0][0])
        if key in self._latest:
            self._latest.move_to_end(key)
        return self._latest.get(key)

    def put(self, key: str, answer: str) -> None:
        self._keep(key, answer)
        self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, answer)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _execute(self, statement: str, *values: str) -> list[tuple[str, ...]]:
        file = self._file()
        if file is None:
            return []
        try:
            return file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if not self._reported:
                self._reported = True
                log.warning("the cache %s failed (%s): new replies may be kept in memory only", self._path, error)
            return []

    def _keep(self, key: str, answer: str) -> None:
        self._latest[key] = answer
        if len(self._latest) > self._in_memory:
            self._latest.popitem(last=False)

    def _file(self) -> sqlite3.Connection | None:
        if self._opened is None and self._path is not None:
            self._opened = _open(self._path)
        return self._opened


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        [[schema]] = file.execute("PRAGMA user_version").fetchall()
        if schema not in (0, SCHEMA):
            fact = f"it has schema {schema}, but this version of headrace reads {SCHEMA}"
            raise BadInput(fact, file=path, fix="Name another file.")
        file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID")
        file.execute(f"PRAGMA user_version = {SCHEMA}")
    except (sqlite3.Error, OSError) as error:
        raise BadInput(f"cannot be used as a cache: {error}", file=path) from error
    return file
