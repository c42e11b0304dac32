r"""The shape of an answer: a value with its unit, several in any order, a tuple or interval, a matrix, a relation, or
words.

`parse_shape` parses the tokens only, so that a comparison begins with what needs no algebra: a list is not one of its
items, an interval not a tuple with other brackets, 3:1 not 3. The leaves are single values, as LaTeX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.environments.rewards.mathematics import vocabulary
from headrace.environments.rewards.mathematics.latex import (
    MAX_NESTING,
    Tokens,
    Unreadable,
    is_word,
    join_tokens,
    tokenize,
    unwrap_word,
)
from headrace.environments.rewards.mathematics.numbers import parse_number


@dataclass(frozen=True)
class Value:
    """An expression without its unit, which is a value of `CANONICAL_UNITS` with its exponent, `%`, or empty."""

    latex: str
    unit: str = ""
    scale: int = 1


@dataclass(frozen=True)
class Words:
    """Prose, in lower case and without spaces."""

    text: str


@dataclass(frozen=True)
class Several:
    """Items in any order: a list, a set, the parts of a union."""

    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Ordered:
    """Items in this order: a tuple or an interval, by its brackets, or a ratio."""

    brackets: str
    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True)
class Relation:
    """A chain of sides with signs between them, never `>`: such a chain is reversed.

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


def parse_shape(text: str, variables: bool = True) -> Shape:
    """Return the shape of an answer. Raises `Unreadable`."""
    return _parse_tokens(tokenize(text, variables))


def has_variables(gold: str) -> bool:
    """Return whether letters in answers may be variables; else they are units and words."""
    return any(len(token) == 1 and token.isalpha() for token in tokenize(gold))


def has_words(shape: Shape) -> bool:
    """Return whether a shape is or contains prose."""
    match shape:
        case Words():
            return True
        case Several() | Ordered():
            return any(map(has_words, shape.items))
        case Relation():
            return any(map(has_words, shape.values or shape.sides))
    return False


def as_interval(relation: Relation) -> Ordered | None:
    """Return the interval of a relation: (-2, 7] for `-2 < x \\le 7`; None if it has none."""
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


def _parse_tokens(tokens: Tokens) -> Shape:
    """Return the shape of tokens, split first at the separators that bind least: commas, then relations."""
    while tokens and tokens[-1] in ".,;:":
        tokens = tokens[:-1]
    while tokens and tokens[0] in ("=", r"\approx"):
        tokens = tokens[1:]
    if not tokens:
        raise Unreadable("an empty answer")
    parts = _split(tokens, lambda token: token in (",", ";") or _is_connective(token, "and", "or"))
    if len(parts) > 1:
        return _parse_several(parts)
    if tokens == [r"\{", r"\}"]:
        return Value(r"\emptyset")
    if tokens == [r"\mathbb{R}"]:
        return Ordered("()", (Value(r"-\infty"), Value(r"\infty")))
    if tokens[0] == r"\{" and (items := _parse_enclosed(tokens)):
        return items
    if r"\pm" in tokens or r"\mp" in tokens:
        signs = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
        return _parse_several([[each.get(token, token) for token in tokens] for each in signs])
    parts = _split(tokens, vocabulary.RELATIONS.__contains__)
    if len(parts) > 1:
        return _parse_relation(parts, [token for token in _outside_brackets(tokens) if token in vocabulary.RELATIONS])
    parts = _split(tokens, lambda token: token == r"\in")
    if len(parts) == 2 and _is_name(parts[0]):
        return _parse_tokens(parts[1])
    parts = _split(tokens, lambda token: token == r"\cup")
    if len(parts) > 1:
        return _parse_several(parts)
    parts = _split(tokens, lambda token: token == ":" or _is_connective(token, "to"))
    if len(parts) > 1 and not any(is_word(token) for part in parts for token in part):
        return Ordered(":", tuple(map(_parse_tokens, parts)))
    return _parse_enclosed(tokens) or _parse_value(tokens)


