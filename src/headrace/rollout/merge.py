"""Turns into samples: a turn extends the sample whose tokens its prompt repeats, otherwise it starts a new one.

So interleaved agents merge into their own samples, and a chat template that rewrites history splits instead of
corrupting. A turn sampled at another temperature also starts a new sample: a sample has one temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.rollout.types import NOT_SAMPLED, Sample, Turn


class _OpenSample:
    """A sample under construction; `tokens` is also the prefix that a later turn's prompt must repeat."""

    def __init__(self, turn: Turn) -> None:
        self.tokens = list(turn.prompt_ids)
        self.mask = [False] * len(self.tokens)
        self.logprobs = [0.0] * len(self.tokens)
        self.versions = [NOT_SAMPLED] * len(self.tokens)
        self.prompt_length = len(self.tokens)
        self.temperature = turn.temperature
        self.obs_spans: list[tuple[int, int, int, int]] = []
        self.append_completion(turn)

    def continues_into(self, turn: Turn) -> bool:
        return self.temperature == turn.temperature and turn.prompt_ids[: len(self.tokens)] == self.tokens

    def extend(self, turn: Turn, turn_index: int) -> None:
        prefix = len(self.tokens)
        tail = turn.prompt_ids[prefix:]
        if tail:
            self.obs_spans.append((prefix - self.prompt_length, turn_index, prefix, len(tail)))
            self.tokens += tail
            self.mask += [False] * len(tail)
            self.logprobs += [0.0] * len(tail)
            self.versions += [NOT_SAMPLED] * len(tail)
        self.append_completion(turn)

    def append_completion(self, turn: Turn) -> None:
        self.tokens += turn.completion_ids
        self.mask += [True] * len(turn.completion_ids)
        self.logprobs += turn.logprobs
        self.versions += turn.versions

    def close(self) -> Sample:
        return Sample(
            np.array(self.tokens, np.int32),
            np.array(self.mask, np.bool_),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            self.prompt_length,
            self.temperature,
            self.obs_spans,
        )


def merge_turns(turns: Sequence[Turn]) -> list[Sample]:
    """Merge an episode's turns, in order, into as few samples as exact prefixes allow."""
    open_samples: list[_OpenSample] = []
    for index, turn in enumerate(turns):
        matches = [sample for sample in open_samples if sample.continues_into(turn)]
        if matches:
            max(matches, key=lambda sample: len(sample.tokens)).extend(turn, index)
        else:
            open_samples.append(_OpenSample(turn))
    return [sample.close() for sample in open_samples]
