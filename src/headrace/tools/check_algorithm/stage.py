"""Where algorithms are tried: a real tokenizer and renderer whose tokens are bytes, and models that only pretend."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.algorithms.base import Host
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.text.byte_level import byte_tokenizer
from headrace.text.prompt import PromptRenderer
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer

SEQ_LEN = 1000
END = "<|im_end|>"


class Stage(msgspec.Struct):
    """What every algorithm finds there."""

    tokenizer: Tokenizer
    renderer: Renderer
    prompts: PromptRenderer

    def host(self, policy: Reference) -> Host:
        return Host("env", policy, self.renderer, self.tokenizer, SEQ_LEN)


def make_stage() -> Stage:
    """In the chat format of Qwen3, which tells who wrote each token."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        tokenizer = Tokenizer(folder)
        renderer = make_renderer(folder, tokenizer, "qwen3", enable_thinking=False, thinking_retention="all")
    return Stage(tokenizer, renderer, PromptRenderer(renderer))


Opinion = Callable[[np.ndarray], np.ndarray]
"""The logprobs that a model gives to a sequence of token ids."""


def by_context(ids: np.ndarray) -> np.ndarray:
    """Follows from a token's id, and for two in three also from all that comes before it: hints matter to those."""
    before = np.cumsum(ids * (np.arange(len(ids)) % 7 + 1)) % 997
    logprobs = np.where(ids % 3 == 0, -0.5 - (ids % 5) / 10, -0.01 - before / 997)
    logprobs[:1] = 0.0  # nothing comes before the first
    return logprobs


class StandIn:
    """A model of the same opinion every time."""

    name = "a stand-in"

    def __init__(self, opinion: Opinion = by_context) -> None:
        self.asked = 0
        self._opinion = opinion

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        """It takes everything."""

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        self.asked += 1
        await asyncio.sleep(0)  # as a real one, it lets others go on meanwhile
        return self._opinion(np.asarray(token_ids, np.int64))

    async def close(self) -> None:
        """Nothing is open."""


class Failing(StandIn):
    """A model that is up when the run begins and fails later: at every `each`-th question."""

    name = "a stand-in that fails"

    def __init__(self, each: int) -> None:
        super().__init__()
        self._each = each

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        fails = (self.asked + 1) % self._each == 0  # before others ask meanwhile
        scores = await super().score(token_ids, temperature)
        if fails:
            raise ReferenceFailed(f"{self.name} was told to, on a sequence of {len(token_ids)} tokens")
        return scores
