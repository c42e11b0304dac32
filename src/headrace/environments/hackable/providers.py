"""Data providers that ship: GSM8K, MATH, files, datasets, arithmetic, reasoning-gym, and curricula of several others.

Rows come in the order of the data, or shuffled with `seed`; `limit` is applied after that. `instructions` and `tags`
are those of `make_sample`. Arithmetic and the families of reasoning-gym are generated from a seed.

A curriculum combines providers in a fixed order. The samples of each keep their own order, unless all are shuffled
together. With shares, the result is the largest one in which no sample repeats and each provider has its share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.arguments import BadArgument, check_choice
from headrace.environments.hackable.registry import (
    DATA_PROVIDERS,
    Rows,
    Tags,
    TrainingSample,
    build_data_provider,
    in_order,
    make_samples,
    register_data_provider,
)
from headrace.environments.shipped.arithmetic import draw_sums
from headrace.environments.shipped.word_problems import GSM8K, MATH
from headrace.environments.shipped.word_problems import gsm8k as gsm8k_rows
from headrace.environments.shipped.word_problems import math as math_rows
from headrace.environments.tables import DataError, Row, read_located_rows

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
    return make_samples(_take_rows(gsm8k_rows(source, split, None, columns), limit, shuffle, seed), instructions, tags)


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
    return make_samples(_take_rows(rows, limit, shuffle, seed), instructions, tags)


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
    rows = (_read_row(row) for row in read_located_rows(path, split, None, columns))
    return make_samples(_take_rows(rows, limit, shuffle, seed), instructions, tags)


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
    rows = (_read_row(row) for row in read_located_rows(name, split, subset, columns))
    return make_samples(_take_rows(rows, limit, shuffle, seed), instructions, tags)


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
    return make_samples(({**task, "family": family, "settings": own} for task in tasks), instructions, tags)


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
    rows = draw_sums(split, num_tasks, digits, operations, seed)
    return make_samples(({**row, "solution": f"{row['question']}={row['answer']}"} for row in rows), instructions, tags)


def _take_rows(rows: Rows, limit: int | None, shuffle: bool, seed: int) -> Rows:
    """Return the first `limit` rows, in the order of the data or in a random one."""
    if not shuffle:
        return islice(rows, limit)
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:limit]


def _read_row(row: Row) -> dict[str, Any]:
    """Return a row with `question` and `answer` as texts; a prompt may be a conversation of one message."""
    answer, prompt = row.find("answer"), row.find("question", "prompt", "problem")
    content = row.content
    if isinstance(prompt, list):  # a conversation
        if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
            fix = "Give the question as a text, and the text before it as instructions."
            raise row.error("expected a text, or one message of the user", key="question", value=prompt, fix=fix)
        content = {**content, "question": prompt[0].get("content"), "prompt": prompt}
    question = Row(content, row.place).text("question", "prompt", "problem")
    return {**content, "question": question, "answer": "" if answer is None else str(answer)}


ORDERS = ("interleaved", "sequential", "shuffled")
SOURCE = "source"
"""The entry of `info` that has the name of the provider, unless the data has such a column."""


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of `providers`: its name, kwargs, share of the samples and order."""

    provider: str
    """A registered name, an import path or a file."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    share: float | None = None
    """Share of the samples, relative to the other shares; unset for all: every sample of every provider."""
    order_by: str | None = None
    """Entry of `info` to sort by, smallest first; equal samples keep their order."""


@register_data_provider
@in_order
def curriculum(
    providers: Sequence[Mapping[str, Any]],
    order: str = "interleaved",
    limit: int | None = None,
    seed: int = 0,
    instructions: str | None = None,
    tags: Sequence[str] | None = None,
) -> Iterator[TrainingSample]:
    """Samples of several providers: interleaved evenly, one after another, or shuffled together.

    `seed`, `instructions` and `tags` are passed to each provider that takes them, unless its kwargs have others.
    """
    check_choice("order", order, ORDERS)
    parts = read_parts(providers)
    shared = {"instructions": instructions, "tags": tags}
    columns: list[list[TrainingSample]] = []
    keys: set[str] = set()
    for part in parts:  # an example of several providers is one task: that of the first
        samples = _load_samples(part, seed, shared)
        columns.append([sample for sample in samples if sample.key not in keys])
        keys |= {sample.key for sample in samples}
    if shares := [part.share for part in parts if part.share is not None]:
        whole = min(len(samples) / share for samples, share in zip(columns, shares, strict=True))
        columns = [samples[: round(whole * share)] for samples, share in zip(columns, shares, strict=True)]
    if order == "interleaved":
        return islice(interleave(*columns), limit)
    samples = list(chain(*columns))
    if order == "shuffled":
        random.Random(seed).shuffle(samples)
    return islice(samples, limit)


@register_data_provider
@in_order
def gsm8k_math_curriculum(
    gsm8k_source: str = GSM8K,
    math_source: str = MATH,
    split: str = "train",
    levels: Sequence[int] | None = None,
    limit: int | None = None,
    seed: int = 0,
    instructions: str | None = None,
    tags: Sequence[str] | None = None,
) -> Iterator[TrainingSample]:
    """GSM8K and MATH, interleaved evenly: GSM8K in a random order, MATH from its easiest level to its hardest.

    `info` has the `source` of each, "gsm8k" or "math".
    """
    easy = {"source": gsm8k_source, "split": split, "shuffle": True}
    hard = {"source": math_source, "split": split, "levels": levels, "shuffle": True}
    parts = [{"provider": "gsm8k", "kwargs": easy}, {"provider": "math", "kwargs": hard, "order_by": "level"}]
    return curriculum(parts, "interleaved", limit, seed, instructions, tags)


def read_parts(providers: Any) -> list[Part]:
    """Return the entries of `providers`, checked as far as that needs no data."""
    if not isinstance(providers, list | tuple) or not providers:
        fix = 'Write [{provider: gsm8k, kwargs: {split: "train"}}, {provider: math}], for example.'
        raise BadArgument("expected a list with an entry for each provider", key="providers", value=providers, fix=fix)
    parts = [_parse_part(entry, f"providers.{number}") for number, entry in enumerate(providers)]
    without = [number for number, part in enumerate(parts) if part.share is None]
    if 0 < len(without) < len(parts):
        key, fix = f"providers.{without[0]}.share", "Set the share of every provider, or of none."
        raise BadArgument("not set, while other providers have a share", key=key, fix=fix)
    return parts


def interleave(*several: Sequence[Any]) -> Iterator[Any]:
    """Yield the items of all sequences, each in its order and spread evenly over the result."""
    positions = [
        ((index + 0.5) / len(rows), which, index) for which, rows in enumerate(several) for index in range(len(rows))
    ]
    return (several[which][index] for _, which, index in sorted(positions))


def _parse_part(entry: Any, key: str) -> Part:
    """Return one entry of `providers`, checked; `key` names it in errors."""
    try:
        part = msgspec.convert(entry, Part)
    except msgspec.ValidationError as error:
        fields = ", ".join(Part.__struct_fields__)
        raise BadArgument(str(error), key=key, value=entry, fix=f"An entry has {fields}.") from error
    if part.share is not None and not 0 < part.share < float("inf"):
        raise BadArgument("expected a number above 0", key=f"{key}.share", value=part.share)
    return part


def _load_samples(part: Part, seed: int, shared: Mapping[str, Any]) -> list[TrainingSample]:
    """Return all samples of one provider, in its order or sorted by `order_by`, with `source` in their `info`."""
    options = DATA_PROVIDERS.options(part.provider)
    common = {name: value for name, value in shared.items() if value is not None and name in options}
    provider = build_data_provider(part.provider, {**common, **part.kwargs}, seed)
    samples = [
        TrainingSample(sample.prompt, sample.answer, {SOURCE: part.provider, **sample.info}) for sample in provider
    ]
    if (name := part.order_by) is None:
        return samples
    try:
        return sorted(samples, key=lambda sample: ((value := sample.info.get(name)) is not None, value))
    except TypeError as error:
        fact = f"values of provider {part.provider!r} cannot be compared: {error}"
        raise BadArgument(fact, key="order_by", value=name) from error
