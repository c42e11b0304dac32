"""`/inference/v1/generate` in vLLM's format: token ids in, token ids with logprobs and weight versions out.

Tokens are written as `token_id:N`; only stop strings are text. A stream has versions, truncated logprobs, prompt
logprobs and usage in its last event.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from headrace.inference.backend import GenerationResult, TokenChunk
from headrace.inference.schema import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    WeightVersionSpan,
)
from headrace.inference.server.request_bodies import SamplingRequest, Unsupported, usage_of
from headrace.inference.server.streaming import Progress, Updates, stream_events
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


class GenerateBody(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    sampling_params: VllmSampling = msgspec.field(default_factory=VllmSampling)  # type: ignore[assignment]
    priority: Any = None
    stream_options: Any = None
    """Ignored: a stream always ends with its usage."""
    features: Unsupported = None
    kv_transfer_params: Unsupported = None


class _ChoiceDelta(GenerateChoice, omit_defaults=True):
    """A part of a streamed choice."""


def reply(body: GenerateBody, result: GenerationResult, model_name: str) -> GenerateResponse:
    """Return the response of a request that is not streamed."""
    return GenerateResponse(
        **_head(body, model_name),
        choices=[_final_choice(GenerateChoice, body, result, result)],
        usage=usage_of(len(body.token_ids), [result], 1),
        prompt_logprobs=prompt_tables(body.token_ids, result),
    )


def stream(body: GenerateBody, updates: Updates, model_name: str) -> AsyncIterator[bytes]:
    """Yield the events of a response."""
    progress = Progress()

    def advance(update: TokenChunk | GenerationResult) -> Iterator[dict[str, Any]]:
        if isinstance(update, TokenChunk):
            progress.add(update)
            yield {"choices": [_ChoiceDelta(0, update.token_ids, None, _logprobs(body, progress.unsent()))]}
            return
        progress.complete(update)
        choice = _final_choice(_ChoiceDelta, body, progress.unsent(), update)
        tables = prompt_tables(body.token_ids, update)
        more = {} if tables is None else {"prompt_logprobs": tables}
        yield {"choices": [choice], "usage": usage_of(len(body.token_ids), [update], 1), **more}

    return stream_events(_head(body, model_name), updates, [advance])


def _head(body: GenerateBody, model_name: str) -> dict[str, Any]:
    """Return the fields that a response and each event of a stream begin with."""
    identity = body.request_id or uuid.uuid4().hex
    return {"request_id": identity, "model": body.model or model_name, "created": int(time.time())}


def _final_choice(
    kind: type[GenerateChoice], body: GenerateBody, tokens: TokenChunk | GenerationResult, result: GenerationResult
) -> GenerateChoice:
    """Return a choice with these tokens, all or the last ones of a result, and the fields of its end."""
    flat = tokens.logprobs if body.flat_logprobs else None
    if flat is not None and not math.isfinite(sum(flat)):  # rare, and a sum shows it fast
        flat = [finite(logprob) for logprob in flat]
    return kind(
        index=0,
        token_ids=tokens.token_ids,
        finish_reason=result.finish_reason,
        logprobs=None if body.flat_logprobs else _logprobs(body, tokens),
        flat_logprobs=flat,
        weight_versions=[WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans],
        stop_reason=result.stop_reason,
        logprobs_mode=None if body.sampling_params.logprobs is None else result.logprobs_mode,
        truncated_logprobs=None if body.sampling_params.logprobs is None else result.truncated_logprobs,
        latents=result.latents,
        routed_experts=result.routed_experts,
    )


def prompt_tables(
    token_ids: list[int], result: GenerationResult, names: TokenText | None = None
) -> list[dict[int, PromptLogprob] | None] | None:
    """Return prompt logprobs in vLLM's format: a table of the token and its alternatives each, None for the first."""
    if result.prompt_logprobs is None:
        return None
    alternatives = result.prompt_top_logprobs or [[]] * len(token_ids)
    tables: list[dict[int, PromptLogprob] | None] = [None]
    for token, logprob, others in zip(token_ids[1:], result.prompt_logprobs[1:], alternatives[1:], strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(others, 1)}
        tables.append(
            {
                each: PromptLogprob(finite(value), ranks.get(each), None if names is None else names.text(each))
                for each, value in {token: logprob, **dict(others)}.items()
            }
        )
    return tables


def _logprobs(body: GenerateBody, tokens: TokenChunk | GenerationResult) -> ChoiceLogprobs | None:
    """Return the logprobs of these tokens, if they were requested."""
    if body.sampling_params.logprobs is None:
        return None
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
