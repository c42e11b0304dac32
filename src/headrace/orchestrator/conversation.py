"""An episode's context: prompts in the policy's chat format within `seq_len`, and turns that continue exact tokens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from renderers.base import Renderer

from headrace.environments.base import EpisodeError, PromptTooLong, Reply
from headrace.inference.schema import StructuredOutputs
from headrace.observe import tracing
from headrace.rollout.types import Message, Turn
from headrace.text.completion import CompletionParser
from headrace.text.messages import InvalidMessage, check_messages
from headrace.text.prompt import Prompt, PromptRenderer, Tools, text_length
from headrace.text.renderer import TOOLS_NOT_SHOWN, shows_tools
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
ConversationHash = hashlib.blake2b
"""A running hash over the tools and messages of a conversation."""
INLINE_CHARS = 20_000
"""Conversations up to this length are rendered on the event loop, longer ones in a thread."""

encode = msgspec.json.Encoder(order="deterministic").encode


class Continuation(NamedTuple):
    """The last sampled turn of a conversation, and the messages after it."""

    turn: Turn
    messages: list[Message]


class Prompter:
    """Builds prompts of fewer than `seq_len` tokens; long ones in threads, `pool_size` of them at once."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, seq_len: int, pool_size: int = 1) -> None:
        self.tokenizer, self.seq_len, self._renderer = tokenizer, seq_len, renderer
        self.parser = CompletionParser(renderer, tokenizer)
        self.prompts = PromptRenderer(renderer)
        self._pool = asyncio.Semaphore(pool_size)
        self._has_checked_tools = False

    async def build(self, messages: list[Message], tools: Tools, continuation: Continuation | None) -> Prompt:
        """Return a prompt that keeps the exact tokens of the last turn where possible. Raises `PromptTooLong`."""
        if tools and not self._has_checked_tools:
            self._check_tools()
        prompt = await self._render(messages, tools, continuation)
        self._check_length(len(prompt.ids))
        return prompt

    async def run_in_pool(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in one of the rendering threads."""
        async with self._pool:
            return await asyncio.to_thread(function, *args)

    async def _render(self, messages: list[Message], tools: Tools, continuation: Continuation | None) -> Prompt:
        length = text_length(messages)
        if length > INLINE_CHARS:
            self._check_length(self.prompts.min_tokens(messages, self.tokenizer), "at least ")
        if continuation is not None:
            turn, new = continuation
            size = text_length(new) + len(turn.prompt_ids) + len(turn.completion_ids)
            extend = partial(self.prompts.extend, turn, new, tools)
            prompt = extend() if size <= INLINE_CHARS else await asyncio.to_thread(extend)
            if prompt is not None:
                return prompt
        if length <= INLINE_CHARS:
            return self.prompts.render(messages, tools)
        return await self.run_in_pool(self.prompts.render, messages, tools)  # waiting requests may hit its cache

    def _check_tools(self) -> None:
        """Refuse a renderer that cannot parse calls; warn about one that does not show tools to the policy."""
        if not getattr(self._renderer, "supports_tools", True):
            raise EpisodeError(
                "no_tool_parser",
                "the policy's own chat template does not define how tool calls are parsed: set renderer.tool_parser, "
                "or renderer.name to the model's family",
            )
        if not shows_tools(self._renderer):
            log.warning("an environment offers tools, but the policy's chat template %s", TOOLS_NOT_SHOWN)
        self._has_checked_tools = True

    def _check_length(self, tokens: int, qualifier: str = "") -> None:
        if tokens >= self.seq_len:
            raise PromptTooLong(f"the conversation has {qualifier}{tokens} tokens and seq_len is {self.seq_len}")


class TurnRequest(NamedTuple):
    """One turn of an episode, as messages and as the policy's prompt."""

    prompt: Prompt
    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int
    """Tokens that the reply may have, by `seq_len` and the environment."""
    session: str
    name: str
    """Unique among all turns of the run, and the same when the run is repeated."""
    first_call: int
    """Number of the reply's first tool call in the conversation, for its id."""
    structured_outputs: StructuredOutputs | None

    def limit_tokens(self, limit: int | None) -> int:
        """Return the tokens that the reply may have: `max_tokens`, or the run's `limit` if that is lower."""
        return self.max_tokens if limit is None else min(self.max_tokens, limit)

    def seed(self, run_seed: int | None) -> int | None:
        """Return the turn's own seed, if the run has one."""
        return None if run_seed is None else derive_seed(f"{run_seed}-{self.name}")


class ReplySource(Protocol):
    """What replies in a conversation: the policy, or a teacher in its place."""

    prompter: Prompter

    async def reply(self, request: TurnRequest) -> Reply: ...


class Conversation:
    """The `Context` of one episode."""

    def __init__(self, source: ReplySource, session: str, episode: str) -> None:
        self._source, self._session, self._episode = source, session, episode
        self._requests: Counter[bytes] = Counter()
        self._replies: dict[bytes, list[tuple[Message, Turn]]] = {}
        """Replies by the hash of the conversation that ends with them. An environment may change its messages later."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        """Return one reply. Concurrent calls are distinguished by their content, not by their order."""
        messages, tools = list(messages), list(tools)
        try:
            check_messages(messages)
        except InvalidMessage as error:
            raise EpisodeError("invalid_message", str(error)) from error
        hashes = [hashlib.blake2b(encode(tools), digest_size=16)]  # of the first 0, 1, ... messages
        for message in messages:
            hashes.append(hashes[-1].copy())
            hashes[-1].update(encode(message))
        digest = hashes[-1].digest()
        self._requests[digest] += 1
        name = f"{self._episode}-{digest.hex()}-{self._requests[digest]}"
        prompter = self._source.prompter
        prompt = await prompter.build(messages, tools, self._continuation(messages, hashes))
        limit = prompter.seq_len - len(prompt.ids)
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        # Calls that could not be parsed are in no message, but have a result.
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        first_call = max(calls, sum(message.get("role") == "tool" for message in messages))
        request = TurnRequest(prompt, messages, tools, limit, self._session, name, first_call, structured_outputs)
        with tracing.span("turn", prompt_tokens=len(prompt.ids), max_tokens=limit):
            reply = await self._source.reply(request)
        hashes[-1].update(encode(reply.message))
        self._replies.setdefault(hashes[-1].digest(), []).append((reply.message, reply.turn))
        return reply

    def _continuation(self, messages: list[Message], hashes: list[ConversationHash]) -> Continuation | None:
        """Find the last assistant message that is a reply of this conversation."""
        for end in range(len(messages) - 1, 0, -1):
            message = messages[end - 1]
            matches = self._replies.get(hashes[end].digest()) if message.get("role") == "assistant" else None
            if matches:  # the same text may have been sampled twice, in different tokens
                turn = next((turn for reply, turn in matches if reply is message), matches[-1][1])
                return Continuation(turn, messages[end:])
        return None


def derive_seed(name: str) -> int:
    """Return a 63-bit seed that depends only on `name`; engines accept no larger ones."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
