r"""Data providers that ship: samples from data sets, files and generators, always the same ones for the same seed.

Each takes `instructions`, the words before the question (unset: those that ask for the strict format; "" for none), and
`tags`, the pair around the thoughts. Those that read a data set take `limit` and `shuffle`; their rows come in the
order of the file otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.data.gsm8k import NAME as GSM8K
from headrace.environments.data.gsm8k import gsm8k as gsm8k_rows
from headrace.environments.data.math import NAME as MATH
from headrace.environments.data.math import math as math_rows
from headrace.environments.data.rows import Row, located_rows
from headrace.environments.data.tables import DataError
from headrace.environments.hackable.registry import register_data_provider
from headrace.environments.hackable.samples import TrainingSample, asked
from headrace.environments.shipped.arithmetic import sums

Tags = Sequence[str] | None
Columns = Mapping[str, str] | None
Rows = Iterable[dict[str, Any]]


@register_data_provider
def gsm8k(
    source: str = GSM8K,
    split: str = "train",
    limit: int | None = None,
    columns: Columns = None,
    shuffle: bool = False,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Grade-school problems: the answer is the number after `####`. `info` has the `solution`."""
    return _asked(_chosen(gsm8k_rows(source, split, None, columns), limit, shuffle, seed), instructions, tags)


@register_data_provider
def math(
    source: str = MATH,
    split: str = "train",
    levels: Sequence[int] | None = None,
    subjects: Sequence[str] | None = None,
    limit: int | None = None,
    columns: Columns = None,
    shuffle: bool = False,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Competition problems: MATH of some levels and subjects, or AIME. `info` has `solution`, `level` and `subject`."""
    rows = math_rows(source, split, levels, subjects, None, columns)
    return _asked(_chosen(rows, limit, shuffle, seed), instructions, tags)


@register_data_provider
def local(
    path: str,
    columns: Columns = None,
    split: str | None = None,
    limit: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """A JSONL or Parquet file, or a directory of them. `columns` says what its columns are to us: `question`, `answer`.

    All other columns are in `info`; one that is called `key` names the example. What has no answer has an empty one.
    """
    if not Path(path).exists():
        raise DataError("no such file or directory", file=path)
    rows = (_row(row) for row in located_rows(path, split, None, columns))
    return _asked(_chosen(rows, limit, shuffle, seed), instructions, tags)


@register_data_provider
def huggingface(
    name: str,
    subset: str | None = None,
    split: str = "train",
    columns: Columns = None,
    limit: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """A Hugging Face dataset by its name, or one that the library has saved. Columns are as those of `local`."""
    rows = (_row(row) for row in located_rows(name, split, subset, columns))
    return _asked(_chosen(rows, limit, shuffle, seed), instructions, tags)


@register_data_provider
def reasoning_gym(
    family: str,
    split: str = "train",
    num_tasks: int = 500,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Tasks of one family of reasoning-gym, with its own `settings`. `info` has what `reasoning_gym_reward` needs."""
    from headrace.environments.adapters.reasoning_gym_tasks import Request, tasks_of_family

    own = dict(settings or {})
    tasks = tasks_of_family(Request(family, own, split, num_tasks, seed))
    return _asked(({**task, "family": family, "settings": own} for task in tasks), instructions, tags)


@register_data_provider
def arithmetic(
    split: str = "train",
    num_tasks: int = 2000,
    digits: int = 2,
    operations: str = "+-",
    seed: int = 0,
    instructions: str | None = None,
    tags: Tags = None,
) -> Iterator[TrainingSample]:
    """Sums, differences and products of whole numbers, made up. No question is in both splits, "train" and "eval"."""
    rows = sums(split, num_tasks, digits, operations, seed)
    return _asked(({**row, "solution": f"{row['question']}={row['answer']}"} for row in rows), instructions, tags)


def _chosen(rows: Rows, limit: int | None, shuffle: bool, seed: int) -> Rows:
    """The first so many, in the order of the data or in a random one."""
    if not shuffle:
        return islice(rows, limit)
    drawn = list(rows)
    random.Random(seed).shuffle(drawn)
    return drawn[:limit]


def _row(row: Row) -> dict[str, Any]:
    answer = row.find("answer")
    question = row.text("question", "prompt", "problem")
    return {**row.content, "question": question, "answer": "" if answer is None else str(answer)}


def _asked(rows: Rows, instructions: str | None, tags: Tags) -> Iterator[TrainingSample]:
    for row in rows:
        info = {name: value for name, value in row.items() if name not in ("question", "answer")}
        yield asked(row["question"], row["answer"], info, instructions, tags)
