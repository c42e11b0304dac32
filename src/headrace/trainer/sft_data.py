"""SFT data: rows of files or datasets as conversations, their order in training, and the validation set.

Rows come from JSONL and Parquet files, a directory of them, or a Hugging Face dataset. A seed fixes their order and
which are held out. The stream of examples is endless and can start anywhere, so a resumed run trains on exactly the
examples of an uninterrupted one.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.config.sft import SftConfig, SourceConfig
from headrace.environments.base import Environment
from headrace.environments.data.tables import Table, dataset_table, dataset_title, directory_tables, file_table
from headrace.environments.registry import load_environment
from headrace.errors import DataError
from headrace.rollout.fingerprint import fingerprint
from headrace.rollout.types import Sample
from headrace.text.sft_conversation import SftConversation, parse_row, row_columns

log = logging.getLogger(__name__)

VALIDATION_SEED = 2**31 - 1
"""Seed of a validation set with its own source: independent of the run's seed, so that runs are comparable."""


class Conversations(Protocol):
    """A sequence of conversations: `Rows`, some of them, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> SftConversation: ...


class Subset:
    """Some of the conversations, by index."""

    def __init__(self, rows: Conversations, numbers: np.ndarray) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> SftConversation:
        return self._rows[int(self._numbers[number])]


class Rows:
    """The conversations of several tables, concatenated.

    Every row is checked before training starts, so that an invalid one cannot end a run after hours. Rows are not kept
    as Python objects: they are read again when they are used.
    """

    def __init__(self, tables: list[Table], columns: Mapping[str, str], name: str) -> None:
        self._tables, self._columns = tables, columns
        self._ends = list(accumulate(map(len, tables)))
        if not len(self):
            raise DataError("has no rows", file=name)
        self.name = name
        self.have_tools = False
        """Whether any row has tools."""
        self.fingerprint = fingerprint(self._checked())
        log.info("%s: %d rows", name, len(self))

    def _checked(self) -> Iterator[list[Any]]:
        """Yield the content of each row; the first invalid row raises."""
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
    """Return the rows of a JSONL or Parquet file, or of all such files below a directory in name order."""
    return Rows(_tables(path, columns or {}), columns or {}, str(path))


def sample_rows(path: Path, columns: Mapping[str, str], most: int) -> list[SftConversation]:
    """Return at most `most` rows of the same files, checked, evenly spread over each file."""
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
    selected = partial(_selected, columns=columns)
    return directory_tables(path, selected) if path.is_dir() else [file_table(path, selected)]


def load_rows(name: str, subset: str | None, split: str, columns: Mapping[str, str] | None = None) -> Rows:
    """Return the rows of a Hugging Face dataset, on the hub or in a local directory."""
    columns = columns or {}
    table = dataset_table(name, subset, split, partial(_selected, columns=columns))
    return Rows([table], columns, dataset_title(name, subset, split))


def _selected(existing: list[str], columns: Mapping[str, str]) -> list[str]:
    """Return the columns to read; all of them if they do not make a conversation, for the error message."""
    read = row_columns(columns)
    enough = read.get("messages") in existing or {read.get("prompt"), read.get("completion")} <= set(existing)
    return [name for name in existing if name in read.values()] if enough else existing


def from_environment(environment: Environment, seed: int, position: int) -> Iterator[SftConversation]:
    """Return the environment's demonstrations from `position` on."""
    demonstrations = islice(environment.demonstrations(seed), position, None)
    return (SftConversation(shown.messages, tools=shown.tools or None) for shown in demonstrations)


def from_rows(rows: Conversations, seed: int, position: int) -> Iterator[SftConversation]:
    """Yield endless epochs over the rows from `position` on, each in its own order."""
    epoch, start = divmod(position, len(rows))
    while True:
        order = _random(seed, epoch).permutation(len(rows))
        yield from (rows[index] for index in order[start:].tolist())
        epoch, start = epoch + 1, 0


def hold_out(rows: Conversations, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Split the rows into those to train on and a random `fraction`, at least one, to validate on."""
    held = max(1, round(fraction * len(rows)))
    if held >= len(rows):
        raise DataError(
            f"validation.fraction {fraction} of {len(rows)} rows leaves none to train on: use more data, or another "
            "source for validation"
        )
    order = _random(seed, 0, 1).permutation(len(rows))
    return Subset(rows, np.sort(order[held:])), Subset(rows, order[:held])


def fixed_sample(rows: Conversations, most: int) -> list[SftConversation]:
    """Return at most `most` rows, the same ones each time."""
    return list(islice(from_rows(rows, VALIDATION_SEED, 0), min(most, len(rows))))


def open_conversations(
    config: SftConfig, rows: Rows | None, position: int
) -> tuple[Iterator[SftConversation], list[SftConversation]]:
    """Return the training conversations from example number `position` on, and those of the validation set.

    Without `rows` they are the demonstrations of an environment.
    """
    data, validation = config.data, config.validation
    if rows is None:
        assert data.env is not None
        training = from_environment(load_environment(data.env, data.args), config.seed, position)
    else:
        if validation is not None and validation.fraction is not None:
            kept, held_out = hold_out(rows, validation.fraction, config.seed)
            return from_rows(kept, config.seed, position), fixed_sample(held_out, validation.max_examples)
        training = from_rows(rows, config.seed, position)
    if validation is None:
        return training, []
    if validation.env is None:
        return training, fixed_sample(open_rows(validation), validation.max_examples)
    demonstrations = from_environment(load_environment(validation.env, validation.args), VALIDATION_SEED, 0)
    return training, list(islice(demonstrations, validation.max_examples))


def open_rows(source: SourceConfig) -> Rows:
    columns = source.columns.model_dump(exclude_none=True)
    if source.path is not None:
        return read_rows(source.path, columns)
    assert source.name is not None  # the config requires path, name or env
    return load_rows(source.name, source.subset, source.split or "train", columns)


class TruncationMonitor:
    """Counts examples longer than `seq_len`, and notifies the first time.

    A run in which no example has trained tokens left is refused after `MIN_EXAMPLES`, or at its end.
    """

    MIN_EXAMPLES = 64

    def __init__(self, seq_len: int, notify: Callable[[str], None] = log.warning) -> None:
        self._seq_len, self._notify = seq_len, notify
        self._notified = False
        self._seen = self._lost = self._longest = 0

    def count(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return `data/truncated`, and `data/not_learned`, the examples without any trained token left."""
        cut = sum(len(sample) > self._seq_len for sample in samples)
        lost = sum(not sample.mask[1 : self._seq_len].any() for sample in samples)
        self._seen += len(samples)
        self._lost += lost
        self._longest = max(self._longest, *map(len, samples))
        if self._seen >= self.MIN_EXAMPLES:
            self.refuse_if_nothing_is_learned()
        if (cut or lost) and not self._notified:
            self._notify(
                f"{cut} of {len(samples)} examples are longer than seq_len = {self._seq_len} and are truncated; {lost} "
                "have no trained tokens left (counted per step as data/truncated and data/not_learned)"
            )
            self._notified = True
        return {"data/truncated": cut, "data/not_learned": lost}

    def refuse_if_nothing_is_learned(self) -> None:
        """Raise if no example so far has trained tokens left."""
        if self._seen and self._lost == self._seen:
            fact = f"none of {self._seen} examples, of up to {self._longest} tokens, has trained tokens left"
            raise DataError(fact, key="seq_len", value=self._seq_len, fix=f"Raise seq_len to at least {self._longest}.")


def _random(*seeds: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64 for seed in seeds])
