r"""Comparison of two expressions by algebra; runs in a sandbox process.

math-verify's parser reads the LaTeX. Where both sides have values they are compared to 40 digits at several points:
that is faster than simplifying, and refuses what math-verify would accept (5 5 for 10, 2(13) for 15, 25_8 for 25_9,
cos 13 for the cosine of 13 degrees, A for a). `math_verify.verify`, gold first, decides about the rest.

Unlike elsewhere, the heavy imports are at the top: only sandbox processes import this module, and the time limit of a
call does not include imports. math-verify's timers are off: the caller has one, and theirs need the main thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from sympy.core.function import AppliedUndef

from headrace.environments.rewards.mathematics.comparison import NumberComparer, compare
from headrace.environments.rewards.mathematics.numbers import MAX_ROUNDING_ERROR, parse_number
from headrace.environments.rewards.mathematics.shapes import Relation, Value, has_variables, parse_shape
from headrace.environments.rewards.mathematics.vocabulary import FUNCTIONS

DIGITS = 40
"""Digits to which two values must agree."""
WORKING_DIGITS = 100
"""Precision of the computation; twice as many digits distinguish zero from a small number."""
RANGES = (*((0.1, 6), (-6, 6)) * 4, (6, 40), (-40, -6), (40, 200), (-200, -40))
"""Ranges of the points at which expressions with variables are compared: half positive, for roots and logarithms."""
MIN_POINTS = 4
"""Points at which both sides must have a value."""
MAX_INTEGER_DIGITS = 4000
"""Longer integers are rounded."""
TINY = mpmath.mpf(10) ** -DIGITS
ROUNDING_ERROR = mpmath.mpf(MAX_ROUNDING_ERROR.numerator) / MAX_ROUNDING_ERROR.denominator
IMAGINARY = "i"
"""The imaginary unit, which is not a variable."""
_FUNCTION = re.compile("|".join(map(re.escape, sorted(FUNCTIONS))))
_EXACT_NAMES = ConversionConfig(lowercase_symbols=False)
_NOT_ALGEBRA = re.compile(r"\\(?:text|mathbb|mathcal|ldots|emptyset|%|\$|&|\\)|[&:'=<>]|\d \.?\d|\d_|\)_|\d+\.\d+\.")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\\degree")
_BEFORE_A_VALUE = re.compile(r"(?:[-+/(\[{^]|\\cdot|\\lvert)\s*$")
_PRODUCT = re.compile(
    r"(?<=\d)(?=\(|\\binom|\\lvert)|(?<=rvert )(?=[(\da-zA-Z]|\\lvert)"
    r"|(?<=\))(?=[(\da-zA-Z\\])(?!\\(?:cdot|rvert|[,;]))"
)
"""Positions of implicit products. The parser reads an integer before a rational as a mixed number: 2(13) as 15."""

Expression = Any
"""A sympy expression."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off


def same_answer(gold: str, answer: str) -> bool:
    """Return whether an answer equals the gold one, by algebra where nothing simpler decides. Raises `Unreadable`."""
    return bool(compare(parse_shape(gold), parse_shape(answer, has_variables(gold)), AlgebraComparer()))


class AlgebraComparer(NumberComparer):
    """Compares values and equations by algebra; what it cannot parse is not equal."""

    def compare_values(self, gold: Value, answer: Value) -> bool:
        verdict = super().compare_values(gold, answer)
        if verdict is not None or gold.scale != answer.scale:
            return bool(verdict)
        pair = _parse_all(gold.latex, answer.latex)
        if pair is None:
            return False
        numbers = [parse_number(value.latex) for value in (gold, answer)]
        places = [number.places for number in numbers if number is not None and number.places is not None]
        last_place = mpmath.mpf(10) ** -max(places) if places else mpmath.inf  # decimals may be rounded to it
        verdict = _compare_values(pair[0], pair[1], last_place)
        return bool(verify(*pair, timeout_seconds=None)) if verdict is None else verdict

    def compare_equations(self, gold: Relation, answer: Relation) -> bool:
        """Return whether the differences of both sides are the same up to a constant factor."""
        sides = [*gold.sides, *answer.sides]
        if len(sides) != 4 or not all(isinstance(side, Value) for side in sides):
            return False
        parsed = _parse_all(*(side.latex for side in sides if isinstance(side, Value)))
        if parsed is None or any(expression.has(AppliedUndef) for expression in parsed):
            return False
        with mpmath.workdps(WORKING_DIGITS):  # the ratio is the same at all points; zeros are skipped
            pairs = _evaluate_at_points(parsed[0] - parsed[1], parsed[2] - parsed[3])
            ratios = [one / other for one, other in pairs if one and other]
            return len(ratios) >= MIN_POINTS and all(_values_agree(ratio, ratios[0]) for ratio in ratios)


