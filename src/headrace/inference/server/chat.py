"""`/v1/chat/completions`: OpenAI's form around the same engine.

Messages become tokens, and tokens a message, through the model's renderer. A streamed reply sends its content in one
chunk: thinking and tool calls are only known once the whole of it is parsed. Left out on purpose: stop strings,
penalties, alternatives to the chosen tokens; they are refused, not ignored.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from renderers.base import ParsedResponse, Renderer, ToolCallParseStatus

from headrace.inference.embedded.request import EngineError, InvalidRequest, Result
from headrace.inference.schema import SamplingParams, Usage
from headrace.inference.server.replies import ClientGone, error_body
from headrace.text.tokenizer import Tokenizer

MOST_CHOICES = 128
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields that would change the reply, and the values that ask for nothing."""


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True):
    """What is understood of OpenAI's request; a null is the same as leaving the field out."""

    messages: list[dict[str, Any]]
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None


class Chat:
    """Messages to prompts, results to messages."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._stop_ids = renderer.get_stop_token_ids()
        self._control = re.compile("|".join(map(re.escape, tokenizer.control_tokens.values())) or r"(?!)")

    def prompt(self, body: ChatRequest) -> list[int]:
        """The conversation as tokens, ready for the reply."""
        for field, neutral in NEUTRAL.items():
            if getattr(body, field) not in neutral:
                raise InvalidRequest(f"{field} is not supported: leave it out")
        if not body.messages:
            raise InvalidRequest("messages is empty")
        for index, message in enumerate(body.messages):
            if not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{index}].role is missing")
            if not isinstance(message.get("content"), str | list | None):
                raise InvalidRequest(f"messages[{index}].content must be text or a list of parts")
        messages: Any = [{**message, "content": message.get("content") or ""} for message in body.messages]
        tools: Any = body.tools
        try:
            return list(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
        except Exception as error:  # templates raise what they like about messages they cannot render
            raise InvalidRequest(f"messages cannot be rendered: {type(error).__name__}: {error}") from error

    def params(self, body: ChatRequest) -> list[SamplingParams]:
        """How to sample each of the `n` choices; each has a seed of its own."""
        count = 1 if body.n is None else body.n
        if not 1 <= count <= MOST_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MOST_CHOICES}, not {count}")
        return [
            SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=-1 if body.top_k is None else body.top_k,
                max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
                seed=None if body.seed is None else body.seed + index,
                stop_token_ids=[*([] if body.ignore_eos else self._stop_ids), *(body.stop_token_ids or [])],
                ignore_eos=body.ignore_eos,
            )
            for index in range(count)
        ]

    def reply(self, body: ChatRequest, prompt: list[int], results: Sequence[Result]) -> dict[str, Any]:
        """The whole reply at once."""
        choices = []
        for index, result in enumerate(results):
            message, reason = self._message(body, prompt, result)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", **message},
                    "finish_reason": reason,
                    "logprobs": self._logprobs(result) if body.logprobs else None,
                }
            )
        return {**self._envelope("chat.completion"), "choices": choices, "usage": _usage(prompt, results)}

    async def stream(
        self, body: ChatRequest, prompt: list[int], finish: Callable[[], Awaitable[list[Result]]], count: int
    ) -> AsyncIterator[bytes]:
        """The reply as server-sent events: role, content, finish reason, `[DONE]`."""
        envelope = self._envelope("chat.completion.chunk")

        def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return _event({**envelope, "choices": [choice]})

        for index in range(count):
            yield chunk(index, {"role": "assistant", "content": ""})
        try:
            results = await finish()
        except ClientGone:
            return
        except EngineError as error:
            yield _event(error_body(str(error), "engine_error"))
            return
        for index, result in enumerate(results):
            message, reason = self._message(body, prompt, result)
            for position, call in enumerate(message.get("tool_calls", [])):
                call["index"] = position
            yield chunk(index, message, logprobs=self._logprobs(result) if body.logprobs else None)
            yield chunk(index, {}, reason)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event({**envelope, "choices": [], "usage": _usage(prompt, results)})
        yield b"data: [DONE]\n\n"

    def _envelope(self, kind: str) -> dict[str, Any]:
        identity = f"chatcmpl-{uuid.uuid4().hex}"
        return {"id": identity, "object": kind, "created": int(time.time()), "model": self.model_name}

    def _message(self, body: ChatRequest, prompt: list[int], result: Result) -> tuple[dict[str, Any], str]:
        """The parsed message, and why it ended."""
        tools: Any = body.tools
        parsed = self.renderer.parse_response(result.token_ids, tools=tools, prompt_ids=prompt)
        # Tokens of the chat format are no words: whoever puts the reply into a conversation would make tokens of them.
        message: dict[str, Any] = {"content": self._control.sub("", parsed.content or "")}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = self._control.sub("", parsed.reasoning_content)
        calls = _tool_calls(parsed)
        if calls:
            message["tool_calls"] = calls
        return message, "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason

    def _logprobs(self, result: Result) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token]) for token in result.token_ids]
        entries = zip(texts, result.logprobs, strict=True)
        return {
            "content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in entries]
        }


def _tool_calls(parsed: ParsedResponse) -> list[dict[str, Any]]:
    """The calls that were well-formed, in OpenAI's form."""
    calls = []
    for call in parsed.tool_calls:
        if call.status == ToolCallParseStatus.OK:
            arguments = call.arguments
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
            identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
            calls.append({"id": identity, "type": "function", "function": {"name": call.name, "arguments": text}})
    return calls


def _usage(prompt: list[int], results: Sequence[Result]) -> Usage:
    completion = sum(len(result.token_ids) for result in results)
    return Usage(len(prompt), completion, len(prompt) + completion)


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
