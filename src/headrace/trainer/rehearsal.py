"""A step before the first one: whatever is compiled when it is first computed is compiled while the engine starts.

Three rows, one of each kind that a step may have: sequences with a common beginning, which the first step is likely to
have, sequences without, and a single one. A step does not wait for kinds that it may not have: once it is due, what is
left is compiled where it is first met. Gradients are thrown away; nothing is learned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.learner import Learner

PROMPT, SHORTER, LONGER = 37, 29, 31
"""Tokens. No two sizes of a row may be equal that need not be, nor be those of a model: they would be taken for the
same by the compiler, and rows where they differ would be compiled again."""


def rehearse(learner: Learner, is_due: Callable[[], bool]) -> None:
    """Compute the forward and backward passes of a step on each kind of row, until the first step is due."""
    for samples in kinds_of_rows(int(learner.model.module.config.vocab_size), learner.seq_len):
        if learner.ranks.any(is_due()):
            return
        learner.rehearse(pack(samples, learner.seq_len))


def kinds_of_rows(vocabulary: int, seq_len: int) -> list[list[Sample]]:
    """The samples of a row of each kind."""
    rng = np.random.default_rng(0)
    length = min(PROMPT, seq_len // 2)
    prompt, other, shorter, longer = (rng.integers(1, vocabulary, n) for n in (length, length, SHORTER, LONGER))
    shorter[0] = 0  # sequences lie in the order of their tokens: the longest is not the one that asks with its prompt
    group = [_sample(prompt, completion, seq_len) for completion in (shorter, longer)]
    return [group, [group[0], _sample(other, longer, seq_len)], group[:1]]


def _sample(prompt: np.ndarray, completion: np.ndarray, seq_len: int) -> Sample:
    length, sampled = len(prompt) + len(completion), np.arange(len(prompt) + len(completion)) >= len(prompt)
    sample = Sample(
        np.concatenate([prompt, completion]),
        sampled,
        np.zeros(length),
        np.where(sampled, 0, -1),
        len(prompt),
    )
    sample.set_stream("advantages", sampled.astype(np.float32))
    return sample.truncated(seq_len)
