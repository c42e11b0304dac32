r"""Numbers as people write them, exactly: `1,234.50`, `-3\frac{1}{2}`, `1/3`, `0.1\overline{6}`, `0.333\ldots`,
`6.02 \cdot 10^{23}`.

Two numbers are the same if their values are. A decimal may also be a value rounded or truncated at its last place, if
the relative difference is at most `MAX_ROUNDING_ERROR`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ROUNDING_ERROR = Fraction(1, 10**6)
MAX_DIGITS = 400
"""Digits of a number, and the largest power of ten, that are parsed."""

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_SIGN = r"[+-]?"
_DECIMAL_NUMBER = re.compile(rf"({_SIGN})({_DECIMAL})(?:\\overline\{{(\d+)\}})?")
_REPEATING = re.compile(rf"({_SIGN})(\d+\.\d*?)(\d)\3\3+\\ldots")
_POWER_OF_TEN = re.compile(rf"({_SIGN}{_DECIMAL})(?:[eE]({_SIGN}\d+)|\\cdot10\^\{{({_SIGN}\d+)\}})")
_FRACTION = re.compile(
    rf"({_SIGN})(\d+(?=\\frac| ))? ?"
    rf"(?:\\frac\{{({_SIGN}{_DECIMAL})\}}\{{({_SIGN}{_DECIMAL})\}}|({_DECIMAL})/({_SIGN}{_DECIMAL}))"
)


@dataclass(frozen=True)
class Number:
    """An exact value, and the number of decimals with which it was written."""

    value: Fraction
    places: int | None = None
    """Number of decimals; None for an exact number, such as an integer."""

    def times(self, factor: int | Fraction) -> Number:
        return Number(self.value * factor, self.places)


def parse_number(latex: str) -> Number | None:
    """Return the number that a text in the spelling of `join_tokens` is, or None if it is not a number."""
    if len(latex) > MAX_DIGITS:
        return None
    if match := _DECIMAL_NUMBER.fullmatch(latex) or _REPEATING.fullmatch(latex):
        return _parse_decimal(*match.groups())
    if match := _POWER_OF_TEN.fullmatch(latex):
        digits, exponent = match[1], int(match[2] or match[3])
        if abs(exponent) > MAX_DIGITS:
            return None
        places = len(digits.partition(".")[2])
        return Number(Fraction(digits.rstrip(".")) * Fraction(10) ** exponent, places - exponent if places else None)
    if match := _FRACTION.fullmatch(latex):
        return _parse_fraction(match)
    return None


def is_same_number(gold: Number, answer: Number, tolerance: float | None = None) -> bool:
    """Return whether two numbers are the same within a relative `tolerance`; without one, up to rounding."""
    difference = abs(gold.value - answer.value)
    if tolerance is not None:
        return difference <= Fraction(tolerance) * abs(gold.value)
    places = [number.places for number in (gold, answer) if number.places is not None]
    if not places or not difference:
        return not difference
    return difference <= MAX_ROUNDING_ERROR * abs(gold.value) and difference < Fraction(10) ** -min(places)


def _parse_decimal(sign: str, digits: str, repeating: str | None) -> Number | None:
    places = len(digits.partition(".")[2])
    value = Fraction(digits.rstrip("."))
    if repeating and "." not in digits:
        return None
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**places)
    return Number(-value if sign == "-" else value, None if repeating else places or None)


def _parse_fraction(match: re.Match[str]) -> Number | None:
    sign, whole, *parts = match.groups()
    top, bottom = (Fraction(part.rstrip(".")) for part in parts if part is not None)
    if not bottom or (whole and (top < 0 or bottom < 0)):
        return None
    value = Fraction(whole or 0) + top / bottom
    return Number(-value if sign == "-" else value)
