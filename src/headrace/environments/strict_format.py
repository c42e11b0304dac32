r"""The strict completion format: one block of reasoning, then `\boxed{...}`, and nothing else.

The instructions and the parser are defined together, so that they agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.environments.arguments import BadArgument

BOX = r"\boxed{"
THINKING_TAGS = ("<think>", "</think>")
"""The default tags around reasoning."""
TAGS = "tags"
"""The entry of a task's data with the pair of tags around reasoning; the default is `THINKING_TAGS`."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class StrictCompletion(NamedTuple):
    thinking: str
    answer: str


class StrictFormat:
    """The format with `opening` and `closing` tags around the reasoning."""

    def __init__(self, opening: str = THINKING_TAGS[0], closing: str = THINKING_TAGS[1]) -> None:
        self.opening = opening
        self.closing = closing
        texts = all(isinstance(tag, str) and tag for tag in (opening, closing))
        if not texts or self.parse(self.write("", "0")) is None:
            fact = f"with opening = {opening!r}, no completion could be accepted"
            fix = "Give two different texts, neither in the other."
            raise BadArgument(fact, key="closing", value=closing, fix=fix)

    @property
    def tags(self) -> tuple[str, str]:
        return self.opening, self.closing

    @property
    def instructions(self) -> str:
        return (
            f"Think step by step between {self.opening} and {self.closing}, then write the final answer as "
            f"{BOX}...}} and nothing else."
        )

    def parse(self, text: str) -> StrictCompletion | None:
        """Return the parts of a completion in this format, else None. Takes linear time."""
        body = text.strip()
        if not body.startswith(self.opening) or body.count(self.opening) != 1 or body.count(self.closing) != 1:
            return None
        thinking, _, rest = body[len(self.opening) :].partition(self.closing)
        rest = rest.strip()
        if not (rest.startswith(BOX) and rest.endswith("}")):
            return None
        answer = rest[len(BOX) : -1].strip()
        return StrictCompletion(thinking.strip(), answer) if answer and _is_balanced(answer) else None

    def write(self, thinking: str, answer: str) -> str:
        """Return a completion in this format."""
        return f"{self.opening}\n{thinking}\n{self.closing}\n\n{BOX}{answer}}}"


def format_of(data: Mapping[str, Any]) -> StrictFormat:
    """Return the strict format that a task's prompt requests."""
    return format_with(data.get(TAGS))


def format_with(tags: Sequence[str] | None) -> StrictFormat:
    """Return the format with these tags, or with `THINKING_TAGS`."""
    if tags is not None and (isinstance(tags, str) or len(tags) != 2):
        fix = 'For example ["<think>", "</think>"].'
        raise BadArgument("expected two texts", key=TAGS, value=tags, fix=fix)
    return _cached_format(*(tags or ()))


_cached_format = lru_cache(StrictFormat)


def _is_balanced(text: str) -> bool:
    """Return whether braces are balanced, ignoring those after a backslash."""
    depth = 0
    for match in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0
