"""`/v1/chat/completions`: OpenAI's chat API, whole and streamed.

The model's renderer converts messages to tokens and tokens to a message. A stream sends text as it is sampled and
reasoning as `reasoning_content`, both stripped; with tools, content and calls are sent at the end, since the beginning
of a call may look like text. A structured reply is its whole text, without reasoning or calls. Left out: forced tool
calls, request templates; they are rejected.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from renderers.base import ParsedResponse, Renderer, ToolCallParseStatus

from headrace.inference.backend import GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.schema import MAX_LOGPROBS, SamplingParams
from headrace.inference.server.request_bodies import OpenAIRequest, Unsupported, envelope, usage_of
from headrace.inference.server.streaming import MARKERS, GrowingText, Progress, Update, Updates, cut_end, stream_events
from headrace.inference.server.token_text import TokenText
from headrace.text.messages import InvalidMessage, renderer_messages
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
    """Converts messages to prompts and results to messages."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.token_text = TokenText(tokenizer)
        self._stop_ids = renderer.get_stop_token_ids()
        self.control_texts = tuple(tokenizer.control_tokens.values())
        self._control = re.compile("|".join(map(re.escape, self.control_texts)) or r"(?!)")

    def prompt(self, body: ChatRequest) -> list[int]:
        """Return the token ids of the conversation up to the reply."""
        self._refuse_options(body)
        try:
            messages: Any = renderer_messages(body.messages)
            return list(self.renderer.render_ids(messages, tools=_tools(body), add_generation_prompt=True))
        except InvalidMessage as error:
            raise InvalidRequest.combine([error]) from error
        except Exception as error:  # templates raise any type
            raise InvalidRequest(f"cannot be rendered: {type(error).__name__}: {error}", key="messages") from error

    def _refuse_options(self, body: ChatRequest) -> None:
        """Raise `InvalidRequest` for options of a chat that are not supported."""
        if body.chat_template_kwargs:
            fact = "not supported: [inference.renderer] of the server sets how it renders"
            raise InvalidRequest(fact, key="chat_template_kwargs")
        if body.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("must be auto or none: forced calls are not supported", key="tool_choice")
        if _tools(body) and body.structured_outputs is not None:
            fact = "not supported together with structured outputs, in which a reply cannot call them"
            raise InvalidRequest(fact, key="tools", fix="Leave out one of them, or set tool_choice to none.")
        if _tools(body) and not self._shows_tools:
            raise InvalidRequest(f"the chat template of this model {TOOLS_NOT_SHOWN}", key="tools")

    @functools.cached_property
    def _shows_tools(self) -> bool:
        return shows_tools(self.renderer)

    def params(self, body: ChatRequest) -> list[SamplingParams]:
        """Return the engine's parameters of each choice."""
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("requires logprobs = true", key="top_logprobs", value=body.top_logprobs)
        if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidRequest(f"must be between 0 and {MAX_LOGPROBS}", key="top_logprobs", value=body.top_logprobs)
        return body.sampling(
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            stop_token_ids=[*([] if body.ignore_eos else self._stop_ids), *(body.stop_token_ids or [])],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def reply(self, body: ChatRequest, prompt: list[int], results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the response of a request that is not streamed."""
        choices = []
        for index, result in enumerate(results):
            message, reason = self.message(body, prompt, result)
            ending = {**self.ending(body, result, reason), **self.token_details(body, result)}
            choices.append({"index": index, "message": {"role": "assistant", **message}, **ending})
        head = envelope("chatcmpl", "chat.completion", body.model or self.model_name)
        if body.return_token_ids:
            head["prompt_token_ids"] = prompt
        return {**head, "choices": choices, "usage": usage_of(len(prompt), results, len(results))}

    def message(self, body: ChatRequest, prompt: list[int], result: GenerationResult) -> tuple[dict[str, Any], str]:
        """Return the parsed message and its finish reason."""
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
        """Parse a reply or its beginning, without the text of special tokens.

        In a later conversation that text would become special tokens again.
        """
        if body.structured_outputs is not None:
            return ParsedResponse(self._control.sub("", self.tokenizer.decode(token_ids, skip_special_tokens=True)))
        try:
            parsed = self.renderer.parse_response(token_ids, tools=_tools(body), prompt_ids=prompt)
        except Exception as error:  # a model may write anything: treat it as text
            log.warning("a reply cannot be parsed: %s: %s", type(error).__name__, error)
            parsed = ParsedResponse(self.tokenizer.decode(token_ids))
        parsed.content = self._control.sub("", parsed.content or "")
        if parsed.reasoning_content is not None:
            parsed.reasoning_content = self._control.sub("", parsed.reasoning_content)
        return parsed

    def stream(self, body: ChatRequest, prompt: list[int], updates: Updates, count: int) -> AsyncIterator[bytes]:
        """Yield the events of all choices, each with its role first and its finish reason last, then `[DONE]`."""
        head = envelope("chatcmpl", "chat.completion.chunk", body.model or self.model_name)
        choices = [StreamedChoice(self, body, prompt, index) for index in range(count)]
        first = [choice.event({"role": "assistant", "content": ""}) for choice in choices]
        if body.return_token_ids:
            first[0]["prompt_token_ids"] = prompt
        usage = functools.partial(usage_of, len(prompt), choices=count) if body.counts_usage else None
        return stream_events(head, updates, [choice.advance for choice in choices], first, usage)

    def ending(self, body: ChatRequest, result: GenerationResult, reason: str) -> dict[str, Any]:
        """Return the fields of a choice that its end decides."""
        mode = {"logprobs_mode": result.logprobs_mode} if body.logprobs and result.logprobs_mode is not None else {}
        return {"finish_reason": reason, "stop_reason": result.stop_reason, **mode}

    def token_details(self, body: ChatRequest, tokens: Update) -> dict[str, Any]:
        """Return the logprobs and token ids of a choice, as far as requested."""
        details: dict[str, Any] = {"logprobs": self.token_text.chat_logprobs(tokens) if body.logprobs else None}
        return {**details, "token_ids": tokens.token_ids} if body.return_token_ids else details


class StreamedChoice:
    """One choice of a streamed chat."""

    def __init__(self, chat: Chat, body: ChatRequest, prompt: list[int], index: int) -> None:
        self._chat = chat
        self._body = body
        self._prompt = prompt
        self._index = index
        self._progress = Progress()
        needles = (*MARKERS, *chat.control_texts)
        self._reasoning = GrowingText(body.stops, needles)
        self._content = GrowingText(body.stops, needles)

    def advance(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the events that an update makes possible."""
        if isinstance(update, GenerationResult):
            self._progress.complete(update)
            message, reason = self._chat.message(self._body, self._prompt, update)
            calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls", []))]
            reasoning = self._reasoning.rest(message.get("reasoning_content", "").strip())
            content = self._content.rest(message["content"])
            yield from self._send({"reasoning_content": reasoning, "content": content, "tool_calls": calls})
            yield self.event({}, **self._chat.ending(self._body, update, reason))
        elif self._progress.add(update):
            parsed = self._chat.parse(self._body, self._prompt, self._progress.token_ids)
            reasoning = self._reasoning.more((parsed.reasoning_content or "").lstrip())
            content = "" if self._body.tools else self._content.more(parsed.content)
            yield from self._send({"reasoning_content": reasoning, "content": content})

    def event(self, delta: dict[str, Any], tokens: TokenChunk | None = None, **more: Any) -> dict[str, Any]:
        details = self._chat.token_details(self._body, tokens) if tokens is not None else {"logprobs": None}
        return {"choices": [{"index": self._index, "delta": delta, "finish_reason": None, **details, **more}]}

    def _send(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an event unless it would be empty; requested token ids and logprobs count as content."""
        delta = {name: value for name, value in delta.items() if value}
        if delta or self._body.logprobs or self._body.return_token_ids:
            tokens = self._progress.unsent()
            if delta or tokens.token_ids:
                yield self.event(delta, tokens)


def _tools(body: ChatRequest) -> Any:
    """Return the tools that the reply may call."""
    return None if body.tool_choice == "none" else body.tools


def _tool_calls(parsed: ParsedResponse) -> list[dict[str, Any]]:
    """Return the calls that could be parsed in OpenAI's format, whatever their names and arguments are."""
    calls = []
    for call in parsed.tool_calls:
        if call.status != ToolCallParseStatus.OK:
            continue
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, separators=(",", ":"), ensure_ascii=False)
        # JSON may contain lone surrogates, which UTF-8 cannot encode.
        name, arguments = (text.encode(errors="replace").decode() for text in (str(call.name), arguments))
        identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls
