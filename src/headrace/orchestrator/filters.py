"""Filters: tests on one finished rollout that keep it out of training, or only count it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from headrace.config.orchestrator import FILTERS, FilterConfig
from headrace.imports import load_function
from headrace.rollout.types import NOT_SAMPLED, Rollout

_OTHER_COMPONENTS = ("ce_weights", "ref_kl_weights", "k2_weights", "k3_weights")


@FILTERS.register
class GibberishConfig(FilterConfig):
    """A rare token that the policy itself found less likely than chance."""

    type: Literal["gibberish"] = "gibberish"
    token_id_threshold: int = Field(100000, ge=0)
    """Tokens above this id are rare ones."""
    logprob_offset: float = Field(2.0, ge=0)
    """How far the logprob of a rare token must be below that of a uniform choice, in nats."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        settings = self.model_dump(include={"token_id_threshold", "logprob_offset"})
        return partial(is_gibberish, vocab_size=vocab_size, **settings)


def is_gibberish(rollout: Rollout, vocab_size: int, token_id_threshold: int, logprob_offset: float) -> bool:
    floor = -math.log(vocab_size) - logprob_offset
    return any(
        bool(np.any(s.mask & (s.token_ids > token_id_threshold) & (s.logprobs < floor)))
        for s in rollout.samples
        if s.token_ids.max(initial=0) > token_id_threshold  # few samples have any: skip the others quickly
    )


@FILTERS.register
class RepetitionConfig(FilterConfig):
    """Many tokens in a row of which the policy was nearly certain."""

    type: Literal["repetition"] = "repetition"
    window: int = Field(3000, ge=1)
    """Tokens in a row that must be nearly certain."""
    prob_threshold: float = Field(0.99, gt=0, lt=1)
    """The probability above which a token is nearly certain."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return partial(is_repetitive, window=self.window, prob_threshold=self.prob_threshold)


def is_repetitive(rollout: Rollout, window: int, prob_threshold: float) -> bool:
    """Return whether `window` sampled tokens in a row are nearly certain; the streak spans turns."""
    if sum(np.count_nonzero(s.mask) for s in rollout.samples) < window:
        return False
    floor = math.log(prob_threshold)  # rollouts of another model have no logprobs, and never match
    certain = np.concatenate([((s.logprobs > floor) & (s.versions != NOT_SAMPLED))[s.mask] for s in rollout.samples])
    doubts = np.flatnonzero(~certain)
    return bool(np.any(np.diff(doubts, prepend=-1, append=len(certain)) > window))


@FILTERS.register
class ZeroAdvantageConfig(FilterConfig):
    """Nothing to learn from: every advantage is 0."""

    READS_ADVANTAGES = True

    type: Literal["zero_advantage"] = "zero_advantage"
    enforce: bool = False
    """Drop rollouts without any advantage; false: only count them. In `post_batch_filters` the default is true."""

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return has_no_advantage


def has_no_advantage(rollout: Rollout) -> bool:
    """Return whether a rollout has rl credit and all of it is 0. Rollouts trained by other losses never match."""
    if any(np.any(s.streams[name]) for s in rollout.samples for name in _OTHER_COMPONENTS if name in s.streams):
        return False
    credit = [s.streams["advantages"][s.rl_members] for s in rollout.samples if "advantages" in s.streams]
    return any(len(values) for values in credit) and not any(np.count_nonzero(values) for values in credit)


@FILTERS.register
class CustomFilterConfig(FilterConfig):
    """A test of your own: a function that takes a rollout, and `kwargs`, and returns whether to drop it."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`package.module:function`."""
    name: str = ""
    """How it appears in metrics; unset: the function's name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function, beside the rollout."""

    @property
    def label(self) -> str:
        return self.name

    def make_test(self, vocab_size: int) -> Callable[[Rollout], bool]:
        return load_function(self.import_path, self.kwargs, "filter")

    @model_validator(mode="after")
    def _default_name_to_function(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.import_path.rpartition(":")[2])
        return self
