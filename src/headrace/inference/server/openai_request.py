"""What the two OpenAI routes are asked alike: how to sample, and how to answer.

Left out on purpose: penalties and token biases. They are refused, not ignored, as everything is that would change the
reply.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.inference.backend import InvalidRequest, Result
from headrace.inference.schema import PromptTokensDetails, SamplingParams, Usage

MOST_CHOICES = 128
"""Of `n`."""
LONGEST_STOP = 1024
"""Characters of a stop string."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "use_beam_search": (None, False),
}
"""Fields that would change the reply, and the values that ask for nothing."""


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class OpenAIRequest(msgspec.Struct, kw_only=True):
    """What is understood of both requests; a null is the same as leaving the field out."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's: the tokens of the prompt and of the reply come too."""
    cache_salt: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    use_beam_search: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def counts_usage(self) -> bool:
        """Whether a stream shall end with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, **params: Any) -> list[SamplingParams]:
        """How to sample each of the `n` choices; each has a seed of its own."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MOST_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MOST_CHOICES}, not {count}")
        made = [
            SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=-1 if self.top_k is None else self.top_k,
                min_p=0.0 if self.min_p is None else self.min_p,
                seed=None if self.seed is None else self.seed + index,
                stop=self.stops,
                ignore_eos=self.ignore_eos,
                **params,
            )
            for index in range(count)
        ]
        for each in (made[0], made[-1]):
            check_sampling(each)
        return made


def check_sampling(params: SamplingParams) -> None:
    """Raises `InvalidRequest` for what no engine takes."""
    problem = params.problem()
    if problem is not None:
        raise InvalidRequest(problem)
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise InvalidRequest("seed must be a number of 64 bits, for each of n choices one more than for the last")
    if any(len(stop) > LONGEST_STOP for stop in params.stop):
        raise InvalidRequest(f"stop: a string has more than {LONGEST_STOP} characters")


def refuse_unsupported(body: msgspec.Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    for field, values in neutral.items():
        if getattr(body, field) not in values:
            raise InvalidRequest(f"{field} is not supported: leave it out")


def envelope(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """What comes before the choices."""
    identity = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model_name}


def usage_of(prompt_tokens: int, results: Sequence[Result], choices: int) -> Usage:
    """Of results in order, so many for each prompt. A prompt counts once, and so does what the cache had of it."""
    completion = sum(len(result.token_ids) for result in results)
    cached = sum(result.cached_tokens for result in results[::choices])
    details = PromptTokensDetails(cached) if cached else None
    return Usage(prompt_tokens, completion, prompt_tokens + completion, details)
