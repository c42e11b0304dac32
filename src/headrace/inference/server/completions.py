"""`/v1/completions`: OpenAI's text completions, of texts or token ids, whole and streamed.

With `echo` the prompt precedes the completion, and with `logprobs` also its logprobs; `max_tokens = 0` returns only
these. Left out: `suffix`, and a `best_of` other than `n`; they are rejected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from headrace.inference.backend import GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.schema import SamplingParams, Usage
from headrace.inference.server.generate import prompt_tables
from headrace.inference.server.request_bodies import OpenAIRequest, Unsupported, envelope, usage_of
from headrace.inference.server.streaming import GrowingText, Progress, Update, Updates, cut, stream_events
from headrace.inference.server.token_text import Offsets, TokenText
from headrace.text.tokenizer import Tokenizer

MAX_REQUESTS = 512
"""Limit of prompts times `n`."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: Unsupported = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's: prompt logprobs, with this many alternatives."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text."""

    @property
    def only_scores(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


class Completions:
    """Converts requests to prompts and results to completions."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, token_text: TokenText) -> None:
        self.model_name = model_name
        self._tokenizer = tokenizer
        self.token_text = token_text

    def params(self, body: CompletionRequest) -> list[SamplingParams]:
        """Return the engine's parameters of each choice of a prompt."""
        if body.best_of not in (None, body.choices):
            raise InvalidRequest("not supported", key="best_of", value=body.best_of, fix="Omit it.")
        if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
            raise InvalidRequest("logprobs of a prompt are not supported in a stream", key="stream")
        scores = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scores = max(body.logprobs, scores or 0)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return body.sampling(
            max_tokens=1 if body.only_scores else max_tokens,  # an engine samples at least one token
            prompt_logprobs=scores,
        )

    def prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt."""
        inputs: Any = body.prompt
        if isinstance(inputs, str) or (inputs and all(isinstance(each, int) for each in inputs)):
            inputs = [inputs]
        if len(inputs) * body.choices > MAX_REQUESTS:
            raise InvalidRequest(f"{len(inputs)} prompts times n are more than {MAX_REQUESTS}", key="prompt")
        if any(isinstance(each, int) for each in inputs):
            raise InvalidRequest("must be a text or a list of token ids, or a list of either", key="prompt")
        special = body.add_special_tokens is not False
        prompts = [
            each if isinstance(each, list) else self._tokenizer.encode(each, add_special_tokens=special)
            for each in inputs
        ]
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidRequest("empty", key=f"prompt[{index}]")
        if not prompts:
            raise InvalidRequest("empty", key="prompt")
        return prompts

    def reply(
        self, body: CompletionRequest, prompts: list[list[int]], results: Sequence[GenerationResult]
    ) -> dict[str, Any]:
        """Return the response of a request that is not streamed, with the choices of the first prompt first."""
        choices = [
            _Choice(self, body, index, prompts[index // body.choices]).finish(result)
            for index, result in enumerate(results)
        ]
        return {**self._head(body), "choices": choices, "usage": _usage(body, prompts, results)}

    def _head(self, body: CompletionRequest) -> dict[str, Any]:
        return envelope("cmpl", "text_completion", body.model or self.model_name)

    def stream(
        self, body: CompletionRequest, prompts: list[list[int]], updates: Updates, count: int
    ) -> AsyncIterator[bytes]:
        """Yield the events of all choices, then `[DONE]`."""
        choices = [_Choice(self, body, index, prompts[index // body.choices]) for index in range(count)]
        usage = partial(_usage, body, prompts) if body.counts_usage else None
        return stream_events(self._head(body), updates, [choice.advance for choice in choices], usage=usage)

    def text_of(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def echoed(self, body: CompletionRequest, index: int, prompt: list[int]) -> str:
        """Return the prompt's text, decoded if it was token ids; empty without `echo`."""
        if not body.echo:
            return ""
        place = index // body.choices
        original = body.prompt if isinstance(body.prompt, str) else body.prompt[place]
        return original if isinstance(original, str) else self._tokenizer.decode(prompt)


class _Choice:
    """One choice of a completion, streamed or whole."""

    def __init__(self, completions: Completions, body: CompletionRequest, index: int, prompt: list[int]) -> None:
        self._completions = completions
        self._body = body
        self._index = index
        self._prompt = prompt
        self._before = completions.echoed(body, index, prompt)
        self._begun = False
        self._progress = Progress()
        self._text = GrowingText(body.stops, ())
        self._offsets = Offsets()

    def advance(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the event that an update makes possible, if any."""
        body = self._body
        if isinstance(update, GenerationResult):
            yield {"choices": [self.finish(update)]}
        elif not body.only_scores and self._progress.add(update):
            text = self._text.more(self._completions.text_of(self._progress.token_ids))
            has_details = body.logprobs is not None or body.return_token_ids
            if text or has_details or (self._before and not self._begun):
                yield {"choices": [self._chunk(text)]}

    def finish(self, result: GenerationResult) -> dict[str, Any]:
        """Return the part of the choice that was not streamed, or all of it."""
        result = _requested_part(self._body, result)
        self._progress.complete(result)
        stops = self._body.stops if isinstance(result.stop_reason, str) else []
        text = self._text.rest(cut(self._completions.text_of(result.token_ids), stops))
        chunk = self._chunk(text, result) | {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        if self._body.logprobs is not None and result.logprobs_mode is not None:
            chunk["logprobs_mode"] = result.logprobs_mode
        if self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_tables(self._prompt, result, self._completions.token_text)
        return chunk

    def _chunk(self, text: str, result: GenerationResult | None = None) -> dict[str, Any]:
        tokens = self._progress.unsent()
        chunk: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
        if not self._begun:
            chunk["text"] = self._before + text
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = self._prompt
        if self._body.logprobs is not None:
            chunk["logprobs"] = self._logprobs(tokens, result)
        if self._body.return_token_ids:
            chunk["token_ids"] = tokens.token_ids
        self._begun = True
        return chunk

    def _logprobs(self, tokens: TokenChunk, result: GenerationResult | None) -> dict[str, Any]:
        """Return the logprobs of tokens, with `echo` after those of the prompt, the first of which is None."""
        ids: list[int] = tokens.token_ids
        scores: list[float | None] = [*tokens.logprobs]
        tops = tokens.top_logprobs or [[]] * len(ids)
        if self._body.echo and result is not None and result.prompt_logprobs is not None:
            ids = [*self._prompt, *ids]
            scores = [None, *result.prompt_logprobs[1:], *scores]
            tops = [*(result.prompt_top_logprobs or [[]] * len(self._prompt)), *tops]
        best = [top[: self._body.logprobs] for top in tops] if self._body.logprobs else None
        return self._completions.token_text.completion_logprobs(ids, scores, best, self._offsets)


def _usage(body: CompletionRequest, prompts: list[list[int]], results: Sequence[GenerationResult]) -> Usage:
    return usage_of(sum(map(len, prompts)), [_requested_part(body, result) for result in results], body.choices)


def _requested_part(body: CompletionRequest, result: GenerationResult) -> GenerationResult:
    """Return the result; of one that only scores, the prompt's logprobs."""
    if not body.only_scores:
        return result
    return GenerationResult(
        [], [], [], "length", None, result.prompt_logprobs, prompt_top_logprobs=result.prompt_top_logprobs
    )
