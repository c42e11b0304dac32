r"""Extraction of the answer from what a model wrote.

A text may have any length and content, so only a bounded part of it is searched: the last boxes, and its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial

from headrace.environments.rewards.mathematics.latex import MAX_ANSWER_CHARACTERS, Unreadable
from headrace.environments.rewards.mathematics.shapes import has_words, parse_shape
from headrace.errors import BadInput

FINAL_ANSWER_MARK = "####"
MAX_BOXES = 16
"""Boxes that are read, from the last one backwards."""
END_CHARACTERS = 4 * MAX_ANSWER_CHARACTERS
"""Length of the end of a text in which phrases like "the answer is" are searched."""
MAX_CONNECTION_CHARACTERS = 60
"""Length of the text between two boxes that form a list."""

Extract = Callable[[str], str | None]

_BOXES = (r"\boxed", r"\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"\s*(?:\\[dt]?frac\s*)?[^\s${}\\]+")
_CONNECTED = re.compile(r"(?:[\s$,;]|\\[()\[\],;:! ]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*", re.IGNORECASE)
_ANSWER_IS = re.compile(r"(?<!/)\banswer\s{0,9}(?:is|:|=|>)\s{0,9}:?", re.IGNORECASE)
_END_OF_ANSWER = re.compile(r"\.\s|!(?=\s+[A-Z]|\s*$)|,?\s(?:because|since|as|so|which|where)\b|</\w|<\||\n")
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
"""A Markdown fence. Possessive throughout, so that matching takes time in proportion to the text."""
_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?")


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7` that is not empty, or None.

    A box that is not closed, or too long for an answer, ends the search. Boxes that are connected by commas, "and" or
    "or" only are one answer, a list: a model that boxes two guesses has answered with both.
    """
    contents: list[str] = []
    start = len(text)
    for begin, end, content in _iterate_boxes_backwards(text):
        if not contents or end > start:  # the last one, or one around it
            contents = [content]
        elif end + MAX_CONNECTION_CHARACTERS < start or not _CONNECTED.fullmatch(text, end, start):
            break
        elif content not in contents:
            contents.insert(0, content)
        start = begin
    return ", ".join(contents) or None


def final_answer(text: str, *, last_number: bool = False) -> str | None:
    """Return the boxed answer, else the line after the last `####`, else the clause after the last "answer is" or
    `<answer>`. With `last_number`, return the last number where there is none of these, or the clause is prose."""
    answer = boxed_answer(text)
    if answer is not None:
        return answer
    if (mark := text.rfind(FINAL_ANSWER_MARK)) >= 0:
        start = mark + len(FINAL_ANSWER_MARK)
        return text[start : start + MAX_ANSWER_CHARACTERS].lstrip().partition("\n")[0].strip()
    end = text[-END_CHARACTERS:]
    *_, announcement = [None, *_ANSWER_IS.finditer(end)]
    announced, is_prose = None, True
    if announcement is not None:
        announced = _END_OF_ANSWER.split(end[announcement.end() :].lstrip(), maxsplit=1)[0].rstrip(". ")
        with suppress(Unreadable):
            is_prose = has_words(parse_shape(announced, variables=False))
    numbers = _NUMBER.findall(end) if last_number and is_prose else []
    return numbers[-1] if numbers else announced


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Return the last fenced block in one of these languages ("": no language); an unclosed one extends to the end."""
    span = None
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            if opened[2].lower() in languages:
                span = (opened.end() + 1, fence.start())
            opened = None
    if opened is not None and opened[2].lower() in languages:
        span = (opened.end() + 1, len(text))
    return None if span is None else text[slice(*span)]


EXTRACTS: dict[str, Extract] = {
    "boxed": boxed_answer,
    "final": final_answer,
    "last_number": partial(final_answer, last_number=True),
    "all": lambda text: text.strip() if len(text) <= END_CHARACTERS else None,
}


def find_extract(extract: str | Extract) -> Extract:
    """Return the extraction function of this name; a function is returned as it is."""
    if callable(extract):
        return extract
    if extract not in EXTRACTS:
        fix = f"Give one of {', '.join(EXTRACTS)}, or a function."
        raise BadInput("unknown name", key="extract", value=extract, fix=fix)
    return EXTRACTS[extract]


def _iterate_boxes_backwards(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the begin, the end and the content of each complete box, the last one first."""
    positions = {command: text.rfind(command) for command in _BOXES}
    for _ in range(MAX_BOXES):
        begin, command = max((position, command) for command, position in positions.items())
        if begin < 0:
            return
        positions[command] = text.rfind(command, 0, begin)
        end = _find_box_end(text, begin + len(command))
        if end is None:
            return
        content = text[begin + len(command) : end].strip()
        content = content[1:-1].strip() if content.startswith("{") else content.rstrip(".,;:")
        if content:
            yield begin, end, content


def _find_box_end(text: str, start: int) -> int | None:
    """Return the end of the box whose command ends at `start`; None if it is not closed or too long."""
    opening = re.compile(r"\s{0,9}\{").match(text, start)
    if opening is None:
        bare = _BARE.match(text, start, start + MAX_ANSWER_CHARACTERS)
        return bare.end() if bare and not text[start : start + 1].isalpha() else None
    depth = 1
    for match in _BRACE.finditer(text, opening.end(), opening.end() + MAX_ANSWER_CHARACTERS):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    return None
