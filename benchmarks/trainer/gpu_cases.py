"""The cases of the training table: sizes, data, bounds and targets, and the arithmetic of their operations.

Operations of a step over sequences of lengths L, with N parameters (a table that is also the head counts once):

    all parameters learn   6 N sum(L) + A        forward, and twice that backward
    LoRA                   4 N sum(L) + A        no gradient of the frozen weights
    A = 3 * 2 * layers * heads * head_dim * sum(L^2)      causal scores and values, forward and twice that backward

What is computed again does not count. MFU is that over the time and over 989 TFLOP/s, the peak of an H100 or H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from benchmarks.models import qwen3_config

from headrace.rollout.types import Sample

PEAK = 989e12
ROW = 16384
SHORTEST, LONGEST = 100, 4000
PROMPT = 64
"""Tokens of a sequence that are not trained, at most a quarter of it."""
LOGPROB = -11.93
"""Of any token under random weights."""


@dataclass(frozen=True)
class Case:
    name: str
    size: Literal["0.6b", "4b"]
    target: float
    """Tokens per second."""
    limit: float | None = None
    """GiB; None: as much as there is."""
    kind: Literal["rl", "sft"] = "rl"
    is_mixed: bool = False
    """Rows of several sequences, with lengths that are uniform by their logarithm; else of one."""
    row: int = ROW
    lora: bool = False
    rows: int = 4
    """Micro-batches of a step."""
    steps: int = 5
    plain_steps: int = 3

    def operations(self, lengths: list[int]) -> float:
        config = qwen3_config(self.size)
        heads = config.num_attention_heads * config.head_dim
        attention = 6 * config.num_hidden_layers * heads * sum(length**2 for length in lengths)
        return (4 if self.lora else 6) * parameters(config) * sum(lengths) + attention


CASES = {
    case.name: case
    for case in (
        Case("one-16k-bound", "0.6b", 43_000, 16),
        Case("one-16k", "0.6b", 50_000),
        Case("mixed-bound", "0.6b", 74_000, 16, is_mixed=True),
        Case("mixed", "0.6b", 85_000, is_mixed=True),
        Case("sft-mixed", "0.6b", 76_000, 20, "sft", is_mixed=True),
        Case("one-64k", "0.6b", 15_000, 24, row=65536, rows=2, steps=3, plain_steps=1),
        Case("lora-4b", "4b", 14_000, 48, lora=True, plain_steps=1),
    )
}


def parameters(config: Any) -> int:
    """Of Qwen3 with tied embeddings, norms left out."""
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return int(config.num_hidden_layers * layer + config.hidden_size * config.vocab_size)


def draw(case: Case, seed: int, rows: int | None = None) -> list[Sample]:
    """The samples of a step, or of so many rows: in order, each row as full as it gets."""
    rng = np.random.default_rng(seed)
    samples = []
    for row in range(rows or case.rows):
        for number, length in enumerate(_lengths(case, rng)):
            tokens = rng.integers(1000, 150_000, length)
            tokens[0] = 100 * row + number  # sequences are trained in the order of their tokens
            samples.append(_sample(case, tokens, rng))
    return samples


def _lengths(case: Case, rng: np.random.Generator) -> list[int]:
    if not case.is_mixed:
        return [case.row]
    lengths: list[int] = []
    while True:
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        if sum(lengths) + length > case.row:
            return [*lengths, left] if (left := case.row - sum(lengths)) >= SHORTEST else lengths
        lengths.append(length)


def _sample(case: Case, tokens: np.ndarray, rng: np.random.Generator) -> Sample:
    length = len(tokens)
    prompt = min(PROMPT, length // 4)
    mask = np.arange(length) >= prompt
    logprobs = np.where(mask, LOGPROB + 0.05 * rng.normal(size=length), 0.0)
    sample = Sample(tokens, mask, logprobs, np.where(mask, 0, -1), prompt, 1.0)
    if case.kind == "rl":
        sample.set_stream("advantages", np.where(mask, rng.normal(), 0.0).tolist())
    else:
        sample.set_stream("rl_weights", [0.0] * length)
        sample.set_stream("ce_weights", mask.astype(float).tolist())
    return sample
