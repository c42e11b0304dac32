"""Training data: rows of files or datasets as conversations or pairs, their order, and the validation set.

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
from typing import Any, NamedTuple, Protocol

import numpy as np
from renderers.base import Renderer

from headrace.config.dpo import PairsConfig
from headrace.config.sft import ConversationsConfig, OfflineConfig, SourceConfig
from headrace.environments.base import Environment
from headrace.environments.registry import load_environment
from headrace.environments.tables import (
    DEFAULT_SPLIT,
    Table,
    dataset_title,
    open_dataset_table,
    open_directory_tables,
    open_file_table,
)
from headrace.errors import DataError
from headrace.rollout.digest import fingerprint
from headrace.rollout.types import Sample
from headrace.text.training_examples import Place, SftConversation, pair_columns, parse_pair, parse_row, row_columns

log = logging.getLogger(__name__)

VALIDATION_SEED = 2**31 - 1
"""Seed of a validation set with its own source: independent of the run's seed, so that runs are comparable."""


class Example(Protocol):
    """What is trained on: a conversation, or a pair of them."""

    tools: list[dict[str, Any]] | None

    @property
    def content(self) -> list[Any]:
        """Everything that training depends on, for a digest."""

    @property
    def shared_content(self) -> Any:
        """What it may have in common with other examples, which are then held out together; None for nothing."""

    def samples(self, renderer: Renderer, seq_len: int) -> list[Sample]:
        """Return its tokens; those that the loss compares are next to each other."""


class Examples(Protocol):
    """A sequence of examples: `Rows`, some of them, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Example: ...


class RowFormat(NamedTuple):
    """How a row becomes an example."""

    parse: Callable[[Any, Mapping[str, str], Place], Example]
    columns: Callable[[Mapping[str, str]], dict[str, str]]
    """Returns our columns that are read, each with its name in the data, for the configured names."""
    required: Sequence[set[str]]
    """Sets of our columns of which a row needs one."""


CONVERSATIONS = RowFormat(parse_row, row_columns, ({"messages"}, {"prompt", "completion"}))
PAIRS = RowFormat(parse_pair, pair_columns, ({"chosen", "rejected"},))


def format_of(source: SourceConfig) -> RowFormat:
    return PAIRS if isinstance(source, PairsConfig) else CONVERSATIONS


class Subset:
    """Some of the examples, by index."""

    def __init__(self, rows: Examples, numbers: np.ndarray) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Example:
        return self._rows[int(self._numbers[number])]


class Rows:
    """The examples of several tables, concatenated.

    Every row is checked before training starts, so that an invalid one cannot end a run after hours. Rows are not kept
    as Python objects: they are read again when they are used.
    """

    def __init__(
        self,
        tables: list[Table],
        columns: Mapping[str, str],
        name: str,
        parse: Callable[[Any, Mapping[str, str], Place], Example],
    ) -> None:
        self._tables, self._columns, self._parse = tables, columns, parse
        self._ends = list(accumulate(map(len, tables)))
        if not len(self):
            raise DataError("has no rows", file=name)
        self.name = name
        self.have_tools = False
        """Whether any row has tools."""
        self.related_digests: list[str] = []
        """For each row a digest of what it may have in common with others; empty if rows have nothing of that kind."""
        self.fingerprint = fingerprint(self._check_rows())
        log.info("%s: %d rows", name, len(self))

    def _check_rows(self) -> Iterator[list[Any]]:
        """Yield the content of each row; the first invalid row raises."""
        for table in self._tables:
            for row, content in enumerate(table):
                example = self._parse(content, self._columns, table.place(row))
                self.have_tools = self.have_tools or bool(example.tools)
                if (shared := example.shared_content) is not None:
                    self.related_digests.append(fingerprint([shared]).digest)
                yield example.content

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Example:
        number = bisect_right(self._ends, index)
        table = self._tables[number]
        row = index - (self._ends[number] - len(table))
        return self._parse(table[row], self._columns, table.place(row))


def open_rows(source: SourceConfig) -> Rows | None:
    """Return the rows of files or of a Hugging Face dataset; None if the examples are those of an environment."""
    columns, parse = source.columns.model_dump(exclude_none=True), format_of(source).parse
    if source.path is not None:
        return Rows(_open_tables(source.path, source), columns, str(source.path), parse)
    if source.name is None:
        return None
    split = source.split or DEFAULT_SPLIT
    table = open_dataset_table(source.name, source.subset, split, partial(_select_columns, source=source))
    return Rows([table], columns, dataset_title(source.name, source.subset, split), parse)


def sample_rows(path: Path, source: SourceConfig, limit: int) -> list[Example]:
    """Return at most `limit` rows of the same files, checked, evenly spread over each file."""
    tables = _open_tables(path, source)
    if not any(map(len, tables)):
        raise DataError("has no rows", file=path)
    share = max(1, limit // len(tables))
    columns, parse = source.columns.model_dump(exclude_none=True), format_of(source).parse
    return [
        parse(table[row], columns, table.place(row))
        for table in tables
        for row in range(0, len(table), max(1, len(table) // share))
    ][:limit]


def _open_tables(path: Path, source: SourceConfig) -> list[Table]:
    """Return a JSONL or Parquet file, or all such files below a directory in name order."""
    if not path.exists():
        raise DataError("no such file or directory", file=path)
    selected = partial(_select_columns, source=source)
    return open_directory_tables(path, selected) if path.is_dir() else [open_file_table(path, selected)]


def _select_columns(existing: list[str], source: SourceConfig) -> list[str]:
    """Return the columns to read; all of them if they do not make an example, for the error message."""
    form = format_of(source)
    read = form.columns(source.columns.model_dump(exclude_none=True))
    enough = any({read.get(name) for name in names} <= set(existing) for names in form.required)
    return [name for name in existing if name in read.values()] if enough else existing


def from_environment(environment: Environment, seed: int, position: int) -> Iterator[SftConversation]:
    """Return the environment's demonstrations from `position` on."""
    demonstrations = islice(environment.demonstrations(seed), position, None)
    return (SftConversation(shown.messages, tools=shown.tools or None) for shown in demonstrations)


