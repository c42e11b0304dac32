"""An episode's line to whoever answers: it remembers the turns, so that a conversation goes on from exact tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.environments.base import EpisodeError, Reply
from headrace.orchestrator.prompting import Past, Prompter, Tools
from headrace.rollout.types import ROLES, Message, Turn
from headrace.text.prompt import Prompt

Name = hashlib.blake2b
"""What tells a conversation from others, as far as it has come."""
encode = msgspec.json.Encoder(order="deterministic").encode


class Question(NamedTuple):
    """What is asked in one turn, in words and as the policy's prompt."""

    prompt: Prompt
    messages: list[Message]
    tools: list[dict[str, Any]]
    room: int
    """Tokens that the reply may have, by `seq_len` and the environment."""
    session: str
    name: str
    """It tells this turn from all others of the run."""
    first_call: int
    """The number of its first tool call."""

    def at_most(self, limit: int | None) -> int:
        """Tokens that the reply may have, by the run's limit, too."""
        return self.room if limit is None else min(self.room, limit)

    def seed(self, of_run: int | None) -> int | None:
        """The turn's own, if the run has one."""
        return None if of_run is None else seed_of(f"{of_run}-{self.name}")


class Speaker(Protocol):
    """Who answers: the policy, or a teacher on its behalf."""

    prompter: Prompter

    async def reply(self, question: Question) -> Reply: ...


class _Given(NamedTuple):
    """A reply that was given, and the turn behind it."""

    reply: Message
    turn: Turn


class Conversation:
    """A speaker on behalf of one episode."""

    def __init__(self, speaker: Speaker, session: str, episode: str) -> None:
        self._speaker = speaker
        self._session = session
        self._episode = episode
        self._asked: Counter[bytes] = Counter()
        self._given: dict[bytes, list[_Given]] = {}
        """By the conversation as far as its last reply, as it was then: an environment may change its messages."""

    async def chat(self, messages: Sequence[Message], tools: Tools = (), max_tokens: int | None = None) -> Reply:
        """Several may be under way at once: what is asked, not when, tells one from another."""
        messages, tools = list(messages), list(tools)
        _check(messages)
        names = _names(messages, tools)
        digest = names[-1].digest()
        self._asked[digest] += 1
        name = f"{self._episode}-{digest.hex()}-{self._asked[digest]}"
        prompter = self._speaker.prompter
        prompt = await prompter.prompt(messages, tools, self._past(messages, names))
        room = prompter.room(len(prompt.ids))
        question = Question(prompt, messages, tools, room, self._session, name, _calls_in(messages))
        reply = await self._speaker.reply(question._replace(room=question.at_most(max_tokens)))
        names[-1].update(encode(reply.message))
        self._given.setdefault(names[-1].digest(), []).append(_Given(reply.message, reply.turn))
        return reply

    def _past(self, messages: list[Message], names: list[Name]) -> Past | None:
        """What came of the last reply, if it was given in this very conversation."""
        for end in range(len(messages) - 1, 0, -1):
            reply = messages[end - 1]
            if reply.get("role") != "assistant":
                continue
            known = self._given.get(names[end].digest())
            if known:  # the same words may have been sampled twice, in different tokens
                given = next((given for given in known if given.reply is reply), known[-1])
                return Past(given.turn, messages[end:])
        return None


def _check(messages: list[Any]) -> None:
    """Raise for what a renderer would leave out, or stumble over."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            complaint = f"is a {type(message).__name__}, not a dict with a role and content"
        elif message.get("role") not in ROLES[1:]:
            complaint = f"has the role {message.get('role')!r:.60}, which is none of {', '.join(ROLES[1:])}"
        elif not isinstance(message.get("content"), str | list | None):
            complaint = f"has a {type(message['content']).__name__} as its content, not a text or a list of parts"
        else:
            continue
        raise EpisodeError("invalid_message", f"messages[{index}] {complaint}")


def _names(messages: list[Message], tools: list[dict[str, Any]]) -> list[Name]:
    """The content of a conversation after none of its messages, after the first, and so on to the last."""
    names = [hashlib.blake2b(encode(tools), digest_size=16)]
    for message in messages:
        names.append(names[-1].copy())
        names[-1].update(encode(message))
    return names


def _calls_in(messages: list[Message]) -> int:
    """Tool calls so far; those that could not be read are in no message, but have been answered."""
    called = sum(len(message.get("tool_calls") or ()) for message in messages)
    return max(called, len([message for message in messages if message.get("role") == "tool"]))


def seed_of(name: str) -> int:
    """A seed that engines take, 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
