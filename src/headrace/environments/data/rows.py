"""The rows of a data set: a file, a directory, or a Hugging Face dataset by its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.data.tables import (
    DataError,
    Table,
    dataset_table,
    directory_tables,
    file_table,
    is_saved_dataset,
)

DEFAULT_SPLIT = "train"
FILES = (".jsonl", ".json", ".parquet")


class Row:
    """The columns of one row, and its file and line. `columns` maps our names of columns to those of the data."""

    def __init__(self, content: Any, place: tuple[str, int], columns: Mapping[str, str] | None = None) -> None:
        self.place = place
        if not isinstance(content, dict):
            raise self.error("expected an object with columns", value=content)
        self._columns = columns = columns or {}
        for ours, theirs in columns.items():
            if theirs not in content:
                fix = f"Its columns are {', '.join(sorted(content))}."
                raise self.error("the row has no such column", key=f"columns.{ours}", value=theirs, fix=fix)
        others = {name: value for name, value in content.items() if name not in columns.values()}
        self.content: dict[str, Any] = {**others, **{ours: content[theirs] for ours, theirs in columns.items()}}

    def error(self, fact: str, *, key: str | None = None, value: Any = None, fix: str | None = None) -> DataError:
        """Return an error that names the row's file and line."""
        file, line = self.place
        return DataError(fact, key=key, value=value, fix=fix, file=file, line=line)

    def find(self, *names: str) -> Any:
        """Return the value of the first of these columns that is not null, or None."""
        return next((self.content[name] for name in names if self.content.get(name) is not None), None)

    def text(self, *names: str) -> str:
        """Return the same value, which must be a text. The first name is ours."""
        value = self.find(*names)
        if value is None:
            if empty := [name for name in names if name in self.content]:
                raise self.error("the value is null", key=self._columns.get(empty[0], empty[0]))
            raise self.error(
                f"the row has no column {' or '.join(map(repr, names))}, only {', '.join(sorted(self.content))}",
                key=names[0],
                fix=f"Name the column: columns = {{{names[0]} = ...}}.",
            )
        if not isinstance(value, str):
            raise self.error("expected a text", key=names[0], value=value)
        return value


def example_key(prompt: str, answer: str, data: Mapping[str, Any]) -> str:
    """Return the name of an example, by which records of other runs find it: its `key`, else a checksum."""
    key = data.get("key")
    return key if isinstance(key, str) and key else checksum(prompt, answer)


def checksum(*texts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(texts)).hexdigest()[:16]


def read_rows(
    source: str | Path,
    split: str | None = None,
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows as dicts. `columns` maps our names of columns to those of the data.

    `source` is a JSONL or Parquet file; a directory with a file per split, or, without `split`, with any files; a
    directory that the datasets library can load; or the name of a dataset on the hub.
    """
    for row in islice(located_rows(source, split, subset, columns), limit):
        yield row.content


def located_rows(
    source: str | Path,
    split: str | None = None,
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield the same rows with their file and line."""
    for table in _tables(source, split, subset):
        for index, content in enumerate(table):
            yield Row(content, table.place(index), columns)


def _tables(source: str | Path, split: str | None, subset: str | None) -> list[Table]:
    path = Path(source)
    if path.is_file() or path.suffix in FILES:
        return [file_table(path)]
    if not path.is_dir():
        return [dataset_table(str(source), subset, split or DEFAULT_SPLIT)]
    files = [path / (subset or "") / f"{split}{suffix}" for suffix in FILES]
    existing = [file for file in files if split and file.is_file()]
    if existing:
        return [file_table(existing[0])]
    if split is None and subset is None and not is_saved_dataset(path):
        return directory_tables(path)
    return [dataset_table(str(path), subset, split or DEFAULT_SPLIT)]
