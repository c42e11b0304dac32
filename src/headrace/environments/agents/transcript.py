"""The replies of an episode, recognized when an agent sends them back.

A policy is trained on exact tokens only where a conversation continues a reply unchanged. An agent sends each reply
back in OpenAI's form: arguments as texts, reasoning dropped, perhaps with ids of its own. Every reply is therefore
kept, and restored where it comes back in its own conversation with the same text and calls; a reply that was moved
elsewhere is restored if its calls have the ids that were assigned. All other messages of an agent (examples,
summaries, rewritten replies) are taken as they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.environments.tools import is_plain
from headrace.rollout.types import Message
from headrace.text.openai_messages import check_encodable

ConversationHash = bytes
"""A digest of the first messages of a conversation."""
_encode = msgspec.json.Encoder(order="deterministic").encode


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
            known = message
            if message["role"] == "assistant":
                reply = self._find(prefix, message)
                known = message if reply is None else reply.message
                calls |= zip(_call_ids(message), _calls(message) if reply is None else reply.calls, strict=True)
            elif message["role"] == "tool":
                call_id = message["tool_call_id"]
                call_id, name = calls.get(call_id, (call_id, message.get("name", "")))
                known = {"role": "tool", "tool_call_id": call_id, "content": message["content"]}
                if is_plain(name):  # some chat formats need the tool's name
                    known["name"] = name
            if known is message:
                check_encodable(index, message)
            restored.append(known)
            prefix = _extend_hash(prefix, known)
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

    def _find(self, prefix: ConversationHash, message: Message) -> _RecordedReply | None:
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
