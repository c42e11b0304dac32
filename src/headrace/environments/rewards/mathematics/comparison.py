r"""Comparison of an answer with the gold one: the rules for shapes that consist of single values.

Both must have the same kind of shape with the same number of parts. Names and units may be missing, but not different:
`x = 5` and `5` are the same, `x = 5` and `y = 5` are not. A judge compares single values; its verdict is None where it
cannot decide. `Numbers` is the judge without algebra; `algebra.py` has the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from headrace.environments.rewards.mathematics.numbers import Number, number_of, same_number
from headrace.environments.rewards.mathematics.shapes import (
    Matrix,
    Ordered,
    Relation,
    Several,
    Shape,
    Value,
    Words,
    interval_of,
)

MAX_ITEMS = 100
"""Longer lists are not compared."""
PERCENT = Fraction(1, 100)
_CHOICE = re.compile(r"\(([A-Z])\)(.+)")
_IN_BASE = re.compile(r"(-?)\(?([0-9][0-9A-Z]*(?:\.[0-9A-Z]+)?)\)?(?:_\{(\d+)\})?")


def same(gold: Shape, answer: Shape, judge: Numbers) -> bool | None:
    """Return whether an answer is the gold one; the rules for missing names and units differ between the two."""
    match gold, answer:
        case Relation(), Relation():
            return _same_relations(gold, answer, judge)
        case Relation(), _ if gold.is_equation:
            values = gold.sides if all(map(is_number, gold.sides)) else gold.values
            return same(values[-1], answer, judge) if values else False
        case _, Relation() if answer.is_equation:
            return _all(same(gold, side, judge) for side in answer.values or answer.sides)
        case Relation(), Ordered():
            return (interval := interval_of(gold)) is not None and same(interval, answer, judge)
        case Ordered(), Relation():
            return (interval := interval_of(answer)) is not None and same(interval, gold, judge)
        case Several(), Several():
            return _same_items(gold.items, answer.items, judge)
        case Ordered(), Ordered():
            return gold.brackets == answer.brackets and _same_in_order(gold.items, answer.items, judge)
        case Matrix(), Matrix():
            if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
                return False
            return _all(_same_in_order(*rows, judge) for rows in zip(gold.rows, answer.rows, strict=True))
        case Value(), Value():
            return judge.values(gold, answer)
        case ((Words() | Value()), (Words() | Value())):
            return _plain(gold) == _plain(answer)
    return False


class Numbers:
    """The judge of two values, or of two equations, by numbers and spelling: None where these do not decide."""

    def __init__(self, tolerance: float | None = None) -> None:
        self._tolerance = tolerance

    def values(self, gold: Value, answer: Value) -> bool | None:
        if gold.unit and answer.unit and gold.unit != answer.unit:
            return False
        number, other = _number(gold), _number(answer)
        if number and other:
            return any(same_number(*pair, self._tolerance) for pair in _readings(number, other, gold.unit, answer.unit))
        if (gold.latex, gold.scale) == (answer.latex, answer.scale):
            return True
        if (choice := _CHOICE.fullmatch(answer.latex)) and len(gold.latex) == 1 and number_of(choice[2]):
            return gold.latex == choice[1]
        first, second = _IN_BASE.fullmatch(gold.latex), _IN_BASE.fullmatch(answer.latex)
        if first and second and "_" in gold.latex + answer.latex and gold.unit == answer.unit:
            base = first[3] or "10"  # which an answer may leave out: the question states it
            same_base = base == (second[3] or base)
            return same_base and first[1] + first[2].lstrip("0") == second[1] + second[2].lstrip("0")
        plain = [len(gold.latex) == 1 or number is not None, len(answer.latex) == 1 or other is not None]
        return False if all(plain) else None

    def equations(self, gold: Relation, answer: Relation) -> bool | None:
        return None


def is_number(shape: Shape) -> bool:
    return isinstance(shape, Value) and number_of(shape.latex) is not None


def _number(value: Value) -> Number | None:
    number = number_of(value.latex)
    return None if number is None else number.times(value.scale)


def _readings(gold: Number, answer: Number, unit: str, answer_unit: str) -> list[tuple[Number, Number]]:
    """Return the pairs of numbers to compare: a percent sign is a unit that may be missing, or a hundredth.

    A gold percentage may be answered in both ways. A percentage that answers a plain number can be right in one of them
    only, depending on the gold number: below one it is a hundredth, above one a unit, and 1 is ambiguous.
    """
    if (unit == "%") == (answer_unit == "%"):
        return [(gold, answer)]
    if unit == "%":
        return [(gold, answer), (gold.times(PERCENT), answer)]
    if abs(gold.value) == 1:
        return []
    return [(gold, answer.times(PERCENT) if abs(gold.value) < 1 else answer)]


def _same_relations(gold: Relation, answer: Relation, judge: Numbers) -> bool | None:
    if gold.signs == answer.signs and _same_in_order(gold.sides, answer.sides, Numbers()):
        return True
    if gold.is_equation and answer.is_equation:
        if gold.name and gold.name == answer.name:
            return _all(same(gold.values[-1], value, judge) for value in answer.values)
        return judge.equations(gold, answer)
    return gold.signs == answer.signs and _same_in_order(gold.sides, answer.sides, judge)


def _same_in_order(gold: Sequence[Shape], answer: Sequence[Shape], judge: Numbers) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(same(one, other, judge) for one, other in zip(gold, answer, strict=True))


def _same_items(gold: Sequence[Shape], answer: Sequence[Shape], judge: Numbers) -> bool | None:
    """Match each gold item with an item of the answer. Names that distinguish the gold items are required."""
    if len(gold) != len(answer) or len(gold) > MAX_ITEMS:
        return False
    names = [item.name if isinstance(item, Relation) else "" for item in gold]
    if len(set(names)) > 1 and sorted(names) != sorted(i.name if isinstance(i, Relation) else "" for i in answer):
        return False
    left = list(answer)
    unknown = 0
    for item in gold:
        verdicts = [same(item, other, judge) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            unknown += 1
        else:
            return False
    return None if unknown else True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False if one is, else None if one is, else True."""
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _plain(shape: Value | Words) -> str:
    return shape.text if isinstance(shape, Words) else shape.latex.lower()
