"""`/inference/v1/generate` in vLLM's format: token ids in, token ids with logprobs and weight versions out.

Tokens are written as `token_id:N`; only stop strings are text. A stream has versions, truncated logprobs, prompt
logprobs and usage in its last event.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.inference.backend import GenerationResult, TokenChunk, TopLogprobs
from headrace.inference.schema import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
    TopLogprob,
    WeightVersionSpan,
)
from headrace.inference.server.request_bodies import SamplingRequest, Unsupported, check_sampling, usage_of
from headrace.inference.server.streaming import DONE, Updates, event
from headrace.inference.server.token_text import TokenText, finite


class VllmSampling(SamplingRequest, kw_only=True):
    """vLLM's sampling parameters. Those about detokenization and vLLM's internals are ignored."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: Any = None
    detokenize: Any = None
    output_kind: Any = None
    output_text_buffer_length: Any = None
    skip_clone: Any = None
    skip_reading_prefix_cache: Any = None
    routed_experts_prompt_start: Any = None
    n: Unsupported = 1
    flat_logprobs: Unsupported = False
    extra_args: Unsupported = msgspec.field(default_factory=dict)

    def checked(self) -> SamplingParams:
        """Return the engine's parameters. Raises `InvalidRequest`."""
        params = self.engine_params()
        check_sampling(params)
        return params


class GenerateBody(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    sampling_params: VllmSampling = msgspec.field(default_factory=VllmSampling)  # type: ignore[assignment]
    priority: Any = None
    stream_options: Any = None
    """Ignored: a stream always ends with its usage."""
    features: Unsupported = None
    kv_transfer_params: Unsupported = None


class ChoiceDelta(msgspec.Struct, omit_defaults=True):
    """A part of a streamed `GenerateChoice`."""

    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    stop_reason: int | str | None = None
    truncated_logprobs: list[float] | None = None


def whole_response(body: GenerateBody, result: GenerationResult, model_name: str) -> GenerateResponse:
    has_logprobs = body.sampling_params.logprobs is not None
    choice = GenerateChoice(
        index=0,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason,
        logprobs=_logprobs(result) if has_logprobs else None,
        weight_versions=_spans(result),
        stop_reason=result.stop_reason,
        truncated_logprobs=result.truncated_logprobs if has_logprobs else None,
    )
    return GenerateResponse(
        request_id=body.request_id or uuid.uuid4().hex,
        choices=[choice],
        model=body.model or model_name,
        created=int(time.time()),
        usage=usage_of(len(body.token_ids), [result], 1),
        prompt_logprobs=prompt_tables(body.token_ids, result),
    )


async def streamed(body: GenerateBody, updates: Updates, model_name: str) -> AsyncIterator[bytes]:
    has_logprobs = body.sampling_params.logprobs is not None
    head: dict[str, Any] = {
        "request_id": body.request_id or uuid.uuid4().hex,
        "model": body.model or model_name,
        "created": int(time.time()),
    }
    sent = 0
    async with contextlib.aclosing(updates):  # type: ignore[type-var]
        async for _, update in updates:
            if isinstance(update, TokenChunk):
                sent += len(update.token_ids)
                delta = ChoiceDelta(0, update.token_ids, None, _logprobs(update) if has_logprobs else None)
                yield event({**head, "choices": [delta]})
            else:
                yield event({**head, **_last_event(body, update, sent, has_logprobs)})
    yield DONE


def _last_event(body: GenerateBody, result: GenerationResult, sent: int, has_logprobs: bool) -> dict[str, Any]:
    """Return the fields of the last event, with the tokens that were not sent before."""
    tops = None if result.top_logprobs is None else result.top_logprobs[sent:]
    left = TokenChunk(result.token_ids[sent:], result.logprobs[sent:], tops)
    choice = ChoiceDelta(
        0,
        left.token_ids,
        result.finish_reason,
        _logprobs(left) if has_logprobs else None,
        _spans(result),
        result.stop_reason,
        result.truncated_logprobs if has_logprobs else None,
    )
    tables = prompt_tables(body.token_ids, result)
    ending = {"choices": [choice], "usage": usage_of(len(body.token_ids), [result], 1)}
    return ending if tables is None else {**ending, "prompt_logprobs": tables}


def prompt_tables(
    token_ids: list[int], result: GenerationResult, names: TokenText | None = None
) -> list[dict[int, PromptLogprob] | None] | None:
    """Return prompt logprobs in vLLM's format: a table of the token and its alternatives each, None for the first."""
    if result.prompt_logprobs is None:
        return None
    alternatives = result.prompt_top_logprobs or [[]] * len(token_ids)
    entries = zip(token_ids[1:], result.prompt_logprobs[1:], alternatives[1:], strict=True)
    return [None, *(_table(token, logprob, others, names) for token, logprob, others in entries)]


def _table(token: int, logprob: float, others: TopLogprobs, names: TokenText | None) -> dict[int, PromptLogprob]:
    ranks = {other: rank for rank, (other, _) in enumerate(others, 1)}
    logprobs = {token: logprob, **dict(others)}
    return {
        each: PromptLogprob(finite(value), ranks.get(each), None if names is None else names.text(each))
        for each, value in logprobs.items()
    }


def _logprobs(tokens: TokenChunk | GenerationResult) -> ChoiceLogprobs:
    tops = tokens.top_logprobs or [[]] * len(tokens.token_ids)
    return ChoiceLogprobs(
        [
            TokenLogprob(
                token,
                finite(logprob),
                f"token_id:{token}",
                top_logprobs=[TopLogprob(other, finite(value), f"token_id:{other}") for other, value in top],
            )
            for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, tops, strict=True)
        ]
    )


def _spans(result: GenerationResult) -> list[WeightVersionSpan]:
    return [WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans]
