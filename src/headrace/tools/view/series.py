"""Metrics of a run as columns: read once, extended as the file grows, merged into buckets for a chart.

A run of 10,000 steps writes tens of megabytes, of which a page shows a few dozen metrics. Only the columns that are
asked for are decoded, the others are skipped by the JSON decoder, and each is kept as two arrays of numbers.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from io import RawIOBase
from itertools import compress, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple

from headrace.observe.histograms import PREFIX

CHUNK_BYTES = 256 << 10
"""What is decoded at once: more records than fit into a cache of the processor take a fifth longer."""
NAMES_BYTES = 256 << 10
"""At either end of a large file, what is searched for the names of metrics."""
WINDOW_BYTES = 8 << 10
"""What is read at one place of a large file to find a record."""
SPARSE = ("eval/", "drift/")
"""Prefixes of metrics whose records follow no order of steps: they are recorded when they are done."""
Value = float | bool | str | None


class Column(msgspec.Struct):
    """One metric in the order of the file."""

    steps: array[int]
    values: array[float] | list[str]
    """Texts if it is a histogram."""

    def extend(self, steps: Sequence[int], values: Sequence[Value]) -> None:
        """Append the values of records with these steps; None and what has another type is left out."""
        types: set[type] = {str} if isinstance(self.values, list) else {int, float, bool}
        if not types.issuperset(map(type, values)):
            fits = [type(value) in types for value in values]
            steps, values = list(compress(steps, fits)), list(compress(values, fits))
        self.steps.extend(steps)
        self.values.extend(values)  # type: ignore[arg-type]


@lru_cache(maxsize=32)
def record_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lines to structs with a `step` and a field `f0`, `f1`, ... for each name."""
    fields: list[Any] = [("step", int), *((f"f{index}", Value, None) for index in range(len(names)))]
    rename = {f"f{index}": name for index, name in enumerate(names)}
    return msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=rename, gc=False))


def decode_lines(decoder: msgspec.json.Decoder[Any], content: bytes) -> Iterator[Any]:
    """Yield the records of whole lines; a line that a full disk has cut is left out."""
    try:
        yield from decoder.decode_lines(content)
    except msgspec.MsgspecError:
        for line in content.split(b"\n"):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError:
                continue


class MetricsTable:
    """The columns of one `metrics.jsonl` that were asked for so far. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._columns: dict[str, Column] = {}
        self._offset = 0
        """End of the lines that the columns contain."""
        self._names: dict[str, None] = {}
        self._named = 0
        """Size of the file when its names were read."""

    def names(self) -> list[str]:
        """Return the names of all metrics; of a large file, those near its ends."""
        with self._lock:
            size = self.path.stat().st_size if self.path.is_file() else 0
            if size != self._named:
                starts = [0] if size <= 2 * NAMES_BYTES else [0, size - NAMES_BYTES]
                decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
                for start in starts:
                    for record in decode_lines(decoder, read_lines(self.path, start, 2 * NAMES_BYTES)):
                        self._names.update(dict.fromkeys(record))
                self._named = size
            return sorted(
                name for name in self._names if name not in ("step", "time", "process") and not name.startswith(PREFIX)
            )

    @property
    def end(self) -> int:
        """Return the end of the lines that were read."""
        return self._offset

    def points(self, names: Iterable[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return steps and values of each metric by step; of steps that a resume repeated, the last value counts."""
        names = list(names)
        with self._lock:
            self._update(names)
            return {name: in_order(name, self._columns[name]) for name in names}

    def _update(self, names: list[str]) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self._offset:  # a resume from an earlier checkpoint has replaced the file
            self._columns, self._offset = {}, 0
        missing = [name for name in dict.fromkeys(names) if name not in self._columns]
        for name in missing:
            self._columns[name] = Column(array("q"), [] if name.startswith(PREFIX) else array("d"))
        if self._offset:
            self._append(missing, 0, self._offset)
        self._offset = self._append(list(self._columns), self._offset, size)

    def _append(self, names: list[str], start: int, end: int) -> int:
        """Append the records between two places of the file to columns; return the end of the last whole line."""
        if not names or start >= end:
            return start
        decoder = record_decoder(tuple(names))
        columns = [self._columns[name] for name in names]
        with open(self.path, "rb") as file:
            file.seek(start)
            rest = b""
            while start < end and (content := file.read(min(CHUNK_BYTES, end - start))):
                start += len(content)
                whole, newline, rest = (rest + content).rpartition(b"\n")
                append_records(columns, [astuple(record) for record in decode_lines(decoder, whole + newline)])
        return start - len(rest)


