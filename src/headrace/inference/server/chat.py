"""`/v1/chat/completions`: OpenAI's form around the engine.

Messages become tokens, and tokens a message, through the model's renderer. Left out on purpose: forced tool calls,
templates that come with a request, and replies of a given form; they are refused, not ignored.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from renderers.base import ParsedResponse, Renderer, ToolCallParseStatus

from headrace.inference.backend import GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.schema import MAX_LOGPROBS, SamplingParams
from headrace.inference.server.openai_request import OpenAIRequest, Unsupported, envelope, usage_of
from headrace.inference.server.text import cut_end
from headrace.inference.server.token_text import TokenText
from headrace.text.openai_messages import InvalidMessage, renderer_messages
from headrace.text.renderer import TOOLS_NOT_SHOWN, shows_tools
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class ChatRequest(OpenAIRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = None
    add_generation_prompt: Unsupported = True
    continue_final_message: Unsupported = False
    add_special_tokens: Unsupported = False
    documents: Unsupported = msgspec.field(default_factory=list)
    functions: Unsupported = msgspec.field(default_factory=list)
    function_call: Unsupported = None
    parallel_tool_calls: Unsupported = True
    reasoning_effort: Unsupported = None
    include_reasoning: Unsupported = True
    verbosity: Unsupported = "medium"
    modalities: Unsupported = msgspec.field(default_factory=lambda: ["text"])
    audio: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = False
    prompt_logprobs: Unsupported = None


class Chat:
    """Messages to prompts, results to messages."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.token_text = TokenText(tokenizer)
        self._stop_ids = renderer.get_stop_token_ids()
        self.control_texts = tuple(tokenizer.control_tokens.values())
        self._control = re.compile("|".join(map(re.escape, self.control_texts)) or r"(?!)")

    def prompt(self, body: ChatRequest) -> list[int]:
        """The conversation as tokens, ready for the reply."""
        self._check(body)
        try:
            messages: Any = renderer_messages(body.messages)
            return list(self.renderer.render_ids(messages, tools=_tools(body), add_generation_prompt=True))
        except InvalidMessage as error:
            raise InvalidRequest(str(error)) from error
        except Exception as error:  # templates raise what they like about messages they cannot render
            raise InvalidRequest(f"messages cannot be rendered: {type(error).__name__}: {error}") from error

    def _check(self, body: ChatRequest) -> None:
        if body.chat_template_kwargs:
            raise InvalidRequest(
                "chat_template_kwargs are not supported: how this server renders is set at its start, in its "
                "[inference.renderer]"
            )
        if body.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice must be auto or none: a call cannot be forced here")
        if _tools(body) and not self._shows_tools:
            raise InvalidRequest(f"tools: the chat template of this model {TOOLS_NOT_SHOWN}")

    @functools.cached_property
    def _shows_tools(self) -> bool:
        return shows_tools(self.renderer)

    def params(self, body: ChatRequest) -> list[SamplingParams]:
        """How to sample each of the choices."""
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs wants logprobs = true beside it")
        if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
        return body.sampling(
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            stop_token_ids=[*([] if body.ignore_eos else self._stop_ids), *(body.stop_token_ids or [])],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def reply(self, body: ChatRequest, prompt: list[int], results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The whole reply at once."""
        choices = []
        for index, result in enumerate(results):
            message, reason = self.message(body, prompt, result)
            tokens = TokenChunk(result.token_ids, result.logprobs, result.top_logprobs)
            ending = {"finish_reason": reason, "stop_reason": result.stop_reason}
            choice = {"index": index, "message": {"role": "assistant", **message}, **ending}
            choices.append({**choice, **self.of_tokens(body, tokens)})
        head = envelope("chatcmpl", "chat.completion", body.model or self.model_name)
        if body.return_token_ids:
            head["prompt_token_ids"] = prompt
        return {**head, "choices": choices, "usage": usage_of(len(prompt), results, len(results))}

    def message(self, body: ChatRequest, prompt: list[int], result: GenerationResult) -> tuple[dict[str, Any], str]:
        """The parsed message, and why it ended."""
        parsed = self.parse(body, prompt, result.token_ids)
        stops = body.stops if isinstance(result.stop_reason, str) else []
        message: dict[str, Any] = {"content": cut_end(parsed.content, stops)}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = cut_end(parsed.reasoning_content, stops)
        calls = _tool_calls(parsed)
        if calls:
            message["tool_calls"] = calls
        return message, "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason

    def parse(self, body: ChatRequest, prompt: list[int], token_ids: list[int]) -> ParsedResponse:
        """What the renderer makes of a reply, or of its beginning.

        Tokens of the chat format are no words: whoever puts the reply into a conversation would make tokens of them.
        """
        try:
            parsed = self.renderer.parse_response(token_ids, tools=_tools(body), prompt_ids=prompt)
        except Exception as error:  # models write what no parser was made for: it is text then
            log.warning("a reply cannot be parsed: %s: %s", type(error).__name__, error)
            parsed = ParsedResponse(self.tokenizer.decode(token_ids))
        parsed.content = self._control.sub("", parsed.content or "")
        if parsed.reasoning_content is not None:
            parsed.reasoning_content = self._control.sub("", parsed.reasoning_content)
        return parsed

    def of_tokens(self, body: ChatRequest, tokens: TokenChunk) -> dict[str, Any]:
        """What a choice says of its tokens, as far as it was asked to."""
        said: dict[str, Any] = {"logprobs": self.token_text.chat_logprobs(tokens) if body.logprobs else None}
        return {**said, "token_ids": tokens.token_ids} if body.return_token_ids else said


def _tools(body: ChatRequest) -> Any:
    return None if body.tool_choice == "none" else body.tools


def _tool_calls(parsed: ParsedResponse) -> list[dict[str, Any]]:
    """The calls that were well-formed, in OpenAI's form."""
    calls = []
    for call in parsed.tool_calls:
        if call.status == ToolCallParseStatus.OK:
            arguments = call.arguments
            text = (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments or {}, separators=(",", ":"), ensure_ascii=False)
            )
            identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
            function = {"name": _encodable(str(call.name)), "arguments": _encodable(text)}
            calls.append({"id": identity, "type": "function", "function": function})
    return calls


def _encodable(text: str) -> str:
    """JSON that a model wrote may hold half a character, which no text can."""
    return text.encode(errors="replace").decode()
