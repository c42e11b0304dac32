"""Data providers of one source: GSM8K, MATH, local files, Hugging Face datasets, arithmetic, and reasoning-gym.

Rows come in the order of the data, or shuffled with `seed`; `limit` is applied after that. `instructions` and `tags`
are those of `samples_of`. Arithmetic and the families of reasoning-gym are generated from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.environments.data.tables import DataError, Row, located_rows
from headrace.environments.data.word_problems import GSM8K, MATH
from headrace.environments.data.word_problems import gsm8k as gsm8k_rows
from headrace.environments.data.word_problems import math as math_rows
from headrace.environments.hackable.registry import register_data_provider
from headrace.environments.hackable.samples import Rows, Tags, TrainingSample, samples_of
from headrace.environments.shipped.arithmetic import sums

Columns = Mapping[str, str] | None


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
    return samples_of(_first(gsm8k_rows(source, split, None, columns), limit, shuffle, seed), instructions, tags)


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
    return samples_of(_first(rows, limit, shuffle, seed), instructions, tags)


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
    """A JSONL or Parquet file, or a directory of them. `columns` maps `question` and `answer` to its columns.

    All other columns are in `info`; a column `key` names the example. A row without an answer has an empty one.
    """
    if not Path(path).exists():
        raise DataError("no such file or directory", file=path)
    rows = (_row(row) for row in located_rows(path, split, None, columns))
    return samples_of(_first(rows, limit, shuffle, seed), instructions, tags)


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
    """A Hugging Face dataset by its name, or a directory that `save_to_disk` wrote. Columns are those of `local`."""
    rows = (_row(row) for row in located_rows(name, split, subset, columns))
    return samples_of(_first(rows, limit, shuffle, seed), instructions, tags)


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
    """Tasks of one reasoning-gym family with its `settings`. `info` has the data of `reasoning_gym_reward`."""
    from headrace.environments.adapters.reasoning_gym_family import Request, tasks_of_family

    own = dict(settings or {})
    tasks = tasks_of_family(Request(family, own, split, num_tasks, seed))
    return samples_of(({**task, "family": family, "settings": own} for task in tasks), instructions, tags)


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
    """Generated sums, differences and products of whole numbers. No question is in both splits, "train" and "eval"."""
    rows = sums(split, num_tasks, digits, operations, seed)
    return samples_of(({**row, "solution": f"{row['question']}={row['answer']}"} for row in rows), instructions, tags)


def _first(rows: Rows, limit: int | None, shuffle: bool, seed: int) -> Rows:
    """Return the first `limit` rows, in the order of the data or in a random one."""
    if not shuffle:
        return islice(rows, limit)
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:limit]


def _row(row: Row) -> dict[str, Any]:
    answer, asked = row.find("answer"), row.find("question", "prompt", "problem")
    content = row.content
    if isinstance(asked, list):  # a conversation
        if len(asked) != 1 or not isinstance(asked[0], dict) or asked[0].get("role") != "user":
            fix = "Give the question as a text, and what stands before it as instructions."
            raise row.error("expected a text, or one message of the user", key="question", value=asked, fix=fix)
        content = {**content, "question": asked[0].get("content"), "prompt": asked}
    question = Row(content, row.place).text("question", "prompt", "problem")
    return {**content, "question": question, "answer": "" if answer is None else str(answer)}
