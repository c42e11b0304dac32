"""A step before the first one: whatever is compiled when it is first computed is compiled while the engine starts.

A compiled layer is one program for all rows. This row is about as large as those of a step, since kernels are chosen
for the size that they are compiled with, but for its memory: the engine takes its own meanwhile. Sharded layers need a
second one, of other lengths. Gradients are thrown away; nothing is learned.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.learner import Learner
from headrace.trainer.plan import Plan

log = logging.getLogger(__name__)

MOST_TOKENS, ROOM = 4096, 4 << 30
"""Of a row, and the bytes that it may take, about."""
PROMPT = 37
COMPLETIONS = (29, 31), (23, 41)
"""Tokens of a shorter one and of all others, for each row. No two sizes of a row may be equal that need not be, nor be
those of a model: they would be taken for the same by the compiler, and rows where they differ would be compiled again.
In the second row all are others than in the first."""


def rehearse(learner: Learner) -> None:
    """Compute the forward and backward passes of a step."""
    vocabulary = int(learner.model.module.config.vocab_size)
    try:
        for samples in rows_of(vocabulary, learner.seq_len, row_tokens(learner.model.plan)):
            learner.rehearse(pack(samples, learner.seq_len))
    except torch.OutOfMemoryError as error:
        if learner.ranks.size > 1:
            raise  # others wait for this one in the middle of the same row
        learner.optimizer.discard()
        log.warning("too little memory to compile beside the engine; the first steps will take longer: %s", error)


def row_tokens(plan: Plan) -> int:
    """Tokens of a row that takes little of what a step may take."""
    return min(MOST_TOKENS, plan.row_tokens, ROOM // max(1, plan.bytes // plan.row_tokens))


def rows_of(vocabulary: int, seq_len: int, tokens: int) -> list[list[Sample]]:
    """The samples of each row: of about so many tokens and of half as many, with a common beginning, as most have."""
    rng = np.random.default_rng(0)

    def text(length: int, first: int) -> np.ndarray:
        return np.concatenate([[first], rng.integers(0, vocabulary, length - 1)])

    prompt = text(min(PROMPT, seq_len // 2), 1)
    rows = []
    for size, (shorter, longer) in zip((tokens, tokens // 2), COMPLETIONS, strict=True):
        # Sequences lie in the order of their tokens: the longest is not the one that asks with the prompt, too.
        completions = [text(shorter, 0), *(text(longer, 1) for _ in range(max(1, size // longer)))]
        rows.append([_sample(prompt, completion, seq_len) for completion in completions])
    return rows


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
