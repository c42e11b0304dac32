"""Rows of data sets: JSONL files, Parquet files and Hugging Face datasets.

`read_rows` yields the rows of any source; a `Table` has random access by row number. Rows are not kept as Python
objects: JSONL stays on disk, Parquet and datasets stay in Arrow memory, and a row is read on access. Left out on
purpose: streaming datasets, since a resume repeats the order by row numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import DataError as DataError

DEFAULT_SPLIT = "train"
FILES = (".jsonl", ".json", ".parquet")
IN_DIRECTORIES = (".jsonl", ".parquet")
"""Suffixes of data files in a directory. A single file may also be JSON lines with the suffix `.json`."""

ColumnSelector = Callable[[list[str]], list[str]]
"""Selects the columns that are read."""


class DataNotHere(DataError):
    """A dataset on the hub that is not in the cache and cannot be downloaded now."""


def all_columns(names: list[str]) -> list[str]:
    return names


def open_file_table(file: Path, select: ColumnSelector = all_columns) -> Table:
    if not file.is_file():
        raise DataError("no such file", file=file)
    if file.suffix == ".parquet":
        return Parquet(file, select)
    if file.suffix in (".jsonl", ".json"):
        return JsonLines(file)
    raise DataError("not a data file", file=file, fix="Give a .jsonl or .parquet file, or a directory of them.")


def open_directory_tables(directory: Path, select: ColumnSelector = all_columns) -> list[Table]:
    """Return the tables of all data files below a directory, sorted by name."""
    files = sorted(file for file in directory.rglob("*") if file.suffix in IN_DIRECTORIES and file.is_file())
    if not files:
        raise DataError(f"the directory has no {' or '.join(IN_DIRECTORIES)} file", file=directory)
    return [open_file_table(file, select) for file in files]


def open_dataset_table(name: str, subset: str | None, split: str, select: ColumnSelector = all_columns) -> Table:
    """Return the table of a Hugging Face dataset: one on the hub, or a local directory that the library can load."""
    title = dataset_title(name, subset, split)
    return Dataset(_load_dataset(name, subset, split, title), select, title)


def dataset_title(name: str, subset: str | None, split: str) -> str:
    """Return the name of a dataset for error messages."""
    return f"dataset {name!r}, {f'subset {subset!r}, ' if subset else ''}split {split!r}"


def is_saved_dataset(directory: Path) -> bool:
    """Return whether `save_to_disk` of the datasets library wrote a directory."""
    return (directory / "state.json").is_file() or (directory / "dataset_dict.json").is_file()


class JsonLines:
    """A JSONL file, of which only the offsets of the lines are in memory."""

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
            file, number = self.place(index)
            raise DataError(f"not valid JSON: {error}", file=file, line=number) from error

    def place(self, index: int) -> tuple[str, int]:
        return str(self._path), self._numbers[index]


class Parquet:
    """The selected columns of a Parquet file in Arrow memory."""

    def __init__(self, path: Path, select: ColumnSelector) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            names = pyarrow.parquet.read_schema(path).names
            self._table = pyarrow.parquet.read_table(path, columns=select(names))
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"cannot be read as Parquet: {error}", file=path) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Any:
        return _convert_row(self._table.slice(index, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1000):
            yield from map(_convert_row, batch.to_pylist())

    def place(self, index: int) -> tuple[str, int]:
        return str(self._path), index + 1


class Dataset:
    """A loaded `datasets.Dataset`, memory-mapped from disk."""

    def __init__(self, dataset: Any, select: ColumnSelector, title: str) -> None:
        self._dataset = dataset.select_columns(select(dataset.column_names))
        self._title = title

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _convert_row(self._dataset[index])

    def __iter__(self) -> Iterator[Any]:
        return map(_convert_row, self._dataset)

    def place(self, index: int) -> tuple[str, int]:
        return self._title, index + 1


Table = JsonLines | Parquet | Dataset
"""Rows by number; `place` returns the file or dataset of a row, and the line or row in it, from 1."""


def _load_dataset(name: str, subset: str | None, split: str, title: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        fix = "pip install 'headrace[datasets]', or give files instead."
        raise DataError("the datasets library is not installed", file=title, fix=fix) from error
    datasets.disable_progress_bars()
    try:
        if not is_saved_dataset(Path(name)):
            if Path(name).is_dir():  # check before all splits are read, which may have different columns
                files = datasets.load_dataset_builder(name, subset).config.data_files
                _check_split(split, [str(name) for name in files or ()], title)
            return datasets.load_dataset(name, subset, split=split)
        saved = datasets.load_from_disk(name)
    except ConnectionError as error:
        fix = "Give a directory of its files, or load it once where there is a network and copy the cache (HF_HOME)."
        fact = f"not a local directory, and the hub cannot be reached: {error}"
        raise DataNotHere(fact, file=title, fix=fix) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = f" ({error.__cause__!s:.300})" if error.__cause__ else ""
        raise DataError(f"cannot be loaded: {type(error).__name__}: {error}{cause}", file=title) from error
    # `save_to_disk` writes one split, perhaps with its name, or several.
    splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or split): saved}
    _check_split(split, list(splits), title)
    return splits[split]


def _check_split(split: str, splits: list[str], title: str) -> None:
    """Raise `DataError` for an unknown split. A slice such as `train[:100]` is left to the library."""
    if splits and split not in splits and split.replace("_", "").isalnum():
        raise DataError("no such split", key="split", value=split, file=title, fix=f"Splits: {', '.join(splits)}.")


def _convert_row(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls that Arrow adds where one message or call lacks a field of another."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


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
        """Return the text in the first of these columns that is not null, or raise. The first name is ours."""
        value = self.find(*names)
        if value is None:
            if empty := [name for name in names if name in self.content]:
                raise self.error("the value is null", key=self._columns.get(empty[0], empty[0]))
            fact = f"the row has no column {' or '.join(map(repr, names))}, only {', '.join(sorted(self.content))}"
            raise self.error(fact, key=names[0], fix=f"Name the column: columns = {{{names[0]} = ...}}.")
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
    for row in islice(read_located_rows(source, split, subset, columns), limit):
        yield row.content


def read_located_rows(
    source: str | Path, split: str | None = None, subset: str | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield the rows of `read_rows` with their file and line."""
    for table in _open_tables(source, split, subset):
        for index, content in enumerate(table):
            yield Row(content, table.place(index), columns)


def _open_tables(source: str | Path, split: str | None, subset: str | None) -> list[Table]:
    path = Path(source)
    if path.is_file() or path.suffix in FILES:
        return [open_file_table(path)]
    if not path.is_dir():
        return [open_dataset_table(str(source), subset, split or DEFAULT_SPLIT)]
    files = [path / (subset or "") / f"{split}{suffix}" for suffix in FILES]
    existing = [file for file in files if split and file.is_file()]
    if existing:
        return [open_file_table(existing[0])]
    if split is None and subset is None and not is_saved_dataset(path):
        return open_directory_tables(path)
    return [open_dataset_table(str(path), subset, split or DEFAULT_SPLIT)]
