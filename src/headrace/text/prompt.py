"""Conversations as prompt tokens, with the role that wrote each token.

A conversation that continues a sampled turn keeps the exact tokens of that turn: sampled text may be tokenized
differently from its own rendering, and the policy must be trained on what it sampled. Where the chat format rewrites
history (it drops earlier reasoning, for example), this is impossible and the whole conversation is rendered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from renderers.base import RenderedTokens, Renderer
from renderers.default import DefaultRenderer

from headrace.rollout.types import ROLES, Message, Turn
from headrace.text.tokenizer import Tokenizer

CACHED_PROMPTS = 16
"""Rendered prompts that are cached: the episodes of a group start one after another with the same prompt."""
ASSISTANT = ROLES.index("assistant")
Tools = Sequence[dict[str, Any]]
"""Function schemas in OpenAI's form."""


class Prompt(NamedTuple):
    """The tokens of a conversation up to where the next reply begins."""

    ids: list[int]
    array: np.ndarray
    """`ids` as int32, read-only: the turns of all episodes of a group share it."""
    roles: np.ndarray | None
    """As in `Turn.prompt_roles`."""


class PromptRenderer:
    """Renders conversations to prompts; thread-safe."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # With a model's own template, roles need a rendering per message, and content tokens cannot be identified.
        self._ids_only = isinstance(renderer, DefaultRenderer)
        self._render_cached = lru_cache(CACHED_PROMPTS)(self._render)

    def render(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Return the prompt of a whole conversation, from the cache if possible."""
        return self._render_cached(msgspec.json.encode((messages, tools)))

    def extend(self, turn: Turn, messages: Sequence[Message], tools: Tools) -> Prompt | None:
        """Return the tokens of a turn followed by `messages`; None where the turn's tokens would change."""
        prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        schemas: Any = list(tools) or None
        try:
            bridge = self._renderer.bridge_to_next_turn(prompt, completion, list(messages), tools=schemas)
        except RecursionError:  # some renderers parse the completion, and a policy may write JSON of any depth
            return None
        prefix = prompt + completion
        if bridge is None or bridge.token_ids[: len(prefix)] != prefix:
            return None
        tail = np.array(bridge.token_ids[len(prefix) :], np.int32)
        array = np.concatenate([turn.prompt_ids, turn.completion_ids, tail])
        tail_roles = _token_roles(bridge, len(prefix))
        if tail_roles is None or turn.prompt_roles is None:
            return Prompt(bridge.token_ids, array, None)
        sampled = np.full(len(completion), ASSISTANT, np.int8)
        return Prompt(bridge.token_ids, array, np.concatenate([turn.prompt_roles, sampled, tail_roles]))

    def min_tokens(self, messages: Sequence[Message], tokenizer: Tokenizer) -> int:
        """Return a lower bound of the prompt's tokens from text lengths alone.

        Only the text of users and tools counts, which is in every prompt except for white space around it. A model's
        own template may drop anything: the bound is 0.
        """
        if self._ids_only:
            return 0
        inputs = [message for message in messages if message.get("role") in ("user", "tool")]
        return sum(tokenizer.min_tokens(text.strip()) for text in _texts(inputs))

    def _render(self, conversation: bytes) -> Prompt:
        """Render messages and tools, encoded as JSON."""
        messages, schemas = msgspec.json.decode(conversation)
        tools = schemas or None
        if self._ids_only:
            ids, roles = list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True)), None
        else:
            rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
            ids, roles = rendered.token_ids, _token_roles(rendered)
        array = np.array(ids, np.int32)
        for shared in (array, roles):
            if shared is not None:
                shared.setflags(write=False)
        return Prompt(ids, array, roles)


def text_length(messages: Sequence[Message]) -> int:
    """Return the number of characters in the contents of the messages."""
    return sum(map(len, _texts(messages)))


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif content:
            texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
            yield from (text for text in texts if isinstance(text, str))


def _token_roles(rendered: RenderedTokens, start: int = 0) -> np.ndarray | None:
    """Return each token's index in `ROLES` from `start` on; None if the renderer does not mark content tokens."""
    if not rendered.is_content:
        return None
    numbers = [ROLES.index(role) if role in ROLES else 0 for role in rendered.message_roles]
    of_message = np.array([*numbers, 0], np.int8)  # the last entry is for index -1, tokens outside of messages
    return np.where(rendered.is_content[start:], of_message[rendered.message_indices[start:]], np.int8(0))