def from_rows(rows: Examples, seed: int, position: int) -> Iterator[Example]:
    """Yield endless epochs over the rows from `position` on, each in its own order."""
    epoch, start = divmod(position, len(rows))
    while True:
        order = _make_rng(seed, epoch).permutation(len(rows))
        yield from (rows[index] for index in order[start:].tolist())
        epoch, start = epoch + 1, 0


def hold_out(rows: Examples, fraction: float, seed: int, related: Sequence[str] = ()) -> tuple[Subset, Subset]:
    """Split the rows into those to train on and a random `fraction`, at least one, to validate on.

    `related`: a word for each row; rows with the same word are on the same side.
    """
    groups = np.unique(related, return_inverse=True)[1] if len(related) else np.arange(len(rows))
    shuffled = _make_rng(seed, 0, 1).permutation(groups.max() + 1)
    order = np.argsort(np.argsort(shuffled)[groups], kind="stable")  # of the rows, group by group
    ends = np.cumsum(np.bincount(groups)[shuffled])
    held = int(ends[np.searchsorted(ends, max(1, round(fraction * len(rows))))])
    if held >= len(rows):
        fact, fix = f"none of {len(rows)} rows is left to train on", "Use more data, or another source for validation."
        raise DataError(fact, key="validation.fraction", value=fraction, fix=fix)
    return Subset(rows, np.sort(order[held:])), Subset(rows, order[:held])


def fixed_sample(rows: Examples, limit: int) -> list[Example]:
    """Return at most `limit` rows, the same ones each time."""
    return list(islice(from_rows(rows, VALIDATION_SEED, 0), min(limit, len(rows))))


def open_examples(config: OfflineConfig, rows: Rows | None, position: int) -> tuple[Iterator[Example], list[Example]]:
    """Return the training examples from number `position` on, and those of the validation set.

    Without `rows` they are the demonstrations of an environment.
    """
    validation = config.validation
    if rows is None:
        training: Iterator[Example] = _demonstrations(config.data, config.seed, position)
    else:
        if validation is not None and validation.fraction is not None:
            kept, held_out = hold_out(rows, validation.fraction, config.seed, rows.related_digests)
            return from_rows(kept, config.seed, position), fixed_sample(held_out, validation.max_examples)
        training = from_rows(rows, config.seed, position)
    if validation is None:
        return training, []
    if (held_out_rows := open_rows(validation)) is not None:
        return training, fixed_sample(held_out_rows, validation.max_examples)
    return training, list(islice(_demonstrations(validation, VALIDATION_SEED, 0), validation.max_examples))


def _demonstrations(source: SourceConfig, seed: int, position: int) -> Iterator[SftConversation]:
    assert isinstance(source, ConversationsConfig) and source.env is not None  # pairs have no other source
    return from_environment(load_environment(source.env, source.args), seed, position)


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


def _make_rng(*seeds: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64 for seed in seeds])
