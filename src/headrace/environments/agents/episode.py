"""One episode behind the proxy: requests for `/v1/chat/completions`, the policy's replies, and their transcript.

A policy is trained on exact tokens only where a conversation continues a reply unchanged. An agent sends each reply
back in OpenAI's form: arguments as texts, reasoning dropped, perhaps with ids of its own. Every reply is therefore
kept, and restored where it comes back in its own conversation with the same text and calls; a reply that was moved
elsewhere is restored if its calls have the ids that were assigned. All other messages of an agent (examples,
summaries, rewritten replies) are taken as they are.

The run decides how its policy is sampled, since training depends on it: such settings of a request are ignored, with
one warning each. So are forced tool calls; structured outputs are left to the episode's context. Settings whose absence
would change what the agent gets are refused. A stream is sent once the reply is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.environments.base import Context, PromptTooLong, Reply
from headrace.environments.chat import is_plain
from headrace.inference.backend import InvalidRequest
from headrace.inference.server.replies import DONE, event
from headrace.inference.server.request_bodies import MAX_CHOICES, OpenAIRequest, Unsupported, envelope, unsupported_in
from headrace.inference.server.streaming import cut
from headrace.rollout.types import Message, Turn
from headrace.text.messages import (
    InvalidMessage,
    assistant_message,
    canonical_messages,
    check_encodable,
    replace_surrogates,
)

IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p"), (None, 1)),
    **{"top_k": (None, -1), "min_p": (None, 0), "seed": (None,), "tool_choice": (None, "auto", "none")},
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
    """A request for `/v1/chat/completions`."""

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
    """Return the body of a streamed response, as server-sent events."""
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


TOKEN_BYTES = 18

ConversationHash = bytes
"""A digest of the first messages of a conversation."""
_encode = msgspec.json.Encoder(order="deterministic").encode


class EpisodeOver(Exception):
    """A request after the end of its episode."""

    def __init__(self, why: str = "it has ended") -> None:
        super().__init__(f"this episode is over, {why}: further requests are neither answered nor counted")


class Episode:
    """The calls of one agent, from any number of clients at once. `token` is its part of the URL.

    With `describe_tools` false the agent's tools are not in the prompt, for a model that was trained to call them.
    """

    def __init__(self, context: Context, describe_tools: bool = True) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.transcript = Transcript()
        self.turns: list[Turn] = []
        self.calls = 0
        """Tool calls in its replies."""
        self.overflow: PromptTooLong | None = None
        """Set while the latest request did not fit into the context."""
        self.failure: Exception | None = None
        """Why the model gave no reply; the episode cannot be completed then."""
        self.failed = asyncio.Event()
        self._context = context
        self._describe_tools = describe_tools
        self._over = False
        self._pending: set[asyncio.Task[Any]] = set()

    async def reply(self, request: ChatRequest) -> list[Choice]:
        """Return the policy's replies to a request. Raises `InvalidRequest`, `PromptTooLong` or `EpisodeOver`."""
        if self._over or self.failed.is_set():
            raise EpisodeOver
        task = asyncio.current_task()
        assert task is not None
        self._pending.add(task)
        try:
            return await self._sample_all(request)
        except asyncio.CancelledError:
            if self._over:
                raise EpisodeOver from None
            raise
        finally:
            self._pending.discard(task)

    def close(self) -> None:
        """Refuse further requests and cancel pending ones."""
        self._over = True
        for task in self._pending:
            task.cancel()

    async def _sample_all(self, request: ChatRequest) -> list[Choice]:
        """Return the requested number of replies, sampled concurrently."""
        request.check()
        try:
            messages = self.transcript.restore(canonical_messages(request.messages))
        except InvalidMessage as error:
            raise InvalidRequest.combine([error]) from error
        choices = [asyncio.ensure_future(self._sample(request, messages)) for _ in range(request.choices)]
        try:
            return await asyncio.gather(*choices)
        finally:
            for choice in choices:
                choice.cancel()

    async def _sample(self, request: ChatRequest, messages: list[Message]) -> Choice:
        """Sample one reply and record it in the transcript."""
        tools = [] if request.tool_choice == "none" else request.tools or []
        try:
            reply = await self._context.chat(
                messages, tools if self._describe_tools else [], request.token_limit, request.structured_outputs
            )
        except PromptTooLong as error:
            self.overflow = error
            raise
        except Exception as error:
            self.failure = self.failure or error
            self.failed.set()
            raise EpisodeOver(f"since the model gave no reply ({type(error).__name__})") from error
        self.overflow = None
        self.turns.append(reply.turn)
        visible, usable = reply.message, [call for call in reply.tool_calls if not call.error]
        if tools and not self._describe_tools and usable:  # the message has the calls as text
            visible = assistant_message("", usable, reply.message.get("reasoning_content", ""))
        visible = replace_surrogates(visible)
        call_ids = self.transcript.record(messages, reply.message, visible)
        self.calls += len(call_ids)
        return Choice(reply, visible, call_ids)


