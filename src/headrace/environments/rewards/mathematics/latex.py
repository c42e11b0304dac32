r"""Normalized LaTeX tokens of an answer.

Spacing, delimiters, `\dfrac`, `\left`, missing braces, text commands, Unicode signs and plain mathematics (`sqrt(2)`,
`x^10`) get one spelling. Only arguments keep their braces, and adjacent words become one `\text{...}` token. Nothing is
computed here. Left out: macros, and environments other than matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from headrace.environments.rewards.mathematics import vocabulary

MAX_ANSWER_CHARACTERS = 2000
"""A longer text is not parsed."""
MAX_NESTING = 80
"""Nesting of commands, groups and brackets that is parsed; a fraction in a fraction adds two."""

Tokens = list[str]

_SIGNS = str.maketrans(vocabulary.SIGNS)
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff\ufffe\uffff]")
_JOINED = re.compile(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\[,;: ])\s*(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,/^_])[1-9]\d{0,2}(?: \d{3})+(?![\d/])")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_CHOICE = re.compile(r"([A-Z])(?:\)|\.(?=\s))")
_NOT_EQUAL = re.compile(r"\\not\s*=")
_GOES_ON = re.compile(r"(?<=\d)\.\.\.")
_HALF_DAY = re.compile(r"(?<=[\d\s{])([ap])(?:\.\s?m\.?|m\b)", re.IGNORECASE)
_DOLLAR = re.compile(r"(?<!\\)\$")
_DIFFERENTIAL = re.compile("d[a-z]")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|[a-zA-Z]+|\s+|.", re.DOTALL)


class Unreadable(ValueError):
    """A text that cannot be parsed: too long, too deeply nested, unbalanced, or with control characters."""


def tokenize(text: str, variables: bool = True) -> Tokens:
    """Return the normalized tokens of an answer. Raises `Unreadable`.

    Without `variables` any adjacent letters are a word, and `5 m` has a unit: for answers to a gold answer without
    letters.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise Unreadable(f"{len(text)} characters")
    if _CONTROL.search(text):
        raise Unreadable("control characters")
    text = text.translate(_SIGNS).strip().strip("`*")
    if choice := _CHOICE.match(text):
        text = f"({choice[1]}){text[choice.end() :]}"
    if len(_DOLLAR.findall(text)) % 2:  # currency, not delimiters of mathematics
        text = _DOLLAR.sub(r"\\$", text, count=1)
    text = _DOLLAR.sub(" ", text)
    text = _HALF_DAY.sub(r" \1m ", text).replace("**", "^")
    text = _NOT_EQUAL.sub(r"\\ne ", _GOES_ON.sub(r"\\ldots ", text))
    return _Normalizer(_join_thousands(_JOINED.sub("", text)), variables).read()


def join_tokens(tokens: Iterable[str]) -> str:
    """Return the tokens as one string, with spaces only where tokens would merge."""
    pieces: list[str] = []
    before = ""
    for token in tokens:
        command = before[:1] == "\\" and before[-1].isalpha()
        runs_on = (command and token[0].isalpha()) or (before[-1:].isdigit() and token.lstrip(".")[:1].isdigit())
        pieces += [" ", token] if runs_on else [token]
        before = token
    return "".join(pieces)


def is_word(token: str) -> bool:
    return token.startswith(r"\text{")


def unwrap_word(token: str) -> str:
    return token[6:-1]


def _join_thousands(text: str) -> str:
    """Write `1,234` as 1234, except in brackets, where a comma separates."""

    def join(match: re.Match[str]) -> str:
        before = text[: match.start()]
        depth = sum(map(before.count, "([")) + before.count(r"\{") - sum(map(before.count, ")]")) - before.count(r"\}")
        return match[0] if depth else match[0].replace(",", "")

    return _THOUSANDS.sub(join, _SPACED.sub(lambda match: match[0].replace(" ", ""), text))


