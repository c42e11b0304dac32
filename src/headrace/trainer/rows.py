"""The rows of a data set as conversations: of JSONL and Parquet files, a directory of them, or a Hugging Face dataset.

Every row is checked before training starts, so that a bad one cannot end a run after hours. None is kept as Python
objects: it is read again when its turn comes.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from headrace.environments.data.tables import Table, dataset_table, dataset_title, directory_tables, file_table
from headrace.errors import DataError
from headrace.rollout.fingerprint import fingerprint
from headrace.text.sft_conversation import SftConversation, parse_row, row_columns

log = logging.getLogger(__name__)


class Rows:
    """The conversations of several tables, one table after the other."""

    def __init__(self, tables: list[Table], columns: Mapping[str, str], name: str) -> None:
        self._tables = tables
        self._columns = columns
        self._ends = list(accumulate(map(len, tables)))
        if not len(self):
            raise DataError("has no rows", file=name)
        self.name = name
        self.have_tools = False
        """Whether any row says which tools there are."""
        self.fingerprint = fingerprint(self._checked())
        log.info("%s: %d rows", name, len(self))

    def _checked(self) -> Iterator[list[Any]]:
        """What is read of each row, once, before anything is trained: the first bad row is an error."""
        for table in self._tables:
            for row, content in enumerate(table):
                conversation = parse_row(content, self._columns, table.place(row))
                self.have_tools = self.have_tools or bool(conversation.tools)
                yield [conversation.messages, conversation.is_trained, conversation.tools]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> SftConversation:
        number = bisect_right(self._ends, index)
        table = self._tables[number]
        row = index - (self._ends[number] - len(table))
        return parse_row(table[row], self._columns, table.place(row))


def read_rows(path: Path, columns: Mapping[str, str] | None = None) -> Rows:
    """Every row of a JSONL or Parquet file, or of all such files below a directory in the order of their names."""
    return Rows(_tables(path, columns or {}), columns or {}, str(path))


def sample_rows(path: Path, columns: Mapping[str, str], most: int) -> list[SftConversation]:
    """Return at most so many rows of the same files, checked, evenly spread over each file."""
    tables = _tables(path, columns)
    if not any(map(len, tables)):
        raise DataError("has no rows", file=path)
    share = max(1, most // len(tables))
    return [
        parse_row(table[row], columns, table.place(row))
        for table in tables
        for row in range(0, len(table), max(1, len(table) // share))
    ][:most]


def _tables(path: Path, columns: Mapping[str, str]) -> list[Table]:
    if not path.exists():
        raise DataError("no such file or directory", file=path)
    wanted = partial(_wanted, columns=columns)
    return directory_tables(path, wanted) if path.is_dir() else [file_table(path, wanted)]


def load_rows(name: str, subset: str | None, split: str, columns: Mapping[str, str] | None = None) -> Rows:
    """Every row of a Hugging Face dataset: one on the hub, or a local directory that the library understands."""
    columns = columns or {}
    table = dataset_table(name, subset, split, partial(_wanted, columns=columns))
    return Rows([table], columns, dataset_title(name, subset, split))


def _wanted(known: list[str], columns: Mapping[str, str]) -> list[str]:
    """The columns that are read; all of them where those do not make a conversation, for an error to list."""
    read = row_columns(columns)
    enough = read.get("messages") in known or {read.get("prompt"), read.get("completion")} <= set(known)
    return [name for name in known if name in read.values()] if enough else known
