r"""Comparison of an answer with the gold one: the rules for shapes that consist of single values.

Both must have the same kind of shape with the same number of parts. Names and units may be missing, but not different:
`x = 5` and `5` are the same, `x = 5` and `y = 5` are not. A comparer decides about single values, or returns None where
it cannot. `NumberComparer` has no algebra; `algebra.py` has the other one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from headrace.environments.rewards.mathematics.numbers import Number, is_same_number, parse_number
from headrace.environments.rewards.mathematics.shapes import (
    Matrix,
    Ordered,
    Relation,
    Several,
    Shape,
    Value,
    Words,
    as_interval,
)

MAX_ITEMS = 100
"""Longer lists are not compared."""
PERCENT = Fraction(1, 100)
_CHOICE = re.compile(r"\(([A-Z])\)(.+)")
_IN_BASE = re.compile(r"(-?)\(?([0-9][0-9A-Z]*(?:\.[0-9A-Z]+)?)\)?(?:_\{(\d+)\})?")


def compare(gold: Shape, answer: Shape, comparer: NumberComparer) -> bool | None:
    """Return whether an answer equals the gold one; None if undecided.

    The order of the two matters: the rules for missing names and units differ.
    """
    match gold, answer:
        case Relation(), Relation():
            return _compare_relations(gold, answer, comparer)
        case Relation(), _ if gold.is_equation:
            values = gold.sides if all(map(is_number, gold.sides)) else gold.values
            return compare(values[-1], answer, comparer) if values else False
        case _, Relation() if answer.is_equation:
            return _combine_verdicts(compare(gold, side, comparer) for side in answer.values or answer.sides)
        case Relation(), Ordered():
            return (interval := as_interval(gold)) is not None and compare(interval, answer, comparer)
        case Ordered(), Relation():
            return (interval := as_interval(answer)) is not None and compare(interval, gold, comparer)
        case Several(), Several():
            return _compare_items(gold.items, answer.items, comparer)
        case Ordered(), Ordered():
            return gold.brackets == answer.brackets and _compare_in_order(gold.items, answer.items, comparer)
        case Matrix(), Matrix():
            if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
                return False
            pairs = zip(gold.rows, answer.rows, strict=True)
            return _combine_verdicts(_compare_in_order(*rows, comparer) for rows in pairs)
        case Value(), Value():
            return comparer.compare_values(gold, answer)
        case ((Words() | Value()), (Words() | Value())):
            return _plain_text(gold) == _plain_text(answer)
    return False


class NumberComparer:
    """Compares two values, or two equations, by numbers and spelling; returns None where these do not decide."""

    def __init__(self, tolerance: float | None = None) -> None:
        self._tolerance = tolerance

    def compare_values(self, gold: Value, answer: Value) -> bool | None:
        if gold.unit and answer.unit and gold.unit != answer.unit:
            return False
        number, other = _scaled_number(gold), _scaled_number(answer)
        if number and other:
            pairs = _percent_readings(number, other, gold.unit, answer.unit)
            return any(is_same_number(*pair, self._tolerance) for pair in pairs)
        if (gold.latex, gold.scale) == (answer.latex, answer.scale):
            return True
        if (choice := _CHOICE.fullmatch(answer.latex)) and len(gold.latex) == 1 and parse_number(choice[2]):
            return gold.latex == choice[1]
        first, second = _IN_BASE.fullmatch(gold.latex), _IN_BASE.fullmatch(answer.latex)
        if first and second and "_" in gold.latex + answer.latex and gold.unit == answer.unit:
            base = first[3] or "10"  # an answer may leave out the base: the question states it
            same_base = base == (second[3] or base)
            return same_base and first[1] + first[2].lstrip("0") == second[1] + second[2].lstrip("0")
        plain = [len(gold.latex) == 1 or number is not None, len(answer.latex) == 1 or other is not None]
        return False if all(plain) else None

    def compare_equations(self, gold: Relation, answer: Relation) -> bool | None:
        return None


def is_number(shape: Shape) -> bool:
    return isinstance(shape, Value) and parse_number(shape.latex) is not None


def _scaled_number(value: Value) -> Number | None:
    number = parse_number(value.latex)
    return None if number is None else number.times(value.scale)


def _percent_readings(gold: Number, answer: Number, unit: str, answer_unit: str) -> list[tuple[Number, Number]]:
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


def _compare_relations(gold: Relation, answer: Relation, comparer: NumberComparer) -> bool | None:
    if gold.signs == answer.signs and _compare_in_order(gold.sides, answer.sides, NumberComparer()):
        return True
    if gold.is_equation and answer.is_equation:
        if gold.name and gold.name == answer.name:
            return _combine_verdicts(compare(gold.values[-1], value, comparer) for value in answer.values)
        return comparer.compare_equations(gold, answer)
    return gold.signs == answer.signs and _compare_in_order(gold.sides, answer.sides, comparer)


def _compare_in_order(gold: Sequence[Shape], answer: Sequence[Shape], comparer: NumberComparer) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _combine_verdicts(compare(one, other, comparer) for one, other in zip(gold, answer, strict=True))


def _compare_items(gold: Sequence[Shape], answer: Sequence[Shape], comparer: NumberComparer) -> bool | None:
    """Match each gold item with an item of the answer. Names that distinguish the gold items are required."""
    if len(gold) != len(answer) or len(gold) > MAX_ITEMS:
        return False
    names = [item.name if isinstance(item, Relation) else "" for item in gold]
    if len(set(names)) > 1 and sorted(names) != sorted(i.name if isinstance(i, Relation) else "" for i in answer):
        return False
    left = list(answer)
    unknown = 0
    for item in gold:
        verdicts = [compare(item, other, comparer) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            unknown += 1
        else:
            return False
    return None if unknown else True


def _combine_verdicts(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False if any verdict is False, else None if any is None, else True."""
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _plain_text(shape: Value | Words) -> str:
    return shape.text if isinstance(shape, Words) else shape.latex.lower()
