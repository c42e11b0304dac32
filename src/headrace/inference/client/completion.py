"""What an engine has to say about tokens: those that it sampled, or how likely it finds given ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.inference.client.errors import EngineFailed
from headrace.inference.schema import GenerateResponse, WeightVersionSpan
from headrace.rollout.version import Version


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


class Generated(msgspec.Struct):
    """Of a `GenerateResponse`, what a completion needs: most of the whole is text that says the token ids again."""

    choices: list[_Choice]


def completion_of(response: Generated) -> Completion:
    """Raises `EngineFailed` for an answer that does not fit together."""
    choice = response.choices[0]
    if choice.logprobs is None or choice.weight_versions is None:
        raise EngineFailed("the engine's answer has no logprobs or no weight_versions: it cannot serve a policy")
    completion = Completion(
        choice.token_ids,
        [entry.logprob for entry in choice.logprobs.content],
        choice.weight_versions,
        choice.finish_reason,
        choice.truncated_logprobs,
    )
    covered = sum(span.end - span.start for span in completion.spans)
    if not len(completion.token_ids) == len(completion.logprobs) == covered:
        raise EngineFailed("the engine's answer has token_ids, logprobs and weight_versions of different lengths")
    return completion


def scores_of(response: GenerateResponse, token_ids: list[int]) -> Scores:
    """Raises `EngineFailed` unless there is one for each of these tokens."""
    entries = response.prompt_logprobs or []
    scores = [0.0 if entry is None else entry[token].logprob for entry, token in zip(entries, token_ids, strict=False)]
    if len(scores) != len(token_ids):
        raise EngineFailed(f"the engine scored {len(scores)} of {len(token_ids)} tokens")
    spans = response.choices[0].weight_versions  # prompt and first token come out of one step of the engine
    return Scores(scores, Version.parse(spans[0].version) if spans else None)


def expand_versions(spans: Sequence[WeightVersionSpan]) -> list[Version]:
    """One version per token."""
    return [version for span in spans for version in [Version.parse(span.version)] * (span.end - span.start)]
