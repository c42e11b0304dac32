"""The policy's own chat format: conversations as the tokens of a prompt, and the texts and calls that tokens mean.

Whoever answers, the policy or a teacher, is asked in these prompts, and what was answered is read in the same way. Left
out: remembering what a conversation goes on from, which is `conversation.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from headrace.environments.base import EpisodeError, PromptTooLong, ToolCall
from headrace.rollout.types import Message, Turn
from headrace.text.prompt import Prompt, Prompts, text_length
from headrace.text.renderer import NO_PLACE_FOR_TOOLS, shows_tools
from headrace.text.replies import INVALID_JSON, MALFORMED, NO_NAME, NOT_CLOSED, checked_tool_call
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Tools = Sequence[dict[str, Any]]
T = TypeVar("T")

UNUSABLE = {
    ToolCallParseStatus.INVALID_JSON: INVALID_JSON,
    ToolCallParseStatus.UNCLOSED_BLOCK: NOT_CLOSED,
    ToolCallParseStatus.MISSING_NAME: NO_NAME,
    ToolCallParseStatus.MALFORMED_STRUCTURE: MALFORMED,
}
"""A name that is not known is the tools' affair."""
WRITE_AT_ONCE = 20_000
"""Characters of a conversation that take too little time to be worth a thread."""
THOUGHT = ("<think>", "<think>\n")
"""How a prompt ends that has already opened the model's thoughts."""


class Past(NamedTuple):
    """The turn that a conversation goes on from, and the messages since."""

    turn: Turn
    since: list[Message]


class Prompter:
    """Long prompts are rendered in threads, `pool_size` of them at once."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, seq_len: int, pool_size: int = 1) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.prompts = Prompts(renderer)
        self.stop_token_ids = list(renderer.get_stop_token_ids())
        self._seq_len = seq_len
        self._rendering = asyncio.Semaphore(pool_size)
        self._has_checked_tools = False

    async def prompt(self, messages: list[Message], tools: Tools, past: Past | None) -> Prompt:
        """The prompt that goes on from the past exactly, where that can be. Raises `PromptTooLong`."""
        if tools and not self._has_checked_tools:
            self._check_tools()
        prompt = await self._prompt(messages, tools, past)
        self._check_room(len(prompt.ids))
        return prompt

    def room(self, prompt_tokens: int) -> int:
        """Tokens that a reply may have."""
        return self._seq_len - prompt_tokens

    async def in_pool(self, function: Callable[..., T], *args: Any) -> T:
        """What the function returns, from one of the threads that render."""
        async with self._rendering:
            return await asyncio.to_thread(function, *args)

    def read(self, prompt_ids: list[int], ids: list[int], tools: Tools) -> ParsedResponse:
        """What was said, thought and called. ValueError or RecursionError where JSON is what no reader takes."""
        specification: Any = list(tools) or None
        return self.renderer.parse_response(ids, tools=specification, prompt_ids=prompt_ids)

    def raw(self, prompt_ids: list[int], ids: list[int]) -> str:
        """What was written, without the token that ended it; thoughts that the prompt opened begin where it did."""
        text = self.text(ids)
        return "<think>" + text if self.tokenizer.decode(prompt_ids[-8:]).endswith(THOUGHT) else text

    def text(self, ids: list[int], start: int = 0) -> str:
        """What was written from there on, without the token that ended it."""
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        return self.tokenizer.decode(ids[start : len(ids) - ended])

    async def _prompt(self, messages: list[Message], tools: Tools, past: Past | None) -> Prompt:
        length = text_length(messages)
        if length > WRITE_AT_ONCE:
            self._check_room(self.prompts.least_tokens(messages, self.tokenizer), "at least ")
        if past is not None:
            new = text_length(past.since) + len(past.turn.prompt_ids) + len(past.turn.completion_ids)
            prompt = await aside(new > WRITE_AT_ONCE, self.prompts.go_on, past.turn, past.since, tools)
            if prompt is not None:
                return prompt
        if length <= WRITE_AT_ONCE:
            return self.prompts.render(messages, tools)
        return await self.in_pool(self.prompts.render, messages, tools)  # the next to ask the same finds it made

    def _check_tools(self) -> None:
        """Calls must be readable; a policy that is not told of its tools may still have been trained to call them."""
        if not getattr(self.renderer, "supports_tools", True):
            raise EpisodeError(
                "no_tool_parser",
                "the policy's own chat template does not say how tool calls are read: set renderer.tool_parser, or a "
                "renderer.name that knows the model",
            )
        if not shows_tools(self.renderer):
            log.warning("an environment offers tools, but the policy's chat template %s", NO_PLACE_FOR_TOOLS)
        self._has_checked_tools = True

    def _check_room(self, tokens: int, least: str = "") -> None:
        if tokens >= self._seq_len:
            raise PromptTooLong(f"the conversation has {least}{tokens} tokens and seq_len is {self._seq_len}")


async def aside(long: bool, function: Callable[..., T], *args: Any) -> T:
    """What the function returns; from a thread where it may take long, so that the loop goes on."""
    return await asyncio.to_thread(function, *args) if long else function(*args)


def call_of(parsed: ParsedToolCall, identity: str) -> ToolCall:
    """A call that a renderer read."""
    return checked_tool_call(identity, parsed.name, parsed.arguments, UNUSABLE.get(parsed.status, ""))
