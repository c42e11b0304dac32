"""Text that others wrote, made safe to show: names, exceptions, completions, file names, metrics of a run.

Such text may contain characters that control a terminal, reorder or hide what follows, forge lines of a log or break
markup. It is shown with visible escapes (`\\x1b`, `\\u202e`). The process's output, its log and `SafeConsole` escape by
themselves; only what writes pages and charts calls the functions here. Data that programs read (Parquet, JSON Lines,
the journal) keeps the exact text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TextIO, cast

_HOSTILE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline; DEL and C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff0-\ufffb"  # zero width or invisible, bidi marks, overrides and isolates, line separators
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"  # surrogates and noncharacters: cannot be encoded, or not in XML
    "\U000e0000-\U000e0fff"  # tags and variation selectors, which carry hidden text
    "]"
)
CONTINUATION = "\n    "
"""Begins a further line of a message, so that no line of foreign text can pass as a message of its own."""


def escape_control(text: str) -> str:
    """Escape everything but printable characters, tabs and newlines.

    Escapes above `\\x1f` are those of JSON, so that an encoded JSON text stays valid.
    """
    return _HOSTILE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character < " ":
        return f"\\x{ord(character):02x}"
    return re.sub("(.{4})", r"\\u\1", character.encode("utf-16-be", "surrogatepass").hex())


def escape_line(text: str) -> str:
    """Escape text that must stay on one line."""
    return escape_control(text).replace("\n", "\\n")


def escape_xml(text: str) -> str:
    """Escape text for XML, SVG and HTML. Characters that XML 1.0 forbids are among those of `escape_control`."""
    return escape(escape_control(text))


def escape_markdown(text: str) -> str:
    """Escape one line of text for Markdown: no markup, link or cell of a table begins in it."""
    return re.sub(r"([\\`|\[<])", r"\\\1", escape_line(text))


def markdown_table(cells: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first row are the column titles."""
    titles, *rows = ([escape_markdown(cell) for cell in row] for row in cells)
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]


def encodable(text: str) -> str:
    """Return the text with unpaired surrogates escaped, and otherwise unchanged, so that UTF-8 can encode it."""
    return text.encode(errors="backslashreplace").decode()


class _EscapedStream:
    """A text stream that escapes what is written to it; everything else is that of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        self.unescaped.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def escape_output() -> None:
    """Escape everything that this process prints from now on: its own output, warnings, tracebacks, log records."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _EscapedStream):
            setattr(sys, name, cast(TextIO, _EscapedStream(stream)))


def unescaped(stream: Any) -> Any:
    """Return the stream below, for exact data in a pipe, and for a console that escapes its texts itself."""
    return stream.unescaped if isinstance(stream, _EscapedStream) else stream