def _parse_several(parts: list[Tokens]) -> Shape:
    items: list[Shape] = []
    for shape in map(_parse_tokens, parts):
        items += shape.items if isinstance(shape, Several) else [shape]
    return items[0] if len(items) == 1 else Several(tuple(items))


def _parse_relation(parts: list[Tokens], signs: list[str]) -> Shape:
    """Return the relation of these sides, without approximations of an exact side."""
    if len(parts) <= len(signs):
        raise Unreadable("a relation without one of its sides")
    for end, sign in enumerate(signs):  # drop approximations of an exact side
        if sign == r"\approx" and any(not _is_name(part) for part in parts[: end + 1]):
            parts, signs = parts[: end + 1], signs[:end]
            break
    signs = ["=" if sign == r"\approx" else sign for sign in signs]
    if not signs:
        return _parse_tokens(parts[0])
    if set(signs) <= {">", r"\ge", "="} and set(signs) != {"="}:
        parts, signs = parts[::-1], [vocabulary.REVERSED.get(sign, sign) for sign in signs[::-1]]
    sides = tuple(map(_parse_tokens, parts))
    names = [join_tokens(part) for part in parts if _is_name(part)]
    values = tuple(side for side, part in zip(sides, parts, strict=True) if not _is_name(part))
    return Relation(tuple(signs), sides, names[0] if names else "", values or sides[1:] if names else ())


def _parse_enclosed(tokens: Tokens) -> Shape | None:
    """Return the shape of tokens that are enclosed in one pair of brackets, or None."""
    opening, inner, closing = tokens[0], tokens[1:-1], tokens[-1]
    if not inner or len(list(_outside_brackets(tokens))) > 2:
        return None
    if opening.startswith(r"\begin{"):
        if opening[7:-1] not in vocabulary.MATRICES:
            return None
        rows = [_split(row, lambda token: token == "&") for row in _split(inner, lambda token: token == r"\\")]
        return Matrix(tuple(tuple(map(_parse_tokens, row)) for row in rows))
    parts = _split(inner, lambda token: token in (",", ";"))
    if opening == r"\{":
        return _parse_several(parts)
    if len(parts) > 1:
        return Ordered(opening + closing, tuple(map(_parse_tokens, parts)))
    if opening + closing == "()" or inner[0].startswith(r"\begin{"):
        return _parse_tokens(inner)
    return None


def _parse_value(tokens: Tokens) -> Shape:
    """Return a value and its unit; words, if prose is left."""
    rest, unit, scale = _split_unit(tokens)
    if rest[:1] == ["+"]:
        rest = rest[1:]
    if not rest or any(map(is_word, rest)):
        plain = join_tokens(tokens).replace(r"\text", "").lower()
        return Words("".join(letter for letter in plain if letter not in "{}.' "))
    return Value(join_tokens(rest), unit, scale)


def _split_unit(tokens: Tokens) -> tuple[Tokens, str, int]:
    """Return the tokens without the unit, the first known unit with its exponent, and the scale of "million" etc."""
    end = len(tokens) - 4 if tokens[-4:-2] == ["^", "{"] else len(tokens)  # square inches
    if end < 2 or not is_word(tokens[end - 1]):
        return *_split_unit_sign(tokens), 1
    words = unwrap_word(tokens[end - 1]).lower().split()
    rest, sign = _split_unit_sign(tokens[: end - 1])
    if not _is_unit(words, rest) or (end > 2 and all(token.isalpha() for token in tokens[: end - 1])):
        return tokens, "", 1
    named = words[: words.index("per")] if "per" in words else words
    unit = next((vocabulary.CANONICAL_UNITS[word] for word in named if word in vocabulary.CANONICAL_UNITS), "")
    dimension = next((vocabulary.DIMENSIONS[word] for word in named if word in vocabulary.DIMENSIONS), "")
    exponent = (tokens[-2] if end < len(tokens) else "") or dimension
    if unit and exponent:
        unit = f"{unit}^{exponent}"
    return rest, unit or sign, vocabulary.SCALES.get(words[0], 1)


