"""The rows of a data set as conversations: of JSONL and Parquet files, a directory of them, or a Hugging Face dataset.

Every row is checked before training starts, so that a bad one cannot end a run after hours. None is kept as Python
objects: JSONL stays on disk, Parquet and datasets stay in Arrow's memory, and a row is read again when its turn comes.
Left out on purpose: datasets that stream, since an order that a resume can repeat needs every row by its number.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.trainer.conversation import Conversation, DataError, columns_read, conversation_of

log = logging.getLogger(__name__)

IN_DIRECTORIES = (".jsonl", ".parquet")
"""Which files of a directory are data. A file that is named may also be JSON lines called `.json`."""


class Table(Protocol):
    """Raw rows by number, and how errors call each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def where(self, index: int) -> str: ...


class Rows:
    """The conversations of several tables, one table after the other."""

    def __init__(self, tables: list[Table], columns: Mapping[str, str], name: str) -> None:
        self._tables = tables
        self._columns = columns
        self._ends = list(accumulate(map(len, tables)))
        if not len(self):
            raise DataError(f"{name}: has no rows")
        for table in tables:
            for row, content in enumerate(table):
                conversation_of(content, columns, table.where(row))  # the first bad row is an error
        log.info("%s: %d rows", name, len(self))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Conversation:
        number = bisect_right(self._ends, index)
        table = self._tables[number]
        row = index - (self._ends[number] - len(table))
        return conversation_of(table[row], self._columns, table.where(row))


def read_rows(path: Path, columns: Mapping[str, str] | None = None) -> Rows:
    """Every row of a JSONL or Parquet file, or of all such files below a directory in the order of their names."""
    columns = columns or {}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in IN_DIRECTORIES and file.is_file())
        if not files:
            raise DataError(f"{path}: has no {' or '.join(IN_DIRECTORIES)} file")
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: no such file or directory")
    return Rows([_table(file, columns) for file in files], columns, str(path))


def load_rows(name: str, subset: str | None, split: str, columns: Mapping[str, str] | None = None) -> Rows:
    """Every row of a Hugging Face dataset: one on the hub, or a local directory that the library understands."""
    columns = columns or {}
    title = f"dataset {name!r}, {f'subset {subset!r}, ' if subset else ''}split {split!r}"
    return Rows([_Dataset(_load(name, subset, split, title), columns, title)], columns, title)


def _table(file: Path, columns: Mapping[str, str]) -> Table:
    if file.suffix == ".parquet":
        return _Parquet(file, columns)
    if file.suffix in (".jsonl", ".json"):
        return _JsonLines(file)
    raise DataError(f"{file}: expected a .jsonl or .parquet file, or a directory of them")


class _JsonLines:
    """Of the file only the places where its lines start are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        start = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        with open(self._path, "rb") as file:
            file.seek(self._starts[index])
            return self._decode(file.readline(), index)

    def __iter__(self) -> Iterator[Any]:
        with open(self._path, "rb") as file:
            lines = (line for line in file if not line.isspace())
            yield from (self._decode(line, index) for index, line in enumerate(lines))

    def _decode(self, line: bytes, index: int) -> Any:
        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{self.where(index)}: not valid JSON: {error}") from error

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._numbers[index]}"


class _Parquet:
    """The columns that are read, in Arrow's memory."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            known = pyarrow.parquet.read_schema(path).names
            self._table = pyarrow.parquet.read_table(path, columns=_wanted(known, columns))
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Any:
        return _row(self._table.slice(index, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1000):
            yield from map(_row, batch.to_pylist())

    def where(self, index: int) -> str:
        return f"{self._path}, row {index + 1}"


class _Dataset:
    """A loaded `datasets.Dataset`, which lies on disk in Arrow's format."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], title: str) -> None:
        self._dataset = dataset.select_columns(_wanted(dataset.column_names, columns))
        self._title = title

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _row(self._dataset[index])

    def __iter__(self) -> Iterator[Any]:
        return map(_row, self._dataset)

    def where(self, index: int) -> str:
        return f"{self._title}, row {index + 1}"


def _load(name: str, subset: str | None, split: str, title: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{title}: the datasets library is not installed: pip install 'headrace[datasets]', or give data.path"
        ) from error
    datasets.disable_progress_bars()
    try:
        if not _is_saved_to_disk(Path(name)):
            return datasets.load_dataset(name, subset, split=split)
        saved = datasets.load_from_disk(name)
    except ConnectionError as error:
        raise DataError(f"{title}: it is no local directory, and the hub cannot be reached: {error}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = f" ({error.__cause__!s:.300})" if error.__cause__ else ""
        raise DataError(f"{title} cannot be loaded: {type(error).__name__}: {error}{cause}") from error
    # What `save_to_disk` leaves is one split, which may know its name, or several.
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or split): saved}
    if split not in splits:
        raise DataError(f"{title}: there is no such split, only {', '.join(splits)}")
    return splits[split]


def _is_saved_to_disk(directory: Path) -> bool:
    return (directory / "state.json").is_file() or (directory / "dataset_dict.json").is_file()


def _wanted(known: list[str], columns: Mapping[str, str]) -> list[str]:
    """The columns that are read; all of them where those do not make a conversation, for an error to list."""
    read = columns_read(columns)
    enough = read.get("messages") in known or {read.get("prompt"), read.get("completion")} <= set(known)
    return [name for name in known if name in read.values()] if enough else known


def _row(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    """Without what Arrow fills in where one message or call lacks a field that another has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
