"""A step before the first one: whatever is compiled when it is first computed is compiled while the engine starts.

Three rows, one of each kind that a step may have: sequences with a common beginning, which the first step is likely to
have, sequences without, and a single one. They are about as large as those of a step, since kernels are chosen for the
size that they are compiled with, but for their memory: the engine takes its own meanwhile. A step does not wait for
kinds that it may not have: once it is due, what is left is compiled where it is first met. Gradients are thrown away;
nothing is learned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.learner import Learner
from headrace.trainer.plan import Plan

log = logging.getLogger(__name__)

MOST_TOKENS, ROOM = 4096, 4 << 30
"""Of a row, and the bytes that it may take, about."""
PROMPT, SHORTER, LONGER = 37, 29, 31
"""Tokens. No two sizes of a row may be equal that need not be, nor be those of a model: they would be taken for the
same by the compiler, and rows where they differ would be compiled again."""


def rehearse(learner: Learner, is_due: Callable[[], bool]) -> None:
    """Compute the forward and backward passes of a step on each kind of row, until the first step is due."""
    vocabulary = int(learner.model.module.config.vocab_size)
    try:
        for samples in kinds_of_rows(vocabulary, learner.seq_len, row_tokens(learner.model.plan)):
            if learner.ranks.any(is_due()):
                return
            learner.rehearse(pack(samples, learner.seq_len))
    except torch.OutOfMemoryError as error:
        if learner.ranks.size > 1:
            raise  # others wait for this one in the middle of the same row
        learner.optimizer.discard()
        log.warning("too little memory to compile beside the engine; the first steps will take longer: %s", error)


def row_tokens(plan: Plan) -> int:
    """Tokens of a row that takes little of what a step may take."""
    return min(MOST_TOKENS, plan.row_tokens, ROOM // max(1, plan.bytes // plan.row_tokens))


def kinds_of_rows(vocabulary: int, seq_len: int, tokens: int) -> list[list[Sample]]:
    """The samples of a row of each kind, of about so many tokens."""
    rng = np.random.default_rng(0)

    def text(length: int, first: int) -> np.ndarray:
        return np.concatenate([[first], rng.integers(0, vocabulary, length - 1)])

    prompt_length = min(PROMPT, seq_len // 2)
    prompt = text(prompt_length, 1)
    # Sequences lie in the order of their tokens: the longest is not the one that asks with the prompt, too.
    completions = [text(SHORTER, 0), *(text(LONGER, 1) for _ in range(max(1, tokens // LONGER)))]
    group = [_sample(prompt, completion, seq_len) for completion in completions]
    count = min(vocabulary, max(2, tokens // (PROMPT + LONGER)))
    strangers = [_sample(text(prompt_length, number), text(LONGER, 0), seq_len) for number in range(count)]
    alone = _sample(prompt, text(max(SHORTER, min(tokens, seq_len) - prompt_length), 0), seq_len)
    return [group, strangers, [alone]]


def _sample(prompt: np.ndarray, completion: np.ndarray, seq_len: int) -> Sample:
    length = len(prompt) + len(completion)
    sampled = np.arange(length) >= len(prompt)
    sample = Sample(
        np.concatenate([prompt, completion]),
        sampled,
        np.zeros(length),
        np.where(sampled, 0, -1),
        len(prompt),
    )
    sample.set_stream("advantages", sampled.astype(np.float32))
    return sample.truncated(seq_len)