class _Normalizer:
    """Reads raw tokens from left to right and returns normalized ones."""

    def __init__(self, text: str, variables: bool) -> None:
        self._variables = variables
        self._raw = _TOKEN.findall(text)[::-1]  # reversed: pop() takes the next one
        self._before = ""
        self._depth = 0

    def read(self) -> Tokens:
        return self._read_until("", words=False)

    def _read_until(self, closing: str, words: bool) -> Tokens:
        """Return the tokens up to the closing one, or to the end. In `words`, adjacent letters are one word."""
        tokens: Tokens = []
        while self._raw and self._raw[-1] != closing:
            if self._raw[-1] == "}":
                raise Unreadable("a brace that was not opened")
            more = self._read_next(words)
            if not self._variables and tokens and len(more) == 1 and more[0] in vocabulary.UNIT_LETTERS:
                after_number = tokens[-1][-1].isdigit() or tokens[-1] == "}"
                if after_number or (tokens[-1] == "/" and is_word(tokens[-2:][0])):  # a unit: `5 m` and `5 km/h`
                    more = [rf"\text{{{more[0]}}}"]
            _append_joined(tokens, more)
        if closing and not self._raw:
            raise Unreadable(f"no {closing}")
        if closing:
            self._raw.pop()
        return tokens

    def _read_next(self, words: bool) -> Tokens:
        """Return the normalized tokens of the next raw token and its arguments."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise Unreadable("nested too deeply")
        tokens = self._read_one(words)
        self._depth -= 1
        return tokens

    def _read_one(self, words: bool) -> Tokens:
        raw = self._raw.pop()
        before, self._before = self._before, raw
        token = vocabulary.SPELLING.get(raw, raw)
        if raw.isspace() or raw in vocabulary.LAYOUT_COMMANDS or (words and raw == "."):
            if raw in (r"\left", r"\right") and self._raw[-1:] == ["."]:
                self._raw.pop()
            return []
        if token == "{":
            return self._read_until("}", words)
        if token in vocabulary.LAYOUT_COMMANDS_WITH_ARGUMENT:
            self._read_argument()
            return []
        if token in vocabulary.TEXT_COMMANDS:
            return self._read_argument(words=True)
        if token in "^_":
            inner = self._read_argument(opening="(" if token == "^" else "", whole_numbers=True)
            return [r"\degree"] if inner in ([r"\circ"], [r"\degree"]) else [token, "{", *inner, "}"]
        if token in vocabulary.NAME_COMMANDS:
            return self._read_name(token)
        if token in vocabulary.ARGUMENT_COUNTS:
            count = vocabulary.ARGUMENT_COUNTS[token]
            read = partial(self._read_argument, opening="(" if token == r"\sqrt" else "", whole_numbers=count == 1)
            root = self._read_root(token)
            arguments = [part for _ in range(count) for part in ("{", *read(), "}")]
            match [token, *root, *arguments]:
                case [r"\frac", "{", top, "}", "{", bottom, "}"] if is_word(top) and is_word(bottom):
                    return [rf"\text{{{unwrap_word(top)} per {unwrap_word(bottom)}}}"]
                case tokens:
                    return tokens
        if raw[0].isalpha():
            return _split_letters(raw, words, before, self._variables)
        return [token]

    def _read_argument(self, words: bool = False, opening: str = "", whole_numbers: bool = False) -> Tokens:
        """Return an argument: a group or one token. As in TeX, `\\frac12` takes one digit, unless `whole_numbers`."""
        while self._raw and (self._raw[-1].isspace() or self._raw[-1] in vocabulary.LAYOUT_COMMANDS):
            self._raw.pop()
        if not self._raw or self._raw[-1] in ("}", "&", r"\\"):
            raise Unreadable("a command without its argument")
        if self._raw[-1] == opening:
            self._raw.pop()
            return self._read_until(")", words)
        if self._raw[-1][0].isalnum() and not words and not (whole_numbers and self._raw[-1][0].isdigit()):
            first, rest = self._raw[-1][0], self._raw[-1][1:]
            self._raw[-1:] = [rest] if rest else []
            return [first]
        return self._read_next(words)

    def _read_root(self, command: str) -> Tokens:
        """Return the optional argument of `\\sqrt` with its brackets: `[3]`."""
        while self._raw and self._raw[-1].isspace():
            self._raw.pop()
        if command != r"\sqrt" or self._raw[-1:] != ["["]:
            return []
        self._raw.pop()
        return ["[", *self._read_until("]", words=False), "]"]

    def _read_name(self, command: str) -> Tokens:
        """Return a command and its name as one token: `\\begin{pmatrix}`."""
        name = "".join(unwrap_word(token) if is_word(token) else token for token in self._read_argument(words=True))
        if (command, name) == (r"\begin", "array"):
            self._read_argument()  # skip the alignment of its columns
        if command == r"\operatorname" and rf"\{name}" in vocabulary.FUNCTIONS:
            return [rf"\{name}"]
        return [f"{command}{{{name}}}"]


def _split_letters(run: str, words: bool, before: str, variables: bool) -> Tokens:
    """Return a spelled-out sign, a word, or a product of letters: `2abcd` is one, `2 eggs` is not."""
    lowered = run.lower()
    if lowered in vocabulary.SPELLED_SIGNS:
        return [vocabulary.SPELLED_SIGNS[lowered]]
    long = len(run) > (3 if variables or _DIFFERENTIAL.fullmatch(run) else 1) and not before[-1:].isdigit()
    short_word = lowered in vocabulary.SHORT_WORDS
    unit = not variables and (run == "a" or (len(run) > 1 and lowered in vocabulary.KNOWN_UNITS))
    if long or short_word or unit or (words and (len(run) > 1 or run in vocabulary.UNIT_LETTERS)):
        return [rf"\text{{{run}}}"]
    return list(run)


def _append_joined(tokens: Tokens, more: Tokens) -> None:
    """Append tokens, joining adjacent words, except those that connect two answers; `km/h` are words, too."""
    for token in more:
        if tokens and tokens[-1] == "/" and is_word(token):
            tokens.pop()
            _append_joined(tokens, [rf"\text{{per {unwrap_word(token)}}}"])
            continue
        if tokens and is_word(tokens[-1]) and is_word(token):
            pair = unwrap_word(tokens[-1]), unwrap_word(token)
            if not {word.lower() for word in pair} & set(vocabulary.CONNECTIVES):
                tokens[-1] = r"\text{" + " ".join(pair) + "}"
                continue
        tokens.append(token)
