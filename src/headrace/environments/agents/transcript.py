"""What an agent has been answered in an episode, and how its conversations are recognised when they come back.

A policy is trained on exact tokens only where a conversation goes on from a reply as it was given. An agent sends each
reply back in OpenAI's form: arguments as texts, thoughts dropped, perhaps with ids of its own. So every reply is kept,
and is put back as it was where it comes in the conversation that it was given in and says the same; so is one that was
moved, if its calls have the ids that were given out. Whatever else an agent sends (examples, summaries, replies that it
has rewritten) is taken as its own words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.environments.tools import is_plain
from headrace.rollout.types import Message
from headrace.text.openai_messages import check_encodable

_encode = msgspec.json.Encoder(order="deterministic").encode

Name = bytes
"""A digest of a conversation, as far as it has come."""


class Given(NamedTuple):
    """A reply as the episode's context gave it."""

    message: Message
    visible: bytes
    calls: list[tuple[str, str]]
    """The id and the tool of each call, as the chat format knows them."""
    ids: list[str]
    """Of its calls, as the agent knows them: they are unique in the episode."""


class Transcript:
    """The replies of one episode, by the conversations that they were given in."""

    def __init__(self) -> None:
        self._given: dict[Name, list[Given]] = {}
        self._by_id: dict[str, Given] = {}
        self._numbers = itertools.count()
        self._led: dict[Name, list[Message]] = {}

    @property
    def conversations(self) -> list[list[Message]]:
        """Each as far as it was led; the last is the one that was answered last."""
        return list(self._led.values())

    def restored(self, sent: Sequence[Message]) -> list[Message]:
        """What an agent sent, in its plain form, with every reply that is recognised as it was given."""
        restored: list[Message] = []
        calls: dict[str, tuple[str, str]] = {}  # by the agent's id of a call: ours, and the tool's name
        name = b""
        for index, message in enumerate(sent):
            known = message
            if message["role"] == "assistant":
                given = self._find(name, message)
                known = message if given is None else given.message
                calls |= zip(_call_ids(message), _calls(message) if given is None else given.calls, strict=True)
            elif message["role"] == "tool":
                known = _answering(message, calls)
            if known is message:
                check_encodable(index, message)
            restored.append(known)
            name = _next(name, known)
        return restored

    def record(self, asked: Sequence[Message], reply: Message, seen: Message | None = None) -> list[str]:
        """Remember the reply to a conversation, and what the agent sees of it, if that is not all.

        Returns the ids by which the agent shall know its calls.
        """
        seen = reply if seen is None else seen
        *_, name, whole = names = list(_names([*asked, reply]))
        calls = _calls(seen)
        given = Given(reply, _visible_content(seen), calls, [f"call-{next(self._numbers)}" for _ in calls])
        self._given.setdefault(name, []).append(given)
        self._by_id |= dict.fromkeys(given.ids, given)
        for shorter in names:
            self._led.pop(shorter, None)
        self._led[whole] = [*asked, reply]
        return given.ids

    def _find(self, name: Name, message: Message) -> Given | None:
        said, ids = _visible_content(message), _call_ids(message)
        here = [given for given in self._given.get(name, ()) if given.visible == said]
        if here:  # the same words may have been given twice
            return next((given for given in here if given.ids == ids), here[-1])
        moved = self._by_id.get(ids[0]) if ids else None
        return moved if moved is not None and moved.ids == ids and moved.visible == said else None


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]


def _answering(message: Message, calls: dict[str, tuple[str, str]]) -> Message:
    """A tool's result under the id that we know its call by, with the name of the tool, which some formats want."""
    identity, name = calls.get(message["tool_call_id"], (message["tool_call_id"], message.get("name", "")))
    told = {"role": "tool", "tool_call_id": identity, "content": message["content"]}
    return told | ({"name": name} if is_plain(name) else {})


def _names(messages: Sequence[Message]) -> Iterator[Name]:
    """Of the conversation before its first message, after it, and so on to the last."""
    name = b""
    yield name
    for message in messages:
        name = _next(name, message)
        yield name


def _next(name: Name, message: Message) -> Name:
    return hashlib.blake2b(_canonical_json(message), key=name, digest_size=16).digest()


def _visible_content(message: Message) -> bytes:
    """Encode the text and calls of an assistant message, without reasoning, ids and surrounding white space."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = str(message.get("content") or "").strip()
    return _canonical_json([content, [[call["name"], call["arguments"]] for call in calls]])


def _call_ids(message: Message) -> list[str]:
    return [str(call.get("id") or "") for call in message.get("tool_calls", ())]


def _canonical_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys; values may contain lone surrogates and integers beyond 64 bits."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, sort_keys=True).encode()
