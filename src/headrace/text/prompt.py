"""Conversations as the tokens of a prompt, with the role that wrote each token.

A conversation that goes on from a sampled turn keeps that turn's tokens as they were: sampled text need not be what its
own rendering would be, and a policy must be trained on what it sampled. Where the chat format rewrites history (it
drops earlier thoughts, say) that cannot be, and the whole is rendered anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from renderers.base import RenderedTokens, Renderer
from renderers.default import DefaultRenderer

from headrace.rollout.types import ROLES, Message, Turn
from headrace.text.tokenizer import Tokenizer

KEPT = 16
"""Rendered prompts that are kept: the episodes of a group start one after another and ask the same."""
ASSISTANT = ROLES.index("assistant")


class Prompt(NamedTuple):
    """`array` holds `ids` once more, as a turn keeps them: all episodes of a group share it."""

    ids: list[int]
    array: np.ndarray
    roles: np.ndarray | None
    """As in `Turn.prompt_roles`."""


class Prompts:
    """What a renderer makes of conversations; in any thread."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # Its attribution would take a rendering per message, and tells no text from scaffold.
        self._ids_only = isinstance(renderer, DefaultRenderer)
        self._kept: dict[bytes, Prompt] = {}
        self._keeping = threading.Lock()

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Prompt:
        """The whole conversation, ready for the next reply."""
        key = msgspec.json.encode((messages, tools))
        prompt = self._kept.get(key)
        if prompt is None:
            prompt = self._render(list(messages), list(tools) or None)
            with self._keeping:
                if len(self._kept) == KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = prompt
        return prompt

    def least_tokens(self, messages: Sequence[Message], tokenizer: Tokenizer) -> int:
        """Tokens that the conversation surely has, told by its length alone.

        What users and tools say is in every prompt, but perhaps for the spaces around it. A model's own template may
        leave anything out.
        """
        if self._ids_only:
            return 0
        heard = [message for message in messages if message.get("role") in ("user", "tool")]
        return sum(tokenizer.least_tokens(text.strip()) for text in _texts(heard))

    def go_on(self, turn: Turn, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Prompt | None:
        """The tokens of a turn and then `messages`, ready for the next reply; None where that would not be exact."""
        prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        specification: Any = list(tools) or None
        try:
            bridge = self._renderer.bridge_to_next_turn(prompt, completion, list(messages), tools=specification)
        except RecursionError:  # some read the completion for that, and a policy may write JSON of any depth
            return None
        known = prompt + completion
        if bridge is None or bridge.token_ids[: len(known)] != known:
            return None
        tail = np.array(bridge.token_ids[len(known) :], np.int32)
        array = np.concatenate([turn.prompt_ids, turn.completion_ids, tail])
        tail_roles = _roles(bridge, len(known))
        if tail_roles is None or turn.prompt_roles is None:
            return Prompt(bridge.token_ids, array, None)
        sampled = np.full(len(completion), ASSISTANT, np.int8)
        return Prompt(bridge.token_ids, array, np.concatenate([turn.prompt_roles, sampled, tail_roles]))

    def _render(self, messages: list[Any], tools: Any) -> Prompt:
        if self._ids_only:
            ids = list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
            return Prompt(ids, _shared(np.array(ids, np.int32)), None)
        rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        roles = _roles(rendered)
        array = np.array(rendered.token_ids, np.int32)
        return Prompt(rendered.token_ids, _shared(array), None if roles is None else _shared(roles))


def text_length(messages: Sequence[Message]) -> int:
    """Characters that the messages say."""
    return sum(map(len, _texts(messages)))


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif content:
            texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
            yield from (text for text in texts if isinstance(text, str))


def _shared(array: np.ndarray) -> np.ndarray:
    """Nobody may write to it: the turns of many episodes have it."""
    array.setflags(write=False)
    return array


def _roles(rendered: RenderedTokens, start: int = 0) -> np.ndarray | None:
    """Who wrote each token from `start` on; None where the renderer cannot tell text from scaffold."""
    if not rendered.is_content:
        return None
    numbers = [ROLES.index(role) if role in ROLES else 0 for role in rendered.message_roles]
    of_message = np.array([*numbers, 0], np.int8)  # index -1, scaffold of no message, finds the last
    return np.where(rendered.is_content[start:], of_message[rendered.message_indices[start:]], np.int8(0))