class _RecordedReply(NamedTuple):
    message: Message
    visible: bytes
    calls: list[tuple[str, str]]
    """The id and the tool of each call, as the chat format has them."""
    call_ids: list[str]
    """The ids that the agent got for its calls, unique in the episode."""


class Transcript:
    """The replies of one episode, by their conversations."""

    def __init__(self) -> None:
        self._replies: dict[ConversationHash, list[_RecordedReply]] = {}
        self._by_call_id: dict[str, _RecordedReply] = {}
        self._numbers = itertools.count()
        self._conversations: dict[ConversationHash, list[Message]] = {}

    @property
    def conversations(self) -> list[list[Message]]:
        """Each conversation at its full length; the one with the latest reply is last."""
        return list(self._conversations.values())

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """Return an agent's messages, in canonical form, with every recognized reply as it was recorded."""
        restored: list[Message] = []
        calls: dict[str, tuple[str, str]] = {}  # by the agent's id of a call: our id, and the tool's name
        prefix = b""
        for index, message in enumerate(messages):
            own = message
            if message["role"] == "assistant":
                reply = self._find_reply(prefix, message)
                own = message if reply is None else reply.message
                calls |= zip(_call_ids(message), _calls(message) if reply is None else reply.calls, strict=True)
            elif message["role"] == "tool":
                call_id = message["tool_call_id"]
                call_id, name = calls.get(call_id, (call_id, message.get("name", "")))
                own = {"role": "tool", "tool_call_id": call_id, "content": message["content"]}
                if is_plain(name):  # some chat formats need the tool's name
                    own["name"] = name
            if own is message:
                check_encodable(index, message)
            restored.append(own)
            prefix = _extend_hash(prefix, own)
        return restored

    def record(self, messages: Sequence[Message], reply: Message, visible: Message | None = None) -> list[str]:
        """Record the reply to a conversation, and the message that the agent sees, if it differs.

        Returns the ids for the agent's view of the calls.
        """
        visible = reply if visible is None else visible
        *_, prefix, whole = hashes = list(itertools.accumulate([*messages, reply], _extend_hash, initial=b""))
        calls = _calls(visible)
        call_ids = [f"call-{next(self._numbers)}" for _ in calls]
        recorded = _RecordedReply(reply, _visible_content(visible), calls, call_ids)
        self._replies.setdefault(prefix, []).append(recorded)
        self._by_call_id |= dict.fromkeys(call_ids, recorded)
        for shorter in hashes:
            self._conversations.pop(shorter, None)
        self._conversations[whole] = [*messages, reply]
        return call_ids

    def _find_reply(self, prefix: ConversationHash, message: Message) -> _RecordedReply | None:
        """Return the recorded reply that an agent sent back as `message`, after the conversation `prefix`."""
        content, call_ids = _visible_content(message), _call_ids(message)
        matches = [reply for reply in self._replies.get(prefix, ()) if reply.visible == content]
        if matches:  # the same text may have been sampled twice
            return next((reply for reply in matches if reply.call_ids == call_ids), matches[-1])
        moved = self._by_call_id.get(call_ids[0]) if call_ids else None
        return moved if moved is not None and moved.call_ids == call_ids and moved.visible == content else None


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]


def _call_ids(message: Message) -> list[str]:
    return [str(call.get("id") or "") for call in message.get("tool_calls", ())]


def _extend_hash(prefix: ConversationHash, message: Message) -> ConversationHash:
    return hashlib.blake2b(_canonical_json(message), key=prefix, digest_size=16).digest()


def _visible_content(message: Message) -> bytes:
    """Encode the text and calls of an assistant message, without reasoning, ids and surrounding white space."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = str(message.get("content") or "").strip()
    return _canonical_json([content, [[call["name"], call["arguments"]] for call in calls]])


def _canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys; values may contain lone surrogates and integers beyond 64 bits."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, sort_keys=True).encode()
