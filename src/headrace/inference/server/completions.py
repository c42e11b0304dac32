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
from headrace.inference.server.chat import Chat
from headrace.inference.server.generate import prompt_tables
from headrace.inference.server.request_bodies import OpenAIRequest, Unsupported, envelope, usage_of
from headrace.inference.server.streaming import GrowingText, Progress, Update, Updates, cut, stream_events
from headrace.inference.server.token_text import Offsets
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

    def choice_params(self) -> list[SamplingParams]:
        """Return the engine's parameters of each choice of a prompt."""
        if self.best_of not in (None, self.choices):
            raise InvalidRequest("not supported", key="best_of", value=self.best_of, fix="Omit it.")
        if self.stream and (self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)):
            raise InvalidRequest("logprobs of a prompt are not supported in a stream", key="stream")
        scores = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scores = max(self.logprobs, scores or 0)
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(
            max_tokens=1 if self.only_scores else max_tokens,  # an engine samples at least one token
            prompt_logprobs=scores,
        )

    def prompt_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of each prompt."""
        inputs: Any = self.prompt
        if isinstance(inputs, str) or (inputs and all(isinstance(each, int) for each in inputs)):
            inputs = [inputs]
        if len(inputs) * self.choices > MAX_REQUESTS:
            raise InvalidRequest(f"{len(inputs)} prompts times n are more than {MAX_REQUESTS}", key="prompt")
        if any(isinstance(each, int) for each in inputs):
            raise InvalidRequest("must be a text or a list of token ids, or a list of either", key="prompt")
        special = self.add_special_tokens is not False
        encode = partial(tokenizer.encode, add_special_tokens=special)
        prompts = [each if isinstance(each, list) else encode(each) for each in inputs]
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidRequest("empty", key=f"prompt[{index}]")
        if not prompts:
            raise InvalidRequest("empty", key="prompt")
        return prompts


def reply(
    chat: Chat, body: CompletionRequest, prompts: list[list[int]], results: Sequence[GenerationResult]
) -> dict[str, Any]:
    """Return the response of a request that is not streamed, with the choices of the first prompt first."""
    head = envelope("cmpl", "text_completion", body.model or chat.model_name)
    choices = [_Choice(chat, body, index, prompts).finish(result) for index, result in enumerate(results)]
    return {**head, "choices": choices, "usage": _usage(body, prompts, results)}


def stream(
    chat: Chat, body: CompletionRequest, prompts: list[list[int]], updates: Updates, count: int
) -> AsyncIterator[bytes]:
    """Yield the events of all choices, then `[DONE]`."""
    head = envelope("cmpl", "text_completion", body.model or chat.model_name)
    choices = [_Choice(chat, body, index, prompts) for index in range(count)]
    usage = partial(_usage, body, prompts) if body.counts_usage else None
    return stream_events(head, updates, [choice.advance for choice in choices], usage=usage)


class _Choice:
    """One choice of a completion, streamed or whole."""

    def __init__(self, chat: Chat, body: CompletionRequest, index: int, prompts: list[list[int]]) -> None:
        self._chat, self._body, self._index = chat, body, index
        place = index // body.choices
        self._prompt = prompts[place]
        self._before = ""
        """The prompt's text, decoded if it was token ids; empty without `echo`."""
        if body.echo:
            original = body.prompt if isinstance(body.prompt, str) else body.prompt[place]
            self._before = original if isinstance(original, str) else chat.tokenizer.decode(self._prompt)
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
            text = self._text.more(self._decode(self._progress.token_ids))
            has_details = body.logprobs is not None or body.return_token_ids
            if text or has_details or (self._before and not self._begun):
                yield {"choices": [self._chunk(text)]}

    def _decode(self, token_ids: list[int]) -> str:
        return self._chat.tokenizer.decode(token_ids, skip_special_tokens=True)

    def finish(self, result: GenerationResult) -> dict[str, Any]:
        """Return the part of the choice that was not streamed, or all of it."""
        result = _requested_part(self._body, result)
        self._progress.complete(result)
        stops = self._body.stops if isinstance(result.stop_reason, str) else []
        text = self._text.rest(cut(self._decode(result.token_ids), stops))
        chunk = self._chunk(text, result) | {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        if self._body.logprobs is not None and result.logprobs_mode is not None:
            chunk["logprobs_mode"] = result.logprobs_mode
        if self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_tables(self._prompt, result, self._chat.token_text)
        return chunk

    def _chunk(self, text: str, result: GenerationResult | None = None) -> dict[str, Any]:
        """Return a part of the choice: this text, and the tokens that were not sent yet."""
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
        return self._chat.token_text.completion_logprobs(ids, scores, best, self._offsets)


def _usage(body: CompletionRequest, prompts: list[list[int]], results: Sequence[GenerationResult]) -> Usage:
    return usage_of(sum(map(len, prompts)), [_requested_part(body, result) for result in results], body.choices)


def _requested_part(body: CompletionRequest, result: GenerationResult) -> GenerationResult:
    """Return the result; of one that only scores, the prompt's logprobs."""
    if not body.only_scores:
        return result
    return GenerationResult(
        [], [], [], "length", None, result.prompt_logprobs, prompt_top_logprobs=result.prompt_top_logprobs
    )