def append_records(columns: list[Column], records: list[tuple[Any, ...]]) -> None:
    """Append records, each a step and a value for each column, to the columns.

    Records of one kind, those of a trainer's step for example, have as many metrics and mostly the same ones. A metric
    of one kind alone is appended as a whole, which takes half the time of value by value.
    """
    kinds: dict[int, list[tuple[Any, ...]]] = {}
    for record in records:
        kinds.setdefault(record.count(None), []).append(record)
    additions: dict[int, list[tuple[Sequence[int], Sequence[Value]]]] = {}
    for kind in kinds.values():
        steps, *all_values = zip(*kind, strict=True)
        numbers = array("q", steps)
        for place, values in enumerate(all_values):
            if values.count(None) < len(values):
                additions.setdefault(place, []).append((numbers, values))
    for place, parts in additions.items():
        if len(parts) > 1:  # of several kinds: in the order of the file
            parts = [([record[0] for record in records], [record[place + 1] for record in records])]
        columns[place].extend(*parts[0])


def in_order(name: str, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Return a column by step, without values that were replaced: a run that goes back repeats steps."""
    steps = np.array(column.steps, np.int64)
    values = np.array(column.values, object if isinstance(column.values, list) else np.float64)
    if len(steps) == 0 or np.all(np.diff(steps) > 0):
        return steps, values
    if name.startswith(SPARSE):
        last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
        return steps[last], values[last]
    later = np.concatenate([np.minimum.accumulate(steps[::-1])[::-1][1:], [np.iinfo(np.int64).max]])
    return steps[steps < later], values[steps < later]


def read_lines(path: Path, start: int, limit: int) -> bytes:
    """Return the whole lines among `limit` bytes from a place of the file on."""
    with open(path, "rb", buffering=0) as file:
        return _lines(file, start, limit)


def _lines(file: RawIOBase, start: int, limit: int) -> bytes:
    file.seek(max(0, start - 1))  # to see whether a line begins at `start`
    content = file.read(limit + (start > 0)) or b""
    if start:
        content = content.partition(b"\n")[2]
    return content[: content.rfind(b"\n") + 1]


def sample_records(path: Path, names: tuple[str, ...], count: int) -> list[Any]:
    """Return about `count` records that have any of the metrics, evenly over the file, and the first and the last."""
    with open(path, "rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size <= count * WINDOW_BYTES:
            return list(find_records(_lines(file, 0, size), names))
        windows = [_lines(file, size * index // count, WINDOW_BYTES) for index in range(count - 1)]
        end = _lines(file, size - 4 * WINDOW_BYTES, 4 * WINDOW_BYTES)
    sampled = [record for lines in windows for record in islice(find_records(lines, names), 1)]
    return [*sampled, *islice(find_records(end, names, newest_first=True), 1)]


def find_records(lines: bytes, names: tuple[str, ...], newest_first: bool = False) -> Iterator[Any]:
    """Yield the records that have any of the metrics; only lines with one of the names are decoded."""
    decoder, keys = record_decoder(names), [b'"%s":' % name.encode() for name in names]
    find = lines.rfind if newest_first else lines.find
    first, last = 0, len(lines)
    while places := [place for key in keys if (place := find(key, first, last)) >= 0]:
        start = lines.rfind(b"\n", 0, max(places) if newest_first else min(places)) + 1
        end = lines.find(b"\n", start) + 1
        for record in decode_lines(decoder, lines[start:end]):
            if any(getattr(record, f"f{index}") is not None for index in range(len(names))):
                yield record
        first, last = (first, start) if newest_first else (end, last)


def downsample(steps: np.ndarray, values: np.ndarray, buckets: int) -> dict[str, Any]:
    """Return a series for a chart: as it is, or the mean, minimum and maximum of each of `buckets` ranges of steps."""
    if len(steps) <= buckets:
        return {"step": steps.tolist(), "mean": numbers(values)}
    edges = np.linspace(steps[0], steps[-1] + 1, buckets + 1)
    starts = np.unique(np.searchsorted(steps, edges[:-1]))
    starts = starts[starts < len(steps)]
    counts = np.diff([*starts, len(steps)])
    return {
        "step": steps[starts].tolist(),
        "mean": numbers(np.add.reduceat(values, starts) / counts),
        "min": numbers(np.minimum.reduceat(values, starts)),
        "max": numbers(np.maximum.reduceat(values, starts)),
    }


def numbers(values: np.ndarray) -> list[float | None]:
    """Return values for JSON: null for what is not finite."""
    listed: list[float | None] = values.tolist()
    for place in np.flatnonzero(~np.isfinite(values)):
        listed[place] = None
    return listed
