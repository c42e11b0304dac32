r"""Numbers as people write them, exactly: `1,234.50`, `-3\frac{1}{2}`, `1/3`, `0.1\overline{6}`, `0.333\ldots`,
`6.02 \cdot 10^{23}`.

Two of them are the same if their values are. A decimal may also stand for a value that was rounded or cut off at its
last place, if the relative difference is no more than `ROUNDING`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

ROUNDING = Fraction(1, 10**6)
MOST_DIGITS = 400
"""Of a number and of a power of ten; longer ones are not read."""

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_SIGN = r"[+-]?"
_WRITTEN_OUT = re.compile(rf"({_SIGN})({_DECIMAL})(?:\\overline\{{(\d+)\}})?")
_GOES_ON = re.compile(rf"({_SIGN})(\d+\.\d*?)(\d)\3\3+\\ldots")
_POWER_OF_TEN = re.compile(rf"({_SIGN}{_DECIMAL})(?:[eE]({_SIGN}\d+)|\\cdot10\^\{{({_SIGN}\d+)\}})")
_FRACTION = re.compile(
    rf"({_SIGN})(\d+(?=\\frac| ))? ?"
    rf"(?:\\frac\{{({_SIGN}{_DECIMAL})\}}\{{({_SIGN}{_DECIMAL})\}}|({_DECIMAL})/({_SIGN}{_DECIMAL}))"
)


@dataclass(frozen=True)
class Number:
    value: Fraction
    places: int | None = None
    """How many decimals are written; None for what is exact, as all integers are."""

    def times(self, factor: int | Fraction) -> Number:
        return Number(self.value * factor, self.places)


def number_of(latex: str) -> Number | None:
    """The number that a text in the spelling of `latex_of` is, if it is nothing else."""
    if len(latex) > MOST_DIGITS:
        return None
    if match := _WRITTEN_OUT.fullmatch(latex):
        return _written_out(*match.groups())
    if match := _GOES_ON.fullmatch(latex):
        return _written_out(*match.groups())
    if match := _POWER_OF_TEN.fullmatch(latex):
        return _power_of_ten(match[1], int(match[2] or match[3]))
    if match := _FRACTION.fullmatch(latex):
        return _fraction(match)
    return None


def same_number(gold: Number, answer: Number, tolerance: float | None = None) -> bool:
    """With a tolerance, whatever is so close; without, what is equal but for rounding."""
    difference = abs(gold.value - answer.value)
    if tolerance is not None:
        return difference <= Fraction(tolerance) * abs(gold.value)
    places = [number.places for number in (gold, answer) if number.places is not None]
    if not places or not difference:
        return not difference
    return difference <= ROUNDING * abs(gold.value) and difference < Fraction(10) ** -min(places)


def _written_out(sign: str, digits: str, repeating: str | None) -> Number | None:
    places = len(digits.partition(".")[2])
    value = Fraction(digits.rstrip("."))
    if repeating and "." not in digits:
        return None
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**places)
    return Number(-value if sign == "-" else value, None if repeating else places or None)


def _power_of_ten(digits: str, exponent: int) -> Number | None:
    if abs(exponent) > MOST_DIGITS:
        return None
    places = len(digits.partition(".")[2])
    return Number(Fraction(digits.rstrip(".")) * Fraction(10) ** exponent, places - exponent if places else None)


def _fraction(match: re.Match[str]) -> Number | None:
    sign, whole, *parts = match.groups()
    top, bottom = (Fraction(part.rstrip(".")) for part in parts if part is not None)
    if not bottom or (whole and (top < 0 or bottom < 0)):
        return None
    value = Fraction(whole or 0) + top / bottom
    return Number(-value if sign == "-" else value)
