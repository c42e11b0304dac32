"""Which conversation comes when in supervised training, and which are kept for validation: a seed fixes both.

A stream is endless and can start anywhere: example number n is the same whoever asks, so a resumed run sees exactly the
examples that an uninterrupted one would have seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from headrace.environments.base import Environment
from headrace.errors import DataError
from headrace.rollout.types import Sample
from headrace.text.sft_conversation import SftConversation

log = logging.getLogger(__name__)

VALIDATION_SEED = 2**31 - 1
"""Of what has a source of its own: the same examples whatever the seed of the run, so that runs can be compared."""


class Conversations(Protocol):
    """So many conversations, by number: `Rows`, some of them, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> SftConversation: ...


class Chosen:
    """Some of the conversations."""

    def __init__(self, rows: Conversations, numbers: np.ndarray) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> SftConversation:
        return self._rows[int(self._numbers[number])]


def from_environment(environment: Environment, seed: int, position: int) -> Iterator[SftConversation]:
    """The environment's demonstrations from `position` on."""
    shown = islice(environment.demonstrations(seed), position, None)
    return (SftConversation(demonstration.messages, tools=demonstration.tools or None) for demonstration in shown)


def from_rows(rows: Conversations, seed: int, position: int) -> Iterator[SftConversation]:
    """Endless passes over the rows from `position` on, each in its own order."""
    epoch, start = divmod(position, len(rows))
    while True:
        order = _random(seed, epoch).permutation(len(rows))
        yield from (rows[index] for index in order[start:].tolist())
        epoch, start = epoch + 1, 0


def hold_out(rows: Conversations, fraction: float, seed: int) -> tuple[Chosen, Chosen]:
    """The rows to train on, and a random `fraction` of them, one at least, to validate on instead."""
    held = max(1, round(fraction * len(rows)))
    if held >= len(rows):
        raise DataError(
            f"validation.fraction {fraction} of {len(rows)} rows leaves none to train on: give more data, or "
            "validation a source of its own"
        )
    order = _random(seed, 0, 1).permutation(len(rows))
    return Chosen(rows, np.sort(order[held:])), Chosen(rows, order[:held])


def drawn(rows: Conversations, most: int) -> list[SftConversation]:
    """At most so many of the rows, the same ones each time."""
    return list(islice(from_rows(rows, VALIDATION_SEED, 0), min(most, len(rows))))


class Cuts:
    """Counts the examples that are longer than `seq_len`, and says so the first time.

    A run that learns nothing at all is refused, once `ENOUGH` examples have shown it or at its end.
    """

    ENOUGH = 64
    """Examples that must all be cut to nothing before the run is given up."""

    def __init__(self, seq_len: int, notify: Callable[[str], None] = log.warning) -> None:
        self._seq_len = seq_len
        self._notify = notify
        self._said = False
        self._seen = self._lost = self._longest = 0

    def of(self, samples: Sequence[Sample]) -> dict[str, float]:
        """`data/truncated`, and `data/not_learned`, those whose every learned token was cut off with the rest."""
        cut = sum(len(sample) > self._seq_len for sample in samples)
        lost = sum(not sample.mask[1 : self._seq_len].any() for sample in samples)
        self._seen += len(samples)
        self._lost += lost
        self._longest = max(self._longest, *map(len, samples))
        if self._seen >= self.ENOUGH:
            self.refuse_if_nothing_is_learned()
        if (cut or lost) and not self._said:
            self._notify(
                f"{cut} of {len(samples)} examples are longer than seq_len = {self._seq_len} and are cut; of {lost} "
                "nothing is left to learn (every step counts its own as data/truncated and data/not_learned)"
            )
            self._said = True
        return {"data/truncated": cut, "data/not_learned": lost}

    def refuse_if_nothing_is_learned(self) -> None:
        """Raise if nothing was left to learn of any example so far."""
        if self._seen and self._lost == self._seen:
            raise DataError(
                f"nothing is left to learn of {self._seen} examples, of up to {self._longest} tokens",
                key="seq_len",
                value=self._seq_len,
                fix=f"Raise seq_len to at least {self._longest}.",
            )


def _random(*seeds: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64 for seed in seeds])
