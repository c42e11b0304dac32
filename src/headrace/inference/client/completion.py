"""What an engine has to say about tokens: those that it sampled, or how likely it finds given ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headrace.inference.schema import GenerateResponse, WeightVersionSpan
from headrace.rollout.version import Version

T = TypeVar("T")


class Completion(msgspec.Struct):
    """What the policy sampled; the lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightVersionSpan]
    """Which version sampled which tokens; `versions` has one entry per token."""
    finish_reason: str
    truncated_logprobs: list[float] | None = None
    """Among what top_p and top_k left to choose from; None where they left everything, or the engine does not say."""

    @property
    def versions(self) -> list[Version]:
        return expand_versions(self.spans)

    @property
    def steps(self) -> np.ndarray:
        """The step of each token's version."""
        steps = [Version.parse(span.version).step for span in self.spans]
        return np.repeat(np.array(steps, np.int32), [span.end - span.start for span in self.spans])


class Scores(msgspec.Struct):
    """How likely an engine finds a sequence."""

    logprobs: list[float]
    """One per token; the first, which nothing predicts, is 0.0."""
    version: Version | None
    """The weights that say so; None from an engine that serves no policy."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    truncated_logprobs: list[float] | None = None


class _Generated(msgspec.Struct):
    """Of a `GenerateResponse`, what a completion needs: most of the whole is text that says the token ids again."""

    choices: list[_Choice]


_generated = msgspec.json.Decoder(_Generated)
_scored = msgspec.json.Decoder(GenerateResponse)


def read_completion(content: bytes) -> Completion:
    """Raises `msgspec.DecodeError` or ValueError for an answer that is none, or does not fit together."""
    choice = _only(_generated.decode(content).choices)
    if choice.logprobs is None or choice.weight_versions is None:
        raise ValueError("it has no logprobs or no weight_versions: this server cannot serve a policy")
    completion = Completion(
        choice.token_ids,
        [entry.logprob for entry in choice.logprobs.content],
        choice.weight_versions,
        choice.finish_reason,
        choice.truncated_logprobs,
    )
    covered = sum(span.end - span.start for span in completion.spans)
    truncated = completion.logprobs if completion.truncated_logprobs is None else completion.truncated_logprobs
    if not len(completion.token_ids) == len(completion.logprobs) == len(truncated) == covered:
        raise ValueError("its token_ids, logprobs and weight_versions have different lengths")
    return completion


def read_scores(content: bytes, token_ids: Sequence[int]) -> Scores:
    """Raises `msgspec.DecodeError` or ValueError unless there is one for each of these tokens."""
    response = _scored.decode(content)
    tables = response.prompt_logprobs or []
    if len(tables) != len(token_ids):
        raise ValueError(f"it scores {len(tables)} of {len(token_ids)} tokens")
    scores = [0.0]
    for place, (table, token) in enumerate(zip(tables[1:], token_ids[1:], strict=True), 1):
        if table is None or token not in table:
            raise ValueError(f"it does not score token {token}, at position {place}")
        scores.append(table[token].logprob)
    spans = _only(response.choices).weight_versions  # prompt and first token come out of one step of the engine
    return Scores(scores, Version.parse(spans[0].version) if spans else None)


def _only(choices: Sequence[T]) -> T:
    if len(choices) != 1:
        raise ValueError(f"it has {len(choices)} choices instead of one")
    return choices[0]


def expand_versions(spans: Sequence[WeightVersionSpan]) -> list[Version]:
    """One version per token."""
    return [version for span in spans for version in [Version.parse(span.version)] * (span.end - span.start)]
