"""Answers between tags, as in `<guess>42</guess>`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.rollout.types import Message


def tag(name: str, content: str) -> str:
    return f"<{name}>{content}</{name}>"


def tagged(text: str, name: str) -> str | None:
    """What stands between the tags; None unless they are there exactly once: who names several answers names none."""
    _, opened, rest = text.partition(f"<{name}>")
    content, closed, after = rest.partition(f"</{name}>")
    once = opened and closed and f"<{name}>" not in content and f"<{name}>" not in after
    return content if once else None


def replies(messages: Sequence[Message]) -> list[str]:
    """What the model has said so far in a conversation."""
    return [str(message.get("content") or "") for message in messages if message["role"] == "assistant"]
