"""A chat's reply while it is sampled, in OpenAI's chunks.

Text is sent as it comes, thinking as `reasoning_content`, without the white space around it. With tools the content
and the calls come once the reply is whole: what a call looks like is the renderer's business, and half of one may look
like text.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from headrace.inference.backend import GenerationResult, TokenChunk
from headrace.inference.server.chat import Chat, ChatRequest
from headrace.inference.server.openai_request import envelope, usage_of
from headrace.inference.server.streaming import DONE, News, event
from headrace.inference.server.text import MARKERS, GrowingText, Progress


async def streamed(chat: Chat, body: ChatRequest, prompt: list[int], news: News, count: int) -> AsyncIterator[bytes]:
    """The choices as they come, each with its role first and its finish reason last; then `[DONE]`."""
    head = envelope("chatcmpl", "chat.completion.chunk", body.model or chat.model_name)
    replies = [_Reply(chat, body, prompt, index) for index in range(count)]
    results: dict[int, GenerationResult] = {}
    for reply in replies:
        asked = {"prompt_token_ids": prompt} if body.return_token_ids and reply is replies[0] else {}
        yield event({**head, **asked, "choices": [reply.chunk({"role": "assistant", "content": ""})]})
    async with contextlib.aclosing(news):  # type: ignore[type-var]
        async for index, found in news:
            if isinstance(found, GenerationResult):
                results[index] = found
            for choice in replies[index].advance(found):
                yield event({**head, "choices": [choice]})
    if body.counts_usage:
        usage = usage_of(len(prompt), [results[index] for index in range(count)], count)
        yield event({**head, "choices": [], "usage": usage})
    yield DONE


class _Reply:
    """One choice on its way."""

    def __init__(self, chat: Chat, body: ChatRequest, prompt: list[int], index: int) -> None:
        self._chat = chat
        self._body = body
        self._prompt = prompt
        self._index = index
        self._progress = Progress()
        needles = (*MARKERS, *chat.control_texts)
        self._thinking = GrowingText(body.stops, needles)
        self._content = GrowingText(body.stops, needles)

    def advance(self, found: TokenChunk | GenerationResult) -> Iterator[dict[str, Any]]:
        if isinstance(found, GenerationResult):
            yield from self._end(found)
        elif self._progress.add(found):
            yield from self._tell(self._grown())

    def chunk(self, delta: dict[str, Any], tokens: TokenChunk | None = None, **more: Any) -> dict[str, Any]:
        said = self._chat.of_tokens(self._body, tokens) if tokens is not None else {"logprobs": None}
        return {"index": self._index, "delta": delta, "finish_reason": None, **said, **more}

    def _grown(self) -> dict[str, Any]:
        """What of the text is sure by now and was not sent."""
        parsed = self._chat.parse(self._body, self._prompt, self._progress.token_ids)
        thought = self._thinking.more((parsed.reasoning_content or "").lstrip())
        said = "" if self._body.tools else self._content.more(parsed.content)
        return _without_empty({"reasoning_content": thought, "content": said})

    def _end(self, result: GenerationResult) -> Iterator[dict[str, Any]]:
        self._progress.complete(result)
        message, reason = self._chat.message(self._body, self._prompt, result)
        calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
        thought = self._thinking.rest(message.get("reasoning_content", "").strip())
        said = self._content.rest(message["content"])
        yield from self._tell(_without_empty({"reasoning_content": thought, "content": said, "tool_calls": calls}))
        yield self.chunk({}, finish_reason=reason, stop_reason=result.stop_reason)

    def _tell(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A chunk, if there is anything to say: what was sampled counts where tokens were asked for."""
        asked = self._body.logprobs or self._body.return_token_ids
        if delta or asked:
            tokens = self._progress.unsent()
            if delta or tokens.token_ids:
                yield self.chunk(delta, tokens)


def _without_empty(delta: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in delta.items() if value}
