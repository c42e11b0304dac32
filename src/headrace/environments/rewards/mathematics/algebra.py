r"""Whether two expressions are the same, by algebra: what runs in a process of its own.

math-verify's parser reads the LaTeX. Where both sides have values these decide, to 40 digits and at several places:
that is quicker than simplifying, and refuses what math-verify would let pass (it takes 5 5 for 10, 2(13) for 15, 25_8
for 25_9, cos 13 for the cosine of 13 degrees, A for a). `math_verify.verify`, gold first, decides what has no values.

Unlike elsewhere, the heavy imports are at the top: only a process that does nothing else imports this, and the time of
a call is its own. math-verify's timers are off: the caller has one, and theirs work in main threads alone.
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

from headrace.environments.rewards.mathematics.comparison import Numbers, same
from headrace.environments.rewards.mathematics.numbers import ROUNDING, number_of
from headrace.environments.rewards.mathematics.shapes import Relation, Value, has_variables, shape_of
from headrace.environments.rewards.mathematics.vocabulary import FUNCTIONS

DIGITS = 40
"""To which two values must agree."""
WORKING = 100
"""Digits that are computed with; twice as many tell a zero from a small number."""
RANGES = (*((0.1, 6), (-6, 6)) * 4, (6, 40), (-40, -6), (40, 200), (-200, -40))
"""Of the places where expressions with variables are compared: half positive, for roots and logarithms."""
ENOUGH = 4
"""At so many of them both sides must have a value."""
LONG = 4000
"""Digits of an integer that is rather rounded than written out."""
TINY = mpmath.mpf(10) ** -DIGITS
ROUNDING_ERROR = mpmath.mpf(ROUNDING.numerator) / ROUNDING.denominator
IMAGINARY = "i"
"""The variable that is a number."""
_FUNCTION = re.compile("|".join(map(re.escape, sorted(FUNCTIONS))))
_EXACT_NAMES = ConversionConfig(lowercase_symbols=False)
_NOT_ALGEBRA = re.compile(r"\\(?:text|mathbb|mathcal|ldots|emptyset|%|\$|&|\\)|[&:'=<>]|\d \.?\d|\d_|\)_|\d+\.\d+\.")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z])\\degree")
_BEFORE_A_VALUE = re.compile(r"(?:[-+/(\[{^]|\\cdot|\\lvert)\s*$")
_PRODUCT = re.compile(
    r"(?<=\d)(?=\(|\\binom|\\lvert)|(?<=rvert )(?=[(\da-zA-Z]|\\lvert)"
    r"|(?<=\))(?=[(\da-zA-Z\\])(?!\\(?:cdot|rvert|[,;]))"
)
"""Where one is not written. The parser takes an integer before a rational for a mixed number: 2(13) would be 15."""

Expression = Any
"""One of sympy's."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timers are off


def same_answer(gold: str, answer: str) -> bool:
    """The whole comparison, with algebra where nothing less decides. Raises `Unreadable`."""
    return bool(same(shape_of(gold), shape_of(answer, has_variables(gold)), Algebra()))


class Algebra(Numbers):
    """The judge of all values and equations that can be parsed; the others are not the same."""

    def values(self, gold: Value, answer: Value) -> bool:
        verdict = super().values(gold, answer)
        if verdict is not None or gold.scale != answer.scale:
            return bool(verdict)
        pair = _parsed(gold.latex, answer.latex)
        if pair is None:
            return False
        verdict = _same_values(pair[0], pair[1], _last_place(gold.latex, answer.latex))
        return bool(verify(*pair, timeout_seconds=None)) if verdict is None else verdict

    def equations(self, gold: Relation, answer: Relation) -> bool:
        """Whether what must vanish is the same but for a constant factor."""
        sides = [*gold.sides, *answer.sides]
        if len(sides) != 4 or not all(isinstance(side, Value) for side in sides):
            return False
        parsed = _parsed(*(side.latex for side in sides if isinstance(side, Value)))
        if parsed is None or any(expression.has(AppliedUndef) for expression in parsed):
            return False
        return _proportional(parsed[0] - parsed[1], parsed[2] - parsed[3])


def _parsed(*texts: str) -> list[Expression] | None:
    """None if one of them is not algebra."""
    if any(map(_NOT_ALGEBRA.search, texts)):
        return None
    try:
        expressions = [_parse(text) for text in texts]
    except RecursionError:
        raise
    except Exception:  # the parser's own, for whatever it does not know
        return None
    return expressions if all(map(_is_defined, expressions)) else None


