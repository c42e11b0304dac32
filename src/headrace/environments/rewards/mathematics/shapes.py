r"""What kind of thing an answer is: one value with its unit, several in any order, a tuple or interval, a matrix, a
relation, or words.

`shape_of` reads it from the tokens alone, so that a comparison begins with what can be told without algebra: a list is
not one of its items, an interval not a tuple of other brackets, 3:1 not 3. What is left are single values, as LaTeX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.environments.rewards.mathematics.latex import (
    DEEPEST,
    Tokens,
    Unreadable,
    is_word,
    latex_of,
    tokens_of,
    word_of,
)
from headrace.environments.rewards.mathematics.vocabulary import (
    CLOSING,
    FUNCTIONS,
    MATRICES,
    MOST_UNIT_WORDS,
    NO_UNITS,
    OPENING,
    OPERATORS,
    RELATIONS,
    SAME_UNIT,
    SCALES,
    TURNED,
)


@dataclass(frozen=True)
class Value:
    """An expression without its unit, which is one of `SAME_UNIT`, `%`, or empty."""

    latex: str
    unit: str = ""
    scale: int = 1


@dataclass(frozen=True)
class Words:
    """Lower-case, without spaces."""

    text: str


@dataclass(frozen=True)
class Several:
    """In any order: a list, a set, the parts of a union."""

    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Ordered:
    """In this order: a tuple or an interval, by its brackets, or a ratio."""

    brackets: str
    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True)
class Relation:
    """A chain of sides with signs between them, never `>`: it is turned instead.

    An equation may give something a `name` and its `values`: of `x = 10/2 = 5` these are x, and 10/2 and 5.
    """

    signs: tuple[str, ...]
    sides: tuple[Shape, ...]
    name: str = ""
    values: tuple[Shape, ...] = ()

    @property
    def is_equation(self) -> bool:
        return set(self.signs) == {"="}


Shape = Value | Words | Several | Ordered | Matrix | Relation


def shape_of(text: str) -> Shape:
    """Raises `Unreadable`."""
    return _shape(tokens_of(text))


def interval_of(relation: Relation) -> Ordered | None:
    """`-2 < x \\le 7` as the interval (-2, 7]."""
    if not set(relation.signs) <= {"<", r"\le"} or not relation.name:
        return None
    below, above = Value(r"-\infty"), Value(r"\infty")
    sides = relation.sides
    match [side in relation.values for side in sides]:
        case [False, True]:
            sides, signs = (below, sides[1]), ("<", relation.signs[0])
        case [True, False]:
            sides, signs = (sides[0], above), (relation.signs[0], "<")
        case [True, False, True]:
            sides, signs = (sides[0], sides[2]), (relation.signs[0], relation.signs[1])
        case _:
            return None
    return Ordered(("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"), sides)


def _shape(tokens: Tokens) -> Shape:
    while tokens and tokens[-1] in ".,;:":
        tokens = tokens[:-1]
    while tokens and tokens[0] in ("=", r"\approx"):
        tokens = tokens[1:]
    if not tokens:
        raise Unreadable("nothing")
    parts = _split(tokens, lambda token: token in (",", ";") or _connects(token, "and", "or"))
    if len(parts) > 1:
        return _several(parts)
    if tokens[0] == r"\{" and (items := _enclosed(tokens)):
        return items
    if r"\pm" in tokens or r"\mp" in tokens:
        signs = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
        return _several([[each.get(token, token) for token in tokens] for each in signs])
    parts = _split(tokens, RELATIONS.__contains__)
    if len(parts) > 1:
        return _relation(parts, [token for token in _outside(tokens) if token in RELATIONS])
    parts = _split(tokens, lambda token: token == r"\in")
    if len(parts) == 2 and _is_name(parts[0]):
        return _shape(parts[1])
    parts = _split(tokens, lambda token: token == r"\cup")
    if len(parts) > 1:
        return _several(parts)
    parts = _split(tokens, lambda token: token == ":" or _connects(token, "to"))
    if len(parts) > 1 and not any(is_word(token) for part in parts for token in part):
        return Ordered(":", tuple(map(_shape, parts)))
    return _enclosed(tokens) or _value(tokens)


def _several(parts: list[Tokens]) -> Shape:
    items: list[Shape] = []
    for shape in map(_shape, parts):
        items += shape.items if isinstance(shape, Several) else [shape]
    return items[0] if len(items) == 1 else Several(tuple(items))


def _relation(parts: list[Tokens], signs: list[str]) -> Shape:
    if len(parts) <= len(signs):
        raise Unreadable("a relation without one of its sides")
    for end, sign in enumerate(signs):  # what is only about equal says nothing new
        if sign == r"\approx" and any(not _is_name(part) for part in parts[: end + 1]):
            parts, signs = parts[: end + 1], signs[:end]
            break
    signs = ["=" if sign == r"\approx" else sign for sign in signs]
    if not signs:
        return _shape(parts[0])
    if set(signs) <= {">", r"\ge", "="} and set(signs) != {"="}:
        parts, signs = parts[::-1], [TURNED.get(sign, sign) for sign in signs[::-1]]
    sides = tuple(map(_shape, parts))
    names = [latex_of(part) for part in parts if _is_name(part)]
    values = tuple(side for side, part in zip(sides, parts, strict=True) if not _is_name(part))
    return Relation(tuple(signs), sides, names[0] if names else "", values or sides[1:] if names else ())


def _enclosed(tokens: Tokens) -> Shape | None:
    """What is in brackets from its first token to its last."""
    opening, inner, closing = tokens[0], tokens[1:-1], tokens[-1]
    if not inner or len(list(_outside(tokens))) > 2:
        return None
    if opening.startswith(r"\begin{"):
        return _matrix(opening, inner)
    parts = _split(inner, lambda token: token in (",", ";"))
    if opening == r"\{":
        return _several(parts)
    if len(parts) > 1:
        return Ordered(opening + closing, tuple(map(_shape, parts)))
    if opening + closing == "()" or inner[0].startswith(r"\begin{"):
        return _shape(inner)
    return None


def _matrix(opening: str, inner: Tokens) -> Shape | None:
    if opening[7:-1] not in MATRICES:
        return None
    rows = [_split(row, lambda token: token == "&") for row in _split(inner, lambda token: token == r"\\")]
    return Matrix(tuple(tuple(map(_shape, row)) for row in rows))


def _value(tokens: Tokens) -> Shape:
    """A value and its unit; or words, where there is more to it."""
    rest, unit, scale = _without_unit(tokens)
    if rest[:1] == ["+"]:
        rest = rest[1:]
    if not rest or any(map(is_word, rest)):
        return Words(_plain(latex_of(tokens)))
    return Value(latex_of(rest), unit, scale)


def _without_unit(tokens: Tokens) -> tuple[Tokens, str, int]:
    """What is left without the unit, the unit, and how many of it a word like "million" makes."""
    end = len(tokens) - 4 if tokens[-4:-2] == ["^", "{"] else len(tokens)  # square inches
    if end < 2 or not is_word(tokens[end - 1]):
        return *_without_sign(tokens), 1
    words = word_of(tokens[end - 1]).lower().split()
    more_than_a_unit = len(words) > MOST_UNIT_WORDS or NO_UNITS.intersection(words)
    if more_than_a_unit or (end > 2 and all(token.isalpha() for token in tokens[: end - 1])):
        return tokens, "", 1
    rest, sign = _without_sign(tokens[: end - 1])
    known = next((SAME_UNIT[word] for word in words if word in SAME_UNIT), "")
    return rest, known or sign, SCALES.get(words[0], 1)


def _without_sign(tokens: Tokens) -> tuple[Tokens, str]:
    if r"\$" in tokens[:2] or tokens[-1] == r"\$":
        return [token for token in tokens if token != r"\$"], "dollar"
    if tokens[-1] == r"\%":
        return tokens[:-1], "%"
    if tokens[-1] == r"\degree" and not any(token in FUNCTIONS for token in tokens):
        return tokens[:-1], "degree"
    return tokens, ""


def _is_name(tokens: Tokens) -> bool:
    """Whether it only says what the other side is: `x`, `f(2)`, `A_1`, `\\angle ABC`, `(x, y)`, but not `2x`."""
    outside = list(_outside(tokens))
    digits = [token for token in (tokens if tokens[0] == "(" else outside) if token.lstrip(".")[:1].isdigit()]
    return not digits and not any(token in OPERATORS for token in outside)


def _split(tokens: Tokens, separates: Callable[[str], bool]) -> list[Tokens]:
    """The parts that are not empty."""
    parts: list[Tokens] = [[]]
    for token, depth in _with_depth(tokens):
        if depth == 0 and separates(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _outside(tokens: Tokens) -> Iterator[str]:
    """The tokens that no brackets enclose, brackets included."""
    return (token for token, depth in _with_depth(tokens) if depth == 0)


def _with_depth(tokens: Tokens) -> Iterator[tuple[str, int]]:
    depth = 0
    for token in tokens:
        closes = token in CLOSING or token.startswith(r"\end{")
        depth -= closes
        if not 0 <= depth <= DEEPEST:
            raise Unreadable("brackets that are not opened, or nested too deeply")
        yield token, depth
        depth += token in OPENING or token.startswith(r"\begin{")
    if depth:
        raise Unreadable("a bracket that is not closed")


def _connects(token: str, *words: str) -> bool:
    return is_word(token) and word_of(token).lower() in words


def _plain(latex: str) -> str:
    return "".join(letter for letter in latex.replace(r"\text", "").lower() if letter not in "{}.' ")
