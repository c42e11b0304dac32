"""What the routes that sample are asked alike: how to sample, and how to answer.

Left out on purpose: penalties, token biases and replies of a given form. They are refused, not ignored, as everything
is that would change the reply.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from headrace.inference.backend import GenerationResult, InvalidRequest
from headrace.inference.schema import PromptTokensDetails, SamplingParams, Usage

MOST_CHOICES = 128
"""Of `n`."""
LONGEST_STOP = 1024
"""Characters of a stop string."""
Unsupported = Annotated[Any, "unsupported"]
"""The type of fields that would change the reply: all but the default and null, which ask for nothing, is refused."""


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to sample, as every route is asked; a null is the same as leaving the field out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    spaces_between_special_tokens: Any = None
    presence_penalty: Unsupported = 0
    frequency_penalty: Unsupported = 0
    repetition_penalty: Unsupported = 1
    logit_bias: Unsupported = {}
    min_tokens: Unsupported = 0
    bad_words: Unsupported = []
    allowed_token_ids: Unsupported = None
    include_stop_str_in_output: Unsupported = False
    skip_special_tokens: Unsupported = True
    truncate_prompt_tokens: Unsupported = None
    structured_outputs: Unsupported = None
    logits_processors: Unsupported = []
    detokenize: Unsupported = True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def engine_params(self, **params: Any) -> SamplingParams:
        """What an engine is asked for, `params` before what stands here."""
        refuse_unsupported(self)
        own = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        given = {name: value for name, value in own.items() if value is not None}
        return SamplingParams(**{**given, "stop": self.stops, **params})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None
    continuous_usage_stats: Unsupported = False


class OpenAIRequest(SamplingRequest, kw_only=True):
    """What is understood of both of OpenAI's requests."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's: the tokens of the prompt and of the reply come too."""
    cache_salt: str | None = None

    # These say something about the request, or how fast it is wanted. They change no reply.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    priority: Any = None
    request_id: Any = None

    response_format: Unsupported = msgspec.field(default_factory=lambda: {"type": "text"})
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    use_beam_search: Unsupported = False
    length_penalty: Unsupported = 1

    @property
    def counts_usage(self) -> bool:
        """Whether a stream shall end with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, **params: Any) -> list[SamplingParams]:
        """How to sample each of the `n` choices; each has a seed of its own."""
        if self.stream_options is not None:
            refuse_unsupported(self.stream_options)
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MOST_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MOST_CHOICES}, not {count}")
        first = self.engine_params(**params)
        made = [
            msgspec.structs.replace(first, seed=None if self.seed is None else self.seed + index)
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


def refuse_unsupported(body: msgspec.Struct) -> None:
    for field in unsupported_in(body):
        raise InvalidRequest(f"{field} is not supported: leave it out")


def unsupported_in(body: msgspec.Struct) -> Iterator[str]:
    """The fields by which something is asked for that is not supported."""
    neutral = _neutral_values(type(body)).items()
    return (field for field, value in neutral if getattr(body, field) not in (None, value))


@functools.cache
def _neutral_values(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What each unsupported field of a request is when it asks for nothing."""
    fields = [field for field in msgspec.structs.fields(kind) if field.type == Unsupported]
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in fields
    }


def envelope(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """What comes before the choices."""
    identity = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model_name}


def usage_of(prompt_tokens: int, results: Sequence[GenerationResult], choices: int) -> Usage:
    """Of results in order, so many for each prompt. A prompt counts once, and so does what the cache had of it."""
    completion = sum(len(result.token_ids) for result in results)
    cached = sum(result.cached_tokens for result in results[::choices])
    details = PromptTokensDetails(cached) if cached else None
    return Usage(prompt_tokens, completion, prompt_tokens + completion, details)
