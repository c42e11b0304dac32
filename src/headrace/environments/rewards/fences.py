"""Fenced blocks of a text, as Markdown has them."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
"""Possessive throughout, so that no text takes more than one look at each letter."""


def last_block(text: str, languages: Collection[str]) -> str | None:
    """The last block in one of these languages ("" is none given); one that is never closed goes to the end."""
    found = None
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            if opened[2].lower() in languages:
                found = (opened.end() + 1, fence.start())
            opened = None
    if opened is not None and opened[2].lower() in languages:
        found = (opened.end() + 1, len(text))
    return None if found is None else text[slice(*found)]