def _is_defined(expression: Expression) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.has(sympy.zoo, sympy.nan)


@lru_cache(maxsize=256)  # the answers of a group share their gold one
def _parse(text: str) -> Expression:
    if _FUNCTION.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _PRODUCT.sub(r"\\cdot ", _with_bars(text.replace(r"\degree", "")))
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_EXACT_NAMES).doit()


def _with_bars(text: str) -> str:
    """Absolute values with the bars that say which one opens: after a sign, or where none is open."""
    pieces = text.split("|")
    written, opened = pieces[0], 0
    for piece in pieces[1:]:
        opens = not opened or _BEFORE_A_VALUE.search(written) is not None
        opened += 1 if opens else -1
        written += (r"\lvert " if opens else r"\rvert ") + piece
    return written


def _last_place(*texts: str) -> Any:
    """By how much a decimal may differ from what it stands for; endless if there is none, or one in an expression."""
    numbers = [number for number in map(number_of, texts) if number is not None and number.places is not None]
    return min((mpmath.mpf(10) ** -(number.places or 0) for number in numbers), default=mpmath.inf)


def _same_values(gold: Expression, answer: Expression, last_place: Any) -> bool | None:
    """Wherever both have one. None if that is nowhere, or hardly anywhere."""
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)  # of any size
    if gold.has(AppliedUndef) or answer.has(AppliedUndef):
        return None  # and must not be called by the name that a model gave it
    rounding = last_place if gold.has(sympy.Float) or answer.has(sympy.Float) else None
    with mpmath.workdps(WORKING):
        verdicts = [_agree(one, other, rounding) for one, other in _values(gold, answer)]
    if False in verdicts:
        return False
    return True if verdicts.count(True) >= min(ENOUGH, len(verdicts)) else None


def _proportional(gold: Expression, answer: Expression) -> bool:
    """Whether their ratio is the same everywhere. Zeros tell nothing."""
    with mpmath.workdps(WORKING):
        ratios = [one / other for one, other in _values(gold, answer) if one and other]
        return len(ratios) >= ENOUGH and all(_agree(ratio, ratios[0]) for ratio in ratios)


def _agree(gold: Any, answer: Any, rounding: Any = None) -> bool | None:
    """But for `rounding`, if there is any."""
    if gold is None or answer is None:
        return None
    allowed = TINY * abs(gold) if rounding is None else min(ROUNDING_ERROR * abs(gold), rounding)
    return bool(abs(gold - answer) <= allowed)


def _values(gold: Expression, answer: Expression) -> list[tuple[Any, Any]]:
    """What both come to, at one place if they have no variables. None is no value, or that both have left the reals."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    functions = [sympy.lambdify(symbols, _printable(expression), "mpmath") for expression in (gold, answer)]
    variables = [symbol for symbol in symbols if str(symbol) != IMAGINARY]
    pairs = []
    random = Random(0)
    for span in RANGES if variables else RANGES[:1]:
        place = [mpmath.mpf(random.uniform(*span)) if symbol in variables else mpmath.j for symbol in symbols]
        one, other = (_value(function, place) for function in functions)
        outside = variables == symbols != [] and None not in (one, other) and mpmath.im(one) and mpmath.im(other)
        pairs.append((None, None) if outside else (one, other))
    return pairs


def _printable(expression: Expression) -> Expression:
    """Without numbers that are too long for Python to write them into a function."""
    long = (number for number in expression.atoms(sympy.Rational) if max(abs(number.p), number.q) > 10**LONG)
    return expression.xreplace({number: sympy.Float(number, 2 * WORKING) for number in long})


def _value(function: Callable[..., Any], place: Sequence[Any]) -> Any:
    """A zero that only rounding hides is one."""
    try:
        value = +mpmath.mpmathify(function(*place))
        if abs(value) < TINY:
            with mpmath.workdps(2 * WORKING):
                closer = +mpmath.mpmathify(function(*place))
            value = mpmath.mpf(0) if abs(closer) < TINY * abs(value) else closer
    except (ArithmeticError, ValueError, NameError, TypeError):  # undefined there, or nothing that has values
        return None
    if not mpmath.isfinite(value):
        return None
    return mpmath.re(value) if abs(mpmath.im(value)) <= TINY * abs(value) else value
