"""Turns into samples: a turn extends the sample whose tokens its prompt repeats, otherwise it starts a new one.

So interleaved agents merge into their own samples, and a chat template that rewrites history splits instead of
corrupting. A turn sampled at another temperature also starts a new sample: a sample has one temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.rollout.types import NOT_SAMPLED, TRUNCATED, Sample, Turn


class _OpenSample:
    """A sample under construction: its tokens are those of its last turn, all else is in pieces."""

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
        self._is_truncated = False
        self._append_given(len(turn.prompt_ids))
        self._append_sampled(turn)

    def continues_into(self, turn: Turn) -> bool:
        if self.temperature != turn.temperature or len(turn.prompt_ids) < self.length:
            return False
        given = len(self.last.prompt_ids)
        # What was sampled is short, and where most rewritten histories differ.
        return np.array_equal(turn.prompt_ids[given : self.length], self.last.completion_ids) and np.array_equal(
            turn.prompt_ids[:given], self.last.prompt_ids
        )

    def extend(self, turn: Turn, turn_index: int) -> None:
        tail = len(turn.prompt_ids) - self.length
        if tail:
            self.obs_spans.append((self.length - self.prompt_length, turn_index, self.length, tail))
            self._append_given(tail)
        self._append_sampled(turn)
        self.last = turn

    def _append_given(self, count: int) -> None:
        nothing = np.zeros(count, np.float32)
        self._append(count, False, nothing, np.full(count, NOT_SAMPLED, np.int32))
        self._truncated.append(nothing)

    def _append_sampled(self, turn: Turn) -> None:
        self._append(len(turn.completion_ids), True, turn.logprobs, turn.versions)
        self._is_truncated |= turn.truncated_logprobs is not None
        # A turn that could choose from everything has nothing to tell apart.
        self._truncated.append(turn.logprobs if turn.truncated_logprobs is None else turn.truncated_logprobs)

    def _append(self, count: int, sampled: bool, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.length += count
        self._masks.append(np.full(count, sampled))
        self._logprobs.append(logprobs)
        self._versions.append(versions)

    def close(self) -> Sample:
        return Sample(
            np.concatenate([self.last.prompt_ids, self.last.completion_ids]),
            np.concatenate(self._masks),
            np.concatenate(self._logprobs),
            np.concatenate(self._versions),
            self.prompt_length,
            self.temperature,
            self.obs_spans,
            {TRUNCATED: np.concatenate(self._truncated)} if self._is_truncated else {},
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
