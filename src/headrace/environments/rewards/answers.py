r"""Extraction of the answer from what a model wrote.

A text may have any length and content, so only a bounded part of it is searched: the last boxes, and its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial

from headrace.environments.rewards.mathematics.latex import LONGEST, Unreadable
from headrace.environments.rewards.mathematics.shapes import has_words, shape_of
from headrace.errors import BadInput

MOST_BOXES = 16
"""So many boxes are looked at, from the last one backwards."""
NEAR_THE_END = 4 * LONGEST
"""Characters, among which words like "the answer is" are looked for."""
BETWEEN_BOXES = 60
"""Characters that may connect two boxes to a list."""

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
    r"""What is in the last `\boxed{...}` or `\fbox{...}` that is not empty; `\boxed 7` will do.

    One that is not closed, or too long for an answer, is none, and nor is any box before it.
    Boxes that only commas, "and" or "or" connect are one answer, a list: who boxes two guesses has answered with both.
    """
    contents: list[str] = []
    start = len(text)
    for begin, end, content in _boxes_from_the_end(text):
        if not contents or end > start:  # the last one, or one around it
            contents = [content]
        elif end + BETWEEN_BOXES < start or not _CONNECTED.fullmatch(text, end, start):
            break
        elif content not in contents:
            contents.insert(0, content)
        start = begin
    return ", ".join(contents) or None


def final_answer(text: str, *, last_number: bool = False) -> str | None:
    """The boxed answer, else the line after the last `####`, else what follows the last "answer is" or `<answer>` up to
    the end of the clause. If wanted, the last number, where there is none of these or the last is prose."""
    answer = boxed_answer(text)
    if answer is not None:
        return answer
    if (mark := text.rfind("####")) >= 0:
        return _first_line(text[mark + 4 : mark + 4 + LONGEST])
    end = text[-NEAR_THE_END:]
    announced = _announced(end)
    numbers = _NUMBER.findall(end) if last_number and (announced is None or _is_prose(announced)) else []
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


def whole_text(text: str) -> str | None:
    return text.strip() if len(text) <= NEAR_THE_END else None


EXTRACTS: dict[str, Extract] = {
    "boxed": boxed_answer,
    "final": final_answer,
    "last_number": partial(final_answer, last_number=True),
    "all": whole_text,
}


def extract_named(extract: str | Extract) -> Extract:
    """One of `EXTRACTS` by its name, or a function of one's own."""
    if callable(extract):
        return extract
    if extract not in EXTRACTS:
        fix = f"Give one of {', '.join(EXTRACTS)}, or a function."
        raise BadInput("unknown name", key="extract", value=extract, fix=fix)
    return EXTRACTS[extract]


def _boxes_from_the_end(text: str) -> Iterator[tuple[int, int, str]]:
    """Where each complete box begins and ends, and what is in it."""
    places = {command: text.rfind(command) for command in _BOXES}
    for _ in range(MOST_BOXES):
        begin, command = max((place, command) for command, place in places.items())
        if begin < 0:
            return
        places[command] = text.rfind(command, 0, begin)
        end = _end_of_box(text, begin + len(command))
        if end is None:
            return
        content = text[begin + len(command) : end].strip()
        content = content[1:-1].strip() if content.startswith("{") else content.rstrip(".,;:")
        if content:
            yield begin, end, content


def _end_of_box(text: str, start: int) -> int | None:
    opening = re.compile(r"\s{0,9}\{").match(text, start)
    if opening is None:
        bare = _BARE.match(text, start, start + LONGEST)
        return bare.end() if bare and not text[start : start + 1].isalpha() else None
    depth = 1
    for match in _BRACE.finditer(text, opening.end(), opening.end() + LONGEST):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    return None


def _announced(text: str) -> str | None:
    found = list(_ANSWER_IS.finditer(text))
    if not found:
        return None
    following = text[found[-1].end() :].lstrip()
    return _END_OF_ANSWER.split(following, maxsplit=1)[0].rstrip(". ")


def _is_prose(answer: str) -> bool:
    try:
        return has_words(shape_of(answer, variables=False))
    except Unreadable:
        return True


def _first_line(text: str) -> str:
    return text.lstrip().partition("\n")[0].strip()
