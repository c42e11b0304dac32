"""The rows of a data set, wherever it lies: a file, a directory, or a Hugging Face dataset by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

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
    """What one row holds, and how errors call it. `columns` gives some of its columns other names: ours to theirs."""

    def __init__(self, content: Any, where: str, columns: Mapping[str, str] | None = None) -> None:
        if not isinstance(content, dict):
            raise DataError(f"{where}: expected an object with columns, not {content!r:.60}")
        self._columns = columns = columns or {}
        for ours, theirs in columns.items():
            if theirs not in content:
                raise DataError(
                    f"{where}: has no {theirs!r}, which columns.{ours} names; its columns are {sorted(content)}"
                )
        others = {name: value for name, value in content.items() if name not in columns.values()}
        self.content: dict[str, Any] = {**others, **{ours: content[theirs] for ours, theirs in columns.items()}}
        self.where = where

    def find(self, *names: str) -> Any:
        """What it has under the first of these names that it has, or None."""
        return next((self.content[name] for name in names if self.content.get(name) is not None), None)

    def text(self, *names: str) -> str:
        """The same, which must be there and be a text. The first name is ours."""
        value = self.find(*names)
        if value is None:
            if empty := [name for name in names if name in self.content]:
                raise DataError(f"{self.where}: {self._columns.get(empty[0], empty[0])!r} is null")
            raise DataError(
                f"{self.where}: has no {' or '.join(map(repr, names))}; its columns are {sorted(self.content)}. "
                f"Name the one that is meant: columns = {{{names[0]} = ...}}"
            )
        if not isinstance(value, str):
            raise DataError(f"{self.where}: the {names[0]} is not a text: {value!r:.60}")
        return value


def read_rows(
    source: str | Path,
    split: str | None = None,
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows as dicts. `columns` gives some of them other names: ours to theirs.

    `source` is a JSONL or Parquet file; a directory with a file per split, or, without `split`, with any files; a
    directory that the datasets library has written or understands; or the name of a dataset on the hub.
    """
    for row in islice(located_rows(source, split, subset, columns), limit):
        yield row.content


def located_rows(
    source: str | Path,
    split: str | None = None,
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The same rows with their places."""
    for table in _tables(source, split, subset):
        for index, content in enumerate(table):
            yield Row(content, table.where(index), columns)


def _tables(source: str | Path, split: str | None, subset: str | None) -> list[Table]:
    path = Path(source)
    if path.is_file() or path.suffix in FILES:
        return [file_table(path)]
    if not path.is_dir():
        return [dataset_table(str(source), subset, split or DEFAULT_SPLIT)]
    files = [path / (subset or "") / f"{split}{suffix}" for suffix in FILES]
    found = [file for file in files if split and file.is_file()]
    if found:
        return [file_table(found[0])]
    if split is None and subset is None and not is_saved_dataset(path):
        return directory_tables(path)
    return [dataset_table(str(path), subset, split or DEFAULT_SPLIT)]
