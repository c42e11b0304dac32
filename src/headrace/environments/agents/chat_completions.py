"""Bodies of `/v1/chat/completions`: requests of agents, and the policy's replies, whole or as a stream.

The run decides how its policy is sampled, since training depends on it: such settings of a request are ignored, with
one warning each. So are forced tool calls; structured outputs are left to the episode's context. Settings whose absence
would change what the agent gets are refused. A stream is sent once the reply is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.environments.base import Reply
from headrace.inference.backend import InvalidRequest
from headrace.inference.server.replies import DONE, event
from headrace.inference.server.request_bodies import MAX_CHOICES, OpenAIRequest, Unsupported, envelope, unsupported_in
from headrace.inference.server.streaming import cut
from headrace.rollout.types import Message

IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, -1),
    "min_p": (None, 0),
    "seed": (None,),
    "tool_choice": (None, "auto", "none"),
}
"""Settings that are ignored, besides those that are `Unsupported` here, and their neutral values."""
REFUSED = {
    "logprobs": "the policy's logprobs are used by the run only",
    "top_logprobs": "the policy's logprobs are used by the run only",
    "functions": "it is deprecated, send tools",
    "function_call": "it is deprecated, send tool_choice",
    "audio": "the policy writes text only",
}


class ChatRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=False):
    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Unsupported = True
    presence_penalty: Unsupported = 0
    frequency_penalty: Unsupported = 0
    repetition_penalty: Unsupported = 1
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None

    def check(self) -> None:
        """Raise `InvalidRequest` for settings that are refused."""
        self.use_structured_outputs()
        for field, why in REFUSED.items():
            if getattr(self, field):
                raise InvalidRequest(f"not supported: {why}", key=field)
        if not 1 <= self.choices <= MAX_CHOICES:
            raise InvalidRequest(f"must be between 1 and {MAX_CHOICES}", key="n", value=self.n)
        if self.token_limit is not None and self.token_limit < 1:
            raise InvalidRequest("must be at least 1", key="max_tokens", value=self.token_limit)
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidRequest("not a function with a name: only functions are supported", key=f"tools[{index}]")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def ignored_settings(request: ChatRequest) -> list[str]:
    """Return the settings of a request that are ignored."""
    return [
        *(field for field, neutral in IGNORED.items() if getattr(request, field) not in neutral),
        *unsupported_in(request),
    ]


class Choice(NamedTuple):
    """One reply, the message that the agent sees, and the ids that the agent gets for its tool calls."""

    reply: Reply
    visible: Message
    call_ids: list[str]


def response_body(request: ChatRequest, choices: Sequence[Choice], model: str) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    bodies = [
        {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        for index, (message, reason) in enumerate(_openai_message(request, choice) for choice in choices)
    ]
    head = envelope("chatcmpl", "chat.completion", request.model or model)
    return {**head, "choices": bodies, "usage": _usage(choices)}


def response_events(request: ChatRequest, choices: Sequence[Choice], model: str) -> bytes:
    """Return the same response as server-sent events."""
    head = envelope("chatcmpl", "chat.completion.chunk", request.model or model)
    events = [event({**head, "choices": [chunk]}) for chunk in _chunks(request, choices)]
    if request.counts_usage:
        events.append(event({**head, "choices": [], "usage": _usage(choices)}))
    return b"".join([*events, DONE])


def _chunks(request: ChatRequest, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    for index, choice in enumerate(choices):
        message, reason = _openai_message(request, choice)
        calls = message.pop("tool_calls", [])
        yield {"index": index, "delta": message, "finish_reason": None}
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield {"index": index, "delta": {"tool_calls": numbered}, "finish_reason": None}
        yield {"index": index, "delta": {}, "finish_reason": reason}


def _openai_message(request: ChatRequest, choice: Choice) -> tuple[dict[str, Any], str]:
    """Return the message in OpenAI's form and its finish reason.

    The text is cut at the request's stop strings, although the reply was sampled to its end.
    """
    source = choice.visible
    whole = source["content"].strip("\n")
    text = cut(whole, [stop for stop in request.stops if stop])
    is_cut = text != whole
    calls = []
    for call_id, call in zip(choice.call_ids, source.get("tool_calls", ()), strict=True):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "id": call_id, "function": {**call["function"], "arguments": arguments}})
    calls = [] if is_cut else calls
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
    if source.get("reasoning_content"):
        message["reasoning_content"] = source["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    if choice.reply.truncated and not is_cut:
        return message, "length"
    return message, "tool_calls" if calls else "stop"


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt = len(choices[0].reply.turn.prompt_ids)
    completion = sum(len(choice.reply.turn.completion_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
