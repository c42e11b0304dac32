"""Replies of the policy in OpenAI's form, at once or as a stream.

A stream comes when the reply is whole: the episode's context gives whole replies, and agents cannot tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.environments.agents.requests import ChatRequest
from headrace.environments.base import Reply
from headrace.inference.server.openai_request import envelope
from headrace.inference.server.streaming import DONE, event
from headrace.rollout.types import Message


class Answer(NamedTuple):
    """One choice: a reply, what the agent sees of it, and the ids by which it knows the calls."""

    reply: Reply
    seen: Message
    ids: list[str]


def whole(request: ChatRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [
        {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        for index, (message, reason) in enumerate(_seen(request, answer) for answer in answers)
    ]
    head = envelope("chatcmpl", "chat.completion", request.model or model)
    return {**head, "choices": choices, "usage": _usage(answers)}


def streamed(request: ChatRequest, answers: Sequence[Answer], model: str) -> bytes:
    """The same as events."""
    head = envelope("chatcmpl", "chat.completion.chunk", request.model or model)
    events = [event({**head, "choices": [chunk]}) for chunk in _chunks(request, answers)]
    if request.counts_usage:
        events.append(event({**head, "choices": [], "usage": _usage(answers)}))
    return b"".join([*events, DONE])


def _chunks(request: ChatRequest, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    for index, answer in enumerate(answers):
        message, reason = _seen(request, answer)
        calls = message.pop("tool_calls", [])
        yield {"index": index, "delta": message, "finish_reason": None}
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield {"index": index, "delta": {"tool_calls": numbered}, "finish_reason": None}
        yield {"index": index, "delta": {}, "finish_reason": reason}


def _seen(request: ChatRequest, answer: Answer) -> tuple[dict[str, Any], str]:
    """The message as the agent sees it, and why it ended."""
    reply, message = answer.reply, answer.seen
    text, stopped = _until(message["content"].strip("\n"), request.stops)
    calls = [] if stopped else [_call(*pair) for pair in zip(answer.ids, message.get("tool_calls", ()), strict=True)]
    seen: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
    if message.get("reasoning_content"):
        seen["reasoning_content"] = message["reasoning_content"]
    if calls:
        seen["tool_calls"] = calls
    if reply.truncated and not stopped:
        return seen, "length"
    return seen, "tool_calls" if calls else "stop"


def _until(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of these, and whether there is one. It was sampled to its end all the same."""
    ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def _call(identity: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    written = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": written}}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = len(answers[0].reply.turn.prompt_ids)
    completion = sum(len(answer.reply.turn.completion_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