def _parse_all(*texts: str) -> list[Expression] | None:
    """Return the parsed expressions; None if one of them cannot be parsed."""
    if any(map(_NOT_ALGEBRA.search, texts)):
        return None
    try:
        expressions = [_parse(text) for text in texts]
    except RecursionError:
        raise
    except Exception:  # the parser raises various errors for unknown input
        return None
    defined = (isinstance(each, sympy.Expr) and not each.has(sympy.zoo, sympy.nan) for each in expressions)
    return expressions if all(defined) else None


@lru_cache(maxsize=256)  # the answers of a group share their gold answer
def _parse(text: str) -> Expression:
    if _FUNCTION.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _PRODUCT.sub(r"\\cdot ", _pair_bars(text.replace(r"\degree", "")))
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_EXACT_NAMES).doit()


def _pair_bars(text: str) -> str:
    """Return absolute values with opening and closing bars: a bar opens after a sign, or where none is open."""
    pieces = text.split("|")
    written, opened = pieces[0], 0
    for piece in pieces[1:]:
        opens = not opened or _BEFORE_A_VALUE.search(written) is not None
        opened += 1 if opens else -1
        written += (r"\lvert " if opens else r"\rvert ") + piece
    return written


def _compare_values(gold: Expression, answer: Expression, last_place: Any) -> bool | None:
    """Compare the values of two expressions; None if too few points have values."""
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)  # exact, whatever their size
    if gold.has(AppliedUndef) or answer.has(AppliedUndef):
        return None  # lambdify must not call a function by a name from the model
    rounding = last_place if gold.has(sympy.Float) or answer.has(sympy.Float) else None
    with mpmath.workdps(WORKING_DIGITS):
        verdicts = [_values_agree(one, other, rounding) for one, other in _evaluate_at_points(gold, answer)]
    if False in verdicts:
        return False
    return True if verdicts.count(True) >= min(MIN_POINTS, len(verdicts)) else None


def _values_agree(gold: Any, answer: Any, rounding: Any = None) -> bool | None:
    """Return whether two values agree, up to `rounding`; None if one is missing."""
    if gold is None or answer is None:
        return None
    allowed = TINY * abs(gold) if rounding is None else min(ROUNDING_ERROR * abs(gold), rounding)
    return bool(abs(gold - answer) <= allowed)


def _evaluate_at_points(gold: Expression, answer: Expression) -> list[tuple[Any, Any]]:
    """Return the values of both expressions at each point, or at one point if there are no variables.

    A value is None where it is undefined, and both are where neither is real.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    functions = [sympy.lambdify(symbols, _round_long_integers(expression), "mpmath") for expression in (gold, answer)]
    variables = [symbol for symbol in symbols if str(symbol) != IMAGINARY]
    pairs = []
    random = Random(0)
    for span in RANGES if variables else RANGES[:1]:
        point = [mpmath.mpf(random.uniform(*span)) if symbol in variables else mpmath.j for symbol in symbols]
        one, other = (_evaluate(function, point) for function in functions)
        outside = variables == symbols != [] and None not in (one, other) and mpmath.im(one) and mpmath.im(other)
        pairs.append((None, None) if outside else (one, other))
    return pairs


def _round_long_integers(expression: Expression) -> Expression:
    """Round the numbers that are too long to be written into a function."""
    limit = 10**MAX_INTEGER_DIGITS
    long = (number for number in expression.atoms(sympy.Rational) if max(abs(number.p), number.q) > limit)
    return expression.xreplace({number: sympy.Float(number, 2 * WORKING_DIGITS) for number in long})


def _evaluate(function: Callable[..., Any], point: Sequence[Any]) -> Any:
    """Return the value at a point, None if it is undefined; a zero that is hidden by rounding is zero."""
    try:
        value = +mpmath.mpmathify(function(*point))
        if abs(value) < TINY:
            with mpmath.workdps(2 * WORKING_DIGITS):
                closer = +mpmath.mpmathify(function(*point))
            value = mpmath.mpf(0) if abs(closer) < TINY * abs(value) else closer
    except (ArithmeticError, ValueError, NameError, TypeError):  # undefined there, or without numerical values
        return None
    if not mpmath.isfinite(value):
        return None
    return mpmath.re(value) if abs(mpmath.im(value)) <= TINY * abs(value) else value
