"""Several data providers as one, in an order that is kept: `curriculum`, and the preset `gsm8k_math_curriculum`.

The samples of each provider keep their own order, unless all are shuffled together. With shares, the result is the
largest in which no sample repeats and each provider has its share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from headrace.environments.arguments import BadArgument, check_choice
from headrace.environments.data.gsm8k import NAME as GSM8K
from headrace.environments.data.math import NAME as MATH
from headrace.environments.hackable.registry import (
    DATA_PROVIDERS,
    build_data_provider,
    in_order,
    register_data_provider,
)
from headrace.environments.hackable.samples import TrainingSample

ORDERS = ("interleaved", "sequential", "shuffled")
SOURCE = "source"
"""The entry of `info` that has the name of the provider, unless the data has a column that is called so."""


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of `providers`."""

    provider: str
    """A registered name or an import path."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    share: float | None = None
    """Of the samples, relative to the other shares; unset for all: every sample of every provider."""
    order_by: str | None = None
    """An entry of `info` to sort by, smallest first; samples that are equal in it keep their order."""


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
    """Samples of several providers: spread evenly over each other, one after another, or shuffled together.

    `seed`, `instructions` and `tags` are handed to each provider that takes them, unless its kwargs have others.
    """
    check_choice("order", order, ORDERS)
    parts = read_parts(providers)
    shared = {"instructions": instructions, "tags": tags}
    columns = _shares(parts, _distinct([_samples(part, seed, shared) for part in parts]))
    if order == "interleaved":
        return islice(interleaved(*columns), limit)
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
    """Both, spread evenly from beginning to end: GSM8K in a random order, MATH from its easiest level to its hardest.

    `info` has the `source` of each, "gsm8k" or "math".
    """
    words = {"source": gsm8k_source, "split": split, "shuffle": True}
    hard = {"source": math_source, "split": split, "levels": levels, "shuffle": True}
    parts = [{"provider": "gsm8k", "kwargs": words}, {"provider": "math", "kwargs": hard, "order_by": "level"}]
    return curriculum(parts, "interleaved", limit, seed, instructions, tags)


def read_parts(providers: Any) -> list[Part]:
    """Return the entries of `providers`, checked as far as that needs no data."""
    if not isinstance(providers, list | tuple) or not providers:
        raise BadArgument(
            "expected a list with an entry for each provider",
            key="providers",
            value=providers,
            fix='Write [{provider: gsm8k, kwargs: {split: "train"}}, {provider: math}], for example.',
        )
    parts = [_part(entry, f"providers.{number}") for number, entry in enumerate(providers)]
    without = [number for number, part in enumerate(parts) if part.share is None]
    if 0 < len(without) < len(parts):
        raise BadArgument(
            "not set, while other providers have a share",
            key=f"providers.{without[0]}.share",
            fix="Set the share of every provider, or of none.",
        )
    return parts


def interleaved(*several: Sequence[Any]) -> Iterator[Any]:
    """Yield each sequence in its order, all of them spread evenly: every part of the result has its share of each."""
    places = [
        ((index + 0.5) / len(rows), which, index) for which, rows in enumerate(several) for index in range(len(rows))
    ]
    return (several[which][index] for _, which, index in sorted(places))


def _part(entry: Any, key: str) -> Part:
    try:
        part = msgspec.convert(entry, Part)
    except msgspec.ValidationError as error:
        fields = ", ".join(Part.__struct_fields__)
        raise BadArgument(str(error), key=key, value=entry, fix=f"An entry has {fields}.") from error
    if part.share is not None and not 0 < part.share < float("inf"):
        raise BadArgument("expected a number above 0", key=f"{key}.share", value=part.share)
    return part


def _samples(part: Part, seed: int, shared: Mapping[str, Any]) -> list[TrainingSample]:
    """All samples of one provider, in its order or sorted by `order_by`; `info` says whose they are."""
    takes = DATA_PROVIDERS.options(part.provider)
    common = {name: value for name, value in shared.items() if value is not None and name in takes}
    provider = build_data_provider(part.provider, {**common, **part.kwargs}, seed)
    samples = [
        TrainingSample(sample.prompt, sample.answer, {SOURCE: part.provider, **sample.info}) for sample in provider
    ]
    if (name := part.order_by) is None:
        return samples
    try:
        return sorted(samples, key=lambda sample: ((value := sample.info.get(name)) is not None, value))
    except TypeError as error:
        raise BadArgument(
            f"values of provider {part.provider!r} cannot be compared: {error}", key="order_by", value=name
        ) from error


def _distinct(columns: list[list[TrainingSample]]) -> list[list[TrainingSample]]:
    """Leave out of each provider what an earlier one has: an example that several have is still one task."""
    found: set[str] = set()
    kept = []
    for samples in columns:
        kept.append([sample for sample in samples if sample.key not in found])
        found |= {sample.key for sample in samples}
    return kept


def _shares(parts: Sequence[Part], columns: list[list[TrainingSample]]) -> list[list[TrainingSample]]:
    """Cut the samples of each provider down to its share of the largest whole in which none repeats."""
    shares = [part.share for part in parts if part.share is not None]
    if not shares:
        return columns
    whole = min(len(samples) / share for samples, share in zip(columns, shares, strict=True))
    return [samples[: round(whole * share)] for samples, share in zip(columns, shares, strict=True)]
