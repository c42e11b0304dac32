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

PROMPT, COMPLETION = 37, 29
"""Tokens, unlike any size of a model: equal ones would be taken for the same by the compiler."""


def rehearse(learner: Learner, is_due: Callable[[], bool]) -> None:
    """Compute the forward and backward passes of a step on each kind of row, until the first step is due."""
    rng = np.random.default_rng(0)
    vocabulary = int(learner.model.module.config.vocab_size)
    length = min(PROMPT, learner.seq_len // 2)
    prompt, other, *completions = (rng.integers(0, vocabulary, n) for n in (length, length, *[COMPLETION] * 3))
    group = [_sample(prompt, completion, learner.seq_len) for completion in completions[:2]]
    strangers = [group[0], _sample(other, completions[2], learner.seq_len)]
    for samples in (group, strangers, group[:1]):
        if learner.ranks.any(is_due()):
            return
        learner.rehearse(pack(samples, learner.seq_len))


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
