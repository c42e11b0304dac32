"""Warm-up: a step before the first one, so that kernels are compiled while the engine starts.

A compiled layer is one program for all rows. The row of the warm-up is about as large as those of a step, since kernels
are tuned for the size they are compiled with, but bounded in memory, since the engine allocates at the same time.
Sharded layers need a second row of other lengths. Gradients are discarded.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.learner import Learner
from headrace.trainer.memory_plan import MemoryPlan

log = logging.getLogger(__name__)

MAX_WARMUP_TOKENS, MAX_WARMUP_BYTES = 4096, 4 << 30
"""Limits of a row; its bytes are an estimate."""
PROMPT_TOKENS = 37
COMPLETION_TOKENS = (29, 31), (23, 41)
"""For each row the tokens of one shorter completion and of all others. The compiler specializes on equal sizes, so
sizes that may differ in a step must differ here, also from sizes of the model, and between the two rows."""


def warm_up(learner: Learner) -> None:
    """Run forward and backward passes of rows like those of a step."""
    vocabulary = int(learner.model.module.config.vocab_size)
    try:
        for samples in warmup_rows(vocabulary, learner.seq_len, warmup_tokens(learner.model.plan)):
            learner.step.warm_up(pack(samples, learner.seq_len))
    except torch.OutOfMemoryError as error:
        if learner.ranks.size > 1:
            raise  # other ranks wait for this one in a collective
        learner.optimizer.zero_grad()
        log.warning("too little memory to compile next to the engine; the first steps will take longer: %s", error)


def warmup_tokens(plan: MemoryPlan) -> int:
    """Return the tokens of a warm-up row, from the memory that a step's row takes."""
    return min(MAX_WARMUP_TOKENS, plan.row_tokens, MAX_WARMUP_BYTES // max(1, plan.bytes // plan.row_tokens))


def warmup_rows(vocabulary: int, seq_len: int, tokens: int) -> list[list[Sample]]:
    """Return the samples of two rows, of about `tokens` and half as many, with a shared prompt as in a group."""
    rng = np.random.default_rng(0)

    def random_tokens(length: int, first: int) -> np.ndarray:
        return np.concatenate([[first], rng.integers(0, vocabulary, length - 1)])

    prompt = random_tokens(min(PROMPT_TOKENS, seq_len // 2), 1)
    rows = []
    for size, (shorter, longer) in zip((tokens, tokens // 2), COMPLETION_TOKENS, strict=True):
        # Rows are in lexicographic order: the shorter completion comes first and owns the shared prompt.
        completions = [random_tokens(shorter, 0), *(random_tokens(longer, 1) for _ in range(max(1, size // longer)))]
        rows.append([_sample(prompt, completion, seq_len) for completion in completions])
    return rows


def _sample(prompt: np.ndarray, completion: np.ndarray, seq_len: int) -> Sample:
    length = len(prompt) + len(completion)
    sampled = np.arange(length) >= len(prompt)
    sample = Sample(
        np.concatenate([prompt, completion]), sampled, np.zeros(length), np.where(sampled, 0, -1), len(prompt)
    )
    sample.set_stream("advantages", sampled.astype(np.float32))
    return sample.truncated(seq_len)
