"""Merge turns into samples: a turn extends the sample whose tokens are a prefix of its prompt, or starts a new one.

Interleaved agents get samples of their own, and a chat template that rewrites history starts a new sample instead of
corrupting one. A turn sampled at another temperature also starts a new sample: a sample has one temperature. So does a
turn after one with latents: an engine reads prompts as plain tokens.

Routes: a token keeps the experts that were recorded in the first turn which computed it. A later turn recomputes the
token and may route it differently, for example with newer weights. The last token of a turn is not computed in that
turn, so its route comes from the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.rollout.packing import join_rows
from headrace.rollout.types import LATENTS, NOT_SAMPLED, ROUTES, TRUNCATED, Sample, Turn


class _OpenSample:
    """A sample under construction: its tokens are those of its last turn, the other streams are lists of pieces."""

    def __init__(self, turn: Turn) -> None:
        self.last = turn
        self.prompt_length = len(turn.prompt_ids)
        self.temperature = turn.temperature
        self.length = 0
        self.obs_spans: list[tuple[int, int, int, int]] = []
        self._masks: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._truncated: list[np.ndarray] = []
        self._has_truncated = False
        self._routes: list[tuple[int, np.ndarray | None]] = []
        """Parts of all tokens but the last: the number of tokens, and their routes, if recorded."""
        self._append_unsampled(len(turn.prompt_ids))
        self._append_sampled(turn)

    def continues_into(self, turn: Turn) -> bool:
        """Return whether the turn can extend the sample: its prompt begins with all tokens of the sample."""
        if self.temperature != turn.temperature or len(turn.prompt_ids) < self.length or self.last.latents is not None:
            return False
        prompt = len(self.last.prompt_ids)
        # The completion first: it is short, and most rewritten histories differ there.
        return np.array_equal(turn.prompt_ids[prompt : self.length], self.last.completion_ids) and np.array_equal(
            turn.prompt_ids[:prompt], self.last.prompt_ids
        )

    def extend(self, turn: Turn, turn_index: int) -> None:
        """Append the turn: the new tokens of its prompt as an observation, then its completion."""
        tail = len(turn.prompt_ids) - self.length
        if tail:
            self.obs_spans.append((self.length - self.prompt_length, turn_index, self.length, tail))
            self._append_unsampled(tail)
        self._append_sampled(turn)
        self.last = turn

    def _append_unsampled(self, count: int) -> None:
        zeros = np.zeros(count, np.float32)
        self._append(np.zeros(count, np.bool_), zeros, zeros, np.full(count, NOT_SAMPLED, np.int32))

    def _append_sampled(self, turn: Turn) -> None:
        mask = np.ones(len(turn.completion_ids), np.bool_) if turn.mask is None else turn.mask
        # Without top-p and top-k, truncated logprobs are the plain ones.
        truncated = turn.logprobs if turn.truncated_logprobs is None else turn.truncated_logprobs
        self._append(mask, turn.logprobs, truncated, turn.versions)
        self._has_truncated |= turn.truncated_logprobs is not None
        routed = sum(count for count, _ in self._routes)
        self._routes.append((self.length - 1 - routed, None if turn.routes is None else turn.routes[routed:]))

    def _append(self, *streams: np.ndarray) -> None:
        self.length += len(streams[0])
        for pieces, stream in zip((self._masks, self._logprobs, self._truncated, self._versions), streams, strict=True):
            pieces.append(stream)

    def close(self) -> Sample:
        """Return the finished sample."""
        streams = {TRUNCATED: np.concatenate(self._truncated)} if self._has_truncated else {}
        if (latents := self.last.latents) is not None:
            before = np.zeros((self.length - len(latents), latents.shape[1]), latents.dtype)
            streams[LATENTS] = np.concatenate([before, latents])
        if (routes := join_rows([*self._routes, (1, None)], ROUTES)) is not None:
            streams[ROUTES] = routes
        return Sample(
            np.concatenate([self.last.prompt_ids, self.last.completion_ids]),
            np.concatenate(self._masks),
            np.concatenate(self._logprobs),
            np.concatenate(self._versions),
            self.prompt_length,
            self.temperature,
            self.obs_spans,
            streams,
        )


def merge_turns(turns: Sequence[Turn]) -> list[Sample]:
    """Merge an episode's turns, in order, into as few samples as exact prefixes allow."""
    open_samples: list[_OpenSample] = []
    for index, turn in enumerate(turns):
        matches = [sample for sample in open_samples if sample.continues_into(turn)]
        if matches:
            max(matches, key=lambda sample: sample.length).extend(turn, index)
        else:
            open_samples.append(_OpenSample(turn))
    return [sample.close() for sample in open_samples]


def observed_roles(sample: Sample, turns: Sequence[Turn]) -> np.ndarray | None:
    """Return per token the index of its author's role in `ROLES`, 0 outside observations.

    `turns` are those of the sample's rollout. None if the renderer did not report roles for one of the observations.
    """
    roles = np.zeros(len(sample), np.int8)
    for start, turn, prompt_start, length in sample.obs_spans:
        prompt_roles = turns[turn].prompt_roles
        if prompt_roles is None:
            return None
        first = sample.prompt_length + start
        roles[first : first + length] = prompt_roles[prompt_start : prompt_start + length]
    return roles
