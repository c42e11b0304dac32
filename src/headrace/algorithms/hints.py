"""Hints: texts in a template, rendered as one user message that stands before a scored sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.rollout.types import Message

if TYPE_CHECKING:
    from renderers.base import Renderer

MAX_INLINE_CHARS = 20_000
"""Texts up to this length are rendered on the event loop; longer ones in a thread."""


class Hints:
    """Renders the hints of one batch, each text once."""

    def __init__(self, renderer: Renderer, template: str, placeholder: str) -> None:
        self._renderer = renderer
        self._template = template
        self._placeholder = placeholder
        self._rendered: dict[str, list[int]] = {}

    async def of(self, text: str) -> list[int]:
        """Return the tokens of the template with this text in it; empty where that is empty."""
        if text not in self._rendered:
            # Not str.format: the text may contain braces.
            self._rendered[text] = await self._render(self._template.replace(self._placeholder, text))
        return self._rendered[text]

    async def _render(self, content: str) -> list[int]:
        if not content:
            return []
        message: list[Any] = [{"role": "user", "content": content}]
        if len(content) > MAX_INLINE_CHARS:
            return list(await asyncio.to_thread(self._renderer.render_ids, message, add_generation_prompt=False))
        await asyncio.sleep(0)  # yield to the event loop between many short texts
        return list(self._renderer.render_ids(message, add_generation_prompt=False))


def conversation_text(messages: Sequence[Message]) -> str:
    """Return several messages as one text; messages of other roles begin with their role."""
    parts = ((message.get("role"), message_text(message)) for message in messages)
    return "\n\n".join(text if role == "assistant" else f"{role}: {text}" for role, text in parts if text)


def message_text(message: Message) -> str:
    """Return thoughts, text and tool calls of a message, one per line."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    calls = [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (_content_text(thoughts), _content_text(message.get("content")), *calls) if part)


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    given = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f"{function.get('name', '')}({given})"
