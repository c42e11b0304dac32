"""What algorithms are tested with: a byte-level tokenizer, the Qwen3 chat format, and fake reference models."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from renderers.base import Renderer

from headrace.algorithms.base import Host
from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.config.base import Tree
from headrace.config.orchestrator import OrchestratorConfig
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.runfile.reading import validate
from headrace.text.prompt import PromptRenderer
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer, byte_tokenizer

SEQ_LEN = 1000
END = "<|im_end|>"
TEACHER = {"name": "fake", "base_url": "http://fake.invalid/v1"}
"""Teacher of algorithms that require one. No request is sent to it."""


class Fixtures(msgspec.Struct):
    tokenizer: Tokenizer
    renderer: Renderer
    prompts: PromptRenderer

    def host(self, policy: Reference) -> Host:
        return Host("env", policy, self.renderer, self.tokenizer, SEQ_LEN)


def make_fixtures() -> Fixtures:
    """Use the chat format of Qwen3, which attributes each token to a role."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        tokenizer = Tokenizer(folder)
        renderer = make_renderer(folder, tokenizer, "qwen3", enable_thinking=False, thinking_retention="all")
    return Fixtures(tokenizer, renderer, PromptRenderer(renderer))


def algorithm_config(section: Tree, where: str) -> AlgorithmConfig:
    """Validate an `algo` section by itself; raises `ConfigError` with all problems and their keys."""
    has_model = any(key in section for key in ("teacher", "model", "sampling"))
    declared = ALGORITHMS.chosen_section(section)  # validation reports an unknown type
    needs_teacher = declared is not None and declared.NEEDS_TEACHER and not has_model
    tree = {"algo": {**section, "teacher": TEACHER} if needs_teacher else section, "seq_len": SEQ_LEN}
    return validate(OrchestratorConfig, tree, where)[0].algo


def context_logprobs(ids: np.ndarray) -> np.ndarray:
    """Return logprobs that depend on the token id and, for two tokens in three, on all tokens before it."""
    before = np.cumsum(ids * (np.arange(len(ids)) % 7 + 1)) % 997
    logprobs = np.where(ids % 3 == 0, -0.5 - (ids % 5) / 10, -0.01 - before / 997)
    logprobs[:1] = 0.0
    return logprobs


class FakeModel:
    """A reference model whose logprobs are a pure function of the token ids."""

    name = "a fake model"

    def __init__(self, logprobs: Callable[[np.ndarray], np.ndarray] = context_logprobs) -> None:
        self.requests = 0
        self._logprobs = logprobs

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> None:
        """Accept everything."""

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        self.requests += 1
        await asyncio.sleep(0)  # yield to other tasks, as a real request does
        return self._logprobs(np.asarray(token_ids, np.int64))

    async def close(self) -> None:
        """There is nothing to close."""


class FailingModel(FakeModel):
    """A model whose every `period`-th request fails."""

    name = "a failing model"

    def __init__(self, period: int) -> None:
        super().__init__()
        self._period = period

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        fails = (self.requests + 1) % self._period == 0  # counted before other tasks send requests
        scores = await super().score(token_ids, temperature)
        if fails:
            raise ReferenceFailed(f"{self.name} got a sequence of {len(token_ids)} tokens")
        return scores
