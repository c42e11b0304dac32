"""Conversion between our requests and results and vLLM's JSON. Pure functions.

Newer versions of vLLM identify tokens by `token_id`, older ones by the text `token_id:N`; both are read.
End-of-sequence tokens are sent as stop tokens, so that vLLM ends a request where the embedded engine would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from headrace.inference.backend import (
    EngineError,
    InvalidRequest,
    RequestCancelled,
    TokenChunk,
    TopLogprobs,
    check_request,
    check_token_ids,
)
from headrace.inference.schema import MIN_LOGPROB, SamplingParams, WeightVersionSpan
from headrace.rollout.version import Version

ROUTE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""vLLM's prefix of request ids on this route."""
FINAL_ONLY = 2
"""vLLM's `output_kind` for a single output at the end."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM's range; it would silently change lower temperatures."""
MAX_SEED = 2**63
"""Seeds are taken modulo this; vLLM treats -1 as no seed."""
_TOKEN = "token_id:"

Spans = list[tuple[Version, int, int]]


class _Logprob(msgspec.Struct, gc=False):
    logprob: float
    token_id: int | None = None
    token: str = ""

    @property
    def id(self) -> int:
        return int(self.token.removeprefix(_TOKEN)) if self.token_id is None else self.token_id


class _Content(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Content] | None = None


class Choice(msgspec.Struct):
    """The sampled tokens; in a stream, the new ones."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    routed_experts: bytes | None = None
    """Where vLLM records them: a `.npy` file, as in `GenerateChoice`."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _PromptLogprob(msgspec.Struct, gc=False):
    logprob: float


class VllmResponse(msgspec.Struct):
    """A response, or one event of a stream."""

    choices: list[Choice] = []
    usage: _Usage | None = None
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None
    error: Any = None

    @property
    def cached_tokens(self) -> int:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


decode_response = msgspec.json.Decoder(VllmResponse).decode


def check(token_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` for requests that vLLM would fail at or change."""
    check_request(token_ids, params, vocab_size, max_model_len)
    if params.latents is not None:
        fix = 'Serve the model with inference.engine = "embedded".'
        raise InvalidRequest("vLLM cannot blend input embeddings while it samples", key="latents", fix=fix)
    check_token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        fact = f"must be 0 or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE:g} with vLLM"
        raise InvalidRequest(fact, key="temperature", value=params.temperature)
    if params.prompt_logprobs is not None and params.temperature not in (0.0, 1.0):
        fact = f"vLLM computes them at temperature 1 only, not {params.temperature}"
        raise InvalidRequest(fact, key="prompt_logprobs", fix="The embedded engine supports any temperature.")


def request_body(
    token_ids: list[int],
    params: SamplingParams,
    *,
    request_id: str,
    max_tokens: int,
    eos_token_ids: Collection[int],
    model: str | None,
    cache_salt: str | None,
    urgent: bool,
    stream: bool,
    logprobs: bool,
) -> bytes:
    """Encode a request. `logprobs`: whether logprobs may be requested."""
    stop_ids = [*params.stop_token_ids, *(() if params.ignore_eos else sorted(eos_token_ids))]
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "max_tokens": max_tokens,
        "seed": None if params.seed is None else params.seed % MAX_SEED,
        "stop_token_ids": stop_ids,
        "stop": params.stop,
        "ignore_eos": True,  # they are among the stop tokens
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
        # One more than requested, since the sampled token is always among them.
        "logprobs": params.logprobs + 1 if params.logprobs else 0 if logprobs else None,
        "prompt_logprobs": params.prompt_logprobs,
    }
    if params.penalizes:
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        sampling |= {name: getattr(params, name) for name in names}
    if params.structured_outputs is not None:
        sampling["structured_outputs"] = params.structured_outputs
    if not stream:
        sampling["output_kind"] = FINAL_ONLY
    body = {
        "request_id": request_id,
        "token_ids": token_ids,
        "model": model,
        "cache_salt": cache_salt,
        "priority": -1 if urgent else 0,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
        "sampling_params": {name: value for name, value in sampling.items() if value is not None},
    }
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def token_chunk(choice: Choice, params: SamplingParams) -> TokenChunk:
    """Return the tokens of a choice with the requested logprobs."""
    tokens = choice.token_ids or []
    content = [] if choice.logprobs is None else choice.logprobs.content or []
    logprobs = [entry.logprob for entry in content] or [float("nan")] * len(tokens)  # none were requested
    if len(logprobs) != len(tokens):
        raise EngineError(f"vLLM sent {len(tokens)} tokens and {len(logprobs)} logprobs")
    _check_logprobs(logprobs, tokens, "sampled")
    if not params.logprobs:
        return TokenChunk(tokens, logprobs)
    tables = ([(top.id, top.logprob) for top in entry.top_logprobs] for entry in content)
    return TokenChunk(tokens, logprobs, [_best(table, params.logprobs) for table in tables])


def prompt_logprobs(
    response: VllmResponse, token_ids: Sequence[int], params: SamplingParams
) -> tuple[list[float] | None, list[TopLogprobs] | None]:
    """Return the logprobs of the prompt tokens and the most likely tokens at each position."""
    if params.prompt_logprobs is None:
        return None, None
    tables = [table or {} for table in response.prompt_logprobs or []]
    if len(tables) != len(token_ids):
        raise EngineError(f"vLLM sent logprobs of {len(tables)} prompt tokens instead of {len(token_ids)}")
    chosen = [0.0, *(table[token].logprob for table, token in zip(tables[1:], token_ids[1:], strict=True))]
    _check_logprobs(chosen, token_ids, "prompt")
    if not params.prompt_logprobs:
        return chosen, None
    pairs = ([(token, entry.logprob) for token, entry in table.items()] for table in tables)
    return chosen, [_best(table, params.prompt_logprobs) for table in pairs]


def finish_reason(choice: Choice) -> str:
    """Return `stop` or `length`; raises for a request that vLLM did not finish."""
    if choice.finish_reason in ("stop", "length"):
        return choice.finish_reason
    if choice.finish_reason == "abort":
        raise RequestCancelled("vLLM aborted the request")
    raise EngineError(f"vLLM could not finish the request: finish_reason is {choice.finish_reason!r}")


def counted_spans(marks: Iterable[tuple[Version, int]], length: int) -> Spans:
    """Return version spans from the number of tokens at the load of each version, the first at 0."""
    spans: Spans = []
    for version, start in marks:
        if spans and spans[-1][1] == start:
            spans.pop()  # it sampled nothing
        elif spans:
            spans[-1] = (*spans[-1][:2], start)
        spans.append((version, start, length))
    return [span for span in spans if span[1] < span[2]]


def _check_logprobs(logprobs: Sequence[float], tokens: Sequence[int], kind: str) -> None:
    """Raise `EngineError` for tokens of probability 0: weights or sampler are broken."""
    for logprob, token in zip(logprobs, tokens, strict=True):
        if logprob <= MIN_LOGPROB:
            raise EngineError(f"vLLM gave the {kind} token {token} the logprob {logprob:g}, which is not finite")


def _best(pairs: TopLogprobs, count: int) -> TopLogprobs:
    """Return the most likely tokens, highest first."""
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