def _is_unit(words: list[str], value: Tokens) -> bool:
    """Return whether words may be a unit: `18 eggs`, `18 feet squared`, `1 egg`, but not `18 squared`."""
    if words[-1] in vocabulary.DIMENSIONS and words[-2:-1] and words[-2] in vocabulary.CANONICAL_UNITS:
        words = words[:-1]
    if len(words) > vocabulary.MAX_UNIT_WORDS or vocabulary.NOT_UNITS.intersection(words):
        return False
    number = parse_number(join_tokens(value))
    if number is not None and abs(number.value) <= 1:
        return True
    plurals = [word for word in words if len(word) > 2 and word.endswith("s") and not word.endswith("ss")]
    return bool(plurals) or any(word in vocabulary.KNOWN_UNITS or word == "per" for word in words)


def _split_unit_sign(tokens: Tokens) -> tuple[Tokens, str]:
    """Return the tokens without a currency, percent or degree sign, and the unit of that sign."""
    front = 1 if tokens[0] == "-" else 0
    name = unwrap_word(tokens[front]).lower() if len(tokens) > front + 1 and is_word(tokens[front]) else ""
    if name in vocabulary.CURRENCIES:
        rest, sign = _split_unit_sign(tokens[:front] + tokens[front + 1 :])
        return rest, sign or vocabulary.CANONICAL_UNITS.get(name, "")
    if r"\$" in tokens[:2] or tokens[-1] == r"\$":
        return [token for token in tokens if token != r"\$"], "dollar"
    if tokens[-1] == r"\%":
        return tokens[:-1], "%"
    if len(tokens) > 2 and tokens[-2] == r"\degree" and tokens[-1] in vocabulary.TEMPERATURES:
        return tokens[:-2], vocabulary.TEMPERATURES[tokens[-1]]
    if tokens[-1] == r"\degree" and not any(token in vocabulary.FUNCTIONS for token in tokens):
        return tokens[:-1], "degree"
    return tokens, ""


def _is_name(tokens: Tokens) -> bool:
    """Return whether a side only names the other: `x`, `f(2)`, `A_1`, `\\angle ABC`, `(x, y)`, but not `2x`."""
    outside = list(_outside_brackets(tokens))
    digits = [token for token in (tokens if tokens[0] == "(" else outside) if token.lstrip(".")[:1].isdigit()]
    return not digits and not any(token in vocabulary.OPERATORS for token in outside)


def _split(tokens: Tokens, separates: Callable[[str], bool]) -> list[Tokens]:
    """Return the non-empty parts between separators outside of brackets."""
    parts: list[Tokens] = [[]]
    for token, depth in _with_depth(tokens):
        if depth == 0 and separates(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _outside_brackets(tokens: Tokens) -> Iterator[str]:
    """Yield the tokens outside of brackets, and the brackets."""
    return (token for token, depth in _with_depth(tokens) if depth == 0)


def _with_depth(tokens: Tokens) -> Iterator[tuple[str, int]]:
    """Yield each token with the number of brackets around it. Raises `Unreadable` if brackets do not match."""
    depth = 0
    for token in tokens:
        closes = token in vocabulary.CLOSING or token.startswith(r"\end{")
        depth -= closes
        if not 0 <= depth <= MAX_NESTING:
            raise Unreadable("brackets that are not opened, or nested too deeply")
        yield token, depth
        depth += token in vocabulary.OPENING or token.startswith(r"\begin{")
    if depth:
        raise Unreadable("a bracket that is not closed")


def _is_connective(token: str, *words: str) -> bool:
    return is_word(token) and unwrap_word(token).lower() in words
