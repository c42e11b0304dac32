"""Texts of shipped environments: answers between tags, similarity of answers, and word lists."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources

from headrace.rollout.types import Message

MAX_LENGTH_RATIO = 8
"""How many times longer than the wanted answer a reply is compared; a longer one would score next to nothing."""


def tag(name: str, content: str) -> str:
    return f"<{name}>{content}</{name}>"


def tagged(text: str, name: str) -> str | None:
    """Return the text between the tags; None unless they occur exactly once: several answers count as none."""
    _, opened, rest = text.partition(f"<{name}>")
    content, closed, after = rest.partition(f"</{name}>")
    once = opened and closed and f"<{name}>" not in content and f"<{name}>" not in after
    return content if once else None


def replies(messages: Sequence[Message]) -> list[str]:
    """Return the model's replies in a conversation."""
    return [str(message.get("content") or "") for message in messages if message["role"] == "assistant"]


def reply_similarity(reply: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the similarity of the beginning of a reply that may be very long."""
    return similarity(reply[: MAX_LENGTH_RATIO * len(wanted)], wanted)


def similarity(reply: Sequence[str], wanted: Sequence[str]) -> float:
    """Return twice the longest common subsequence over the summed lengths: 1 if equal, 0 with nothing in common."""
    if not reply and not wanted:
        return 1.0
    row = [0] * (len(wanted) + 1)
    for left in reply:
        diagonal = 0
        for column, right in enumerate(wanted, 1):
            diagonal, row[column] = row[column], diagonal + 1 if left == right else max(row[column], row[column - 1])
    return 2 * row[-1] / (len(reply) + len(wanted))


@functools.cache
def word_list(name: str) -> tuple[str, ...]:
    """Return the words of `words/NAME.txt` in their order.

    `answers` are common words, chosen by hand; `guesses` are the other lower-case words of an English word list, with
    common inflected forms and without slurs.
    """
    file = resources.files("headrace.environments.shipped").joinpath("words", f"{name}.txt")
    return tuple(file.read_text(encoding="utf-8").split())
