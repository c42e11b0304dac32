"""`/v1/completions`: OpenAI's older form, around the engine: texts or token ids go on as they are.

A prompt with `echo` comes back before its completion, with `logprobs` its scores too; `max_tokens = 0` asks for nothing
but these. Left out on purpose: `suffix` and a `best_of` of its own, which are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from headrace.inference.backend import GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.schema import SamplingParams
from headrace.inference.server.generate import prompt_tables
from headrace.inference.server.openai_request import OpenAIRequest, Unsupported, envelope, usage_of
from headrace.inference.server.streaming import DONE, News, event
from headrace.inference.server.text import GrowingText, Progress, cut
from headrace.inference.server.token_text import Offsets, TokenText
from headrace.text.tokenizer import Tokenizer

MOST_REQUESTS = 512
"""Prompts times `n`."""
MAX_TOKENS = 16
"""Unless told otherwise, as with OpenAI."""


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: Unsupported = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's: scores of the prompt, with so many alternatives."""
    add_special_tokens: bool | None = None
    """Of a text: whether the tokenizer adds what it begins texts with."""

    @property
    def only_scores(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n


class Completions:
    """Requests to prompts, results to completions."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, token_text: TokenText) -> None:
        self.model_name = model_name
        self._tokenizer = tokenizer
        self.token_text = token_text

    def params(self, body: CompletionRequest) -> list[SamplingParams]:
        """How to sample each of the choices of a prompt."""
        if body.best_of not in (None, body.choices):
            raise InvalidRequest("best_of is not supported: leave it out")
        if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
            raise InvalidRequest("stream: the scores of a prompt come in one piece; ask for them without stream")
        scores = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scores = max(body.logprobs, scores or 0)
        asked = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return body.sampling(
            max_tokens=1 if body.only_scores else asked,  # an engine samples at least one: it is dropped
            prompt_logprobs=scores,
        )

    def prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The tokens of each prompt."""
        given: Any = body.prompt
        if isinstance(given, str) or (given and all(isinstance(each, int) for each in given)):
            given = [given]
        if len(given) * body.choices > MOST_REQUESTS:
            raise InvalidRequest(f"prompt: {len(given)} prompts times n are more than {MOST_REQUESTS}")
        prompts = [each if isinstance(each, list) else self._encoded(each, body) for each in given]
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidRequest(f"prompt[{index}] is empty")
        if not prompts:
            raise InvalidRequest("prompt is empty")
        return prompts

    def _encoded(self, text: str | int, body: CompletionRequest) -> list[int]:
        if isinstance(text, int):
            raise InvalidRequest("prompt must be a text or a list of token ids, or a list of either")
        return self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)

    def reply(
        self, body: CompletionRequest, prompts: list[list[int]], results: Sequence[GenerationResult]
    ) -> dict[str, Any]:
        """All choices, those of the first prompt first."""
        results = [_without_tokens(result) for result in results] if body.only_scores else results
        choices = [
            self._choice(body, index, prompts[index // body.choices], result) for index, result in enumerate(results)
        ]
        usage = usage_of(sum(map(len, prompts)), results, body.choices)
        head = envelope("cmpl", "text_completion", body.model or self.model_name)
        return {**head, "choices": choices, "usage": usage}

    def _choice(
        self, body: CompletionRequest, index: int, prompt: list[int], result: GenerationResult
    ) -> dict[str, Any]:
        before = self.echoed(body, index, prompt)
        choice: dict[str, Any] = {
            "index": index,
            "text": before + self.said(body, result),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "logprobs": None if body.logprobs is None else self._logprobs(body, prompt, result),
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_tables(prompt, result, self.token_text)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": result.token_ids}
        return choice

    def _logprobs(self, body: CompletionRequest, prompt: list[int], result: GenerationResult) -> dict[str, Any]:
        """Of the completion; with `echo`, of the prompt before it, of whose first token nothing is known."""
        scores: list[float | None] = [*result.logprobs]
        tops = result.top_logprobs or [[]] * len(scores)
        tokens = result.token_ids
        if body.echo and result.prompt_logprobs is not None:
            tokens = [*prompt, *tokens]
            scores = [None, *result.prompt_logprobs[1:], *scores]
            tops = [*(result.prompt_top_logprobs or [[]] * len(prompt)), *tops]
        tops = [top[: body.logprobs] for top in tops]
        return self.token_text.completion_logprobs(tokens, scores, tops if body.logprobs else None, Offsets())

    async def stream(
        self, body: CompletionRequest, prompts: list[list[int]], news: News, count: int
    ) -> AsyncIterator[bytes]:
        """The choices as they come, then `[DONE]`."""
        head = envelope("cmpl", "text_completion", body.model or self.model_name)
        replies = [_Reply(self, body, index, prompts[index // body.choices]) for index in range(count)]
        results: dict[int, GenerationResult] = {}
        async with contextlib.aclosing(news):  # type: ignore[type-var]
            async for index, found in news:
                if isinstance(found, GenerationResult):
                    found = _without_tokens(found) if body.only_scores else found
                    results[index] = found
                choice = replies[index].advance(found)
                if choice is not None:
                    yield event({**head, "choices": [choice]})
        if body.counts_usage:
            usage = usage_of(sum(map(len, prompts)), [results[index] for index in range(count)], body.choices)
            yield event({**head, "choices": [], "usage": usage})
        yield DONE

    def text_of(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def said(self, body: CompletionRequest, result: GenerationResult) -> str:
        """All of the completion, without the stop string that ended it."""
        return cut(self.text_of(result.token_ids), body.stops if isinstance(result.stop_reason, str) else [])

    def echoed(self, body: CompletionRequest, index: int, prompt: list[int]) -> str:
        """The prompt as it was given; one of tokens, as they read."""
        if not body.echo:
            return ""
        place = index // body.choices
        given = body.prompt if isinstance(body.prompt, str) else body.prompt[place]
        return given if isinstance(given, str) else self._tokenizer.decode(prompt)


class _Reply:
    """One choice on its way."""

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

    def advance(self, found: TokenChunk | GenerationResult) -> dict[str, Any] | None:
        """The next chunk, if there is anything to say."""
        body, completions = self._body, self._completions
        if isinstance(found, GenerationResult):
            self._progress.complete(found)
            text = self._text.rest(completions.said(body, found))
            return self._chunk(text, finish_reason=found.finish_reason, stop_reason=found.stop_reason)
        if body.only_scores or not self._progress.add(found):
            return None
        text = self._text.more(completions.text_of(self._progress.token_ids))
        asked = body.logprobs is not None or body.return_token_ids
        return self._chunk(text) if text or asked or (self._before and not self._begun) else None

    def _chunk(self, text: str, **ending: Any) -> dict[str, Any]:
        body, tokens = self._body, self._progress.unsent()
        chunk: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None, **ending}
        if not self._begun:
            chunk["text"] = self._before + text
            if body.return_token_ids:
                chunk["prompt_token_ids"] = self._prompt
        if body.logprobs is not None:
            names = self._completions.token_text
            tops = tokens.top_logprobs or [[]] * len(tokens.token_ids)
            chunk["logprobs"] = names.completion_logprobs(
                tokens.token_ids, [*tokens.logprobs], tops if body.logprobs else None, self._offsets
            )
        if body.return_token_ids:
            chunk["token_ids"] = tokens.token_ids
        self._begun = True
        return chunk


def _without_tokens(result: GenerationResult) -> GenerationResult:
    """A result of which only the scores of the prompt were asked for."""
    return GenerationResult(
        [], [], [], "length", None, result.prompt_logprobs, prompt_top_logprobs=result.prompt_top_logprobs
    )
