"""Responses of `/inference/v1/generate`, decoded and checked: sampled tokens, or logprobs of given ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headrace.inference.schema import WeightVersionSpan
from headrace.rollout.version import Version

T = TypeVar("T")


class Completion(msgspec.Struct):
    """Sampled tokens; the lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightVersionSpan]
    """The version that sampled each range of tokens; `versions` has one entry per token."""
    finish_reason: str
    truncated_logprobs: list[float] | None = None
    """Logprobs in the distribution that top_p and top_k leave; None if they remove nothing or are not reported."""

    @property
    def versions(self) -> list[Version]:
        return [version for span in self.spans for version in [Version.parse(span.version)] * (span.end - span.start)]

    @property
    def steps(self) -> np.ndarray:
        """Return the step of each token's version, int32."""
        steps = [Version.parse(span.version).step for span in self.spans]
        return np.repeat(np.array(steps, np.int32), [span.end - span.start for span in self.spans])


class Scores(msgspec.Struct):
    """Logprobs of a given sequence."""

    logprobs: list[float]
    """One per token; 0.0 for the first."""
    version: Version | None
    """The weights that computed them; None from an engine that does not serve a policy."""


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
    """The fields of a `GenerateResponse` that are needed, which decodes faster than all of them."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


_decoder = msgspec.json.Decoder(_Generated)


def read_completion(content: bytes) -> Completion:
    """Decode a completion. Raises `msgspec.DecodeError` or ValueError for an invalid or inconsistent response."""
    choice = _single(_decoder.decode(content).choices)
    if choice.logprobs is None or choice.weight_versions is None:
        raise ValueError("logprobs or weight_versions is missing: this server cannot serve a policy")
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
        raise ValueError("token_ids, logprobs and weight_versions have different lengths")
    return completion


def read_scores(content: bytes, token_ids: Sequence[int]) -> Scores:
    """Decode prompt logprobs. Raises `msgspec.DecodeError` or ValueError unless every token has one."""
    response = _decoder.decode(content)
    tables = response.prompt_logprobs or []
    if len(tables) != len(token_ids):
        raise ValueError(f"prompt_logprobs has {len(tables)} entries for {len(token_ids)} tokens")
    scores = [0.0]
    for place, (table, token) in enumerate(zip(tables[1:], token_ids[1:], strict=True), 1):
        if table is None or token not in table:
            raise ValueError(f"prompt_logprobs lacks token {token} at position {place}")
        scores.append(table[token].logprob)
    spans = _single(response.choices).weight_versions  # one step computes the prompt and the first token
    return Scores(scores, Version.parse(spans[0].version) if spans else None)


def _single(choices: Sequence[T]) -> T:
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices instead of one")
    return choices[0]
