"""The terminal of a chat: a reply as it comes, thoughts dimmed, and what there is to say about it."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from headrace.inference.client.chat_stream import ReplyChunk

STYLES = {"text": "", "thought": "dim", "call": "cyan"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that command a terminal; the words of a model or a server must not."""


def harmless(words: str) -> str:
    """As a terminal may be given them."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", words)


class Terminal:
    """Shows pieces one after the other; `break_line` begins a new line unless one has just begun."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._kind: str | None = None
        self._at_start = True

    def show(self, piece: ReplyChunk) -> None:
        if self._kind != piece.kind and "thought" in (self._kind, piece.kind):
            self.break_line()
        self._kind = piece.kind
        self._write(piece.text, STYLES[piece.kind])

    def break_line(self) -> None:
        if not self._at_start:
            self._write("\n")
        self._kind = None

    def note(self, words: str) -> None:
        """Something that is not the model's."""
        self.break_line()
        self._write(words + "\n", "dim")

    def complain(self, words: str) -> None:
        self.break_line()
        self._write(words + "\n", "red")

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(harmless(text), style), end="", soft_wrap=True)
        self._at_start = text.endswith("\n")
