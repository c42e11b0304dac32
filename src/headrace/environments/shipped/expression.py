"""Arithmetic written as text, computed exactly and never slowly: + - * / // % **, parentheses, signs.

It walks Python's own syntax tree and knows nothing but numbers: no names, no calls. Numbers are fractions, so nothing
is rounded; what is too long, too deep or too large is refused before it is computed.
"""

from __future__ import annotations

import ast
import operator
import string
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

LONGEST = 200
"""Characters of an expression; it bounds the depth, too."""
LARGEST = 10**100
"""Of every number on the way, and of the denominator of every fraction."""
MOST_EXPONENT = 1000
_CHARACTERS = frozenset(string.digits + "+-*/%(). ")
_TWELVE_DIGITS = Context(prec=12)
_TOO_LARGE = "the numbers become too large"
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class BadExpression(ValueError):
    """It cannot be computed; the message says why."""


def evaluate(expression: str) -> Fraction:
    """Its value. Raises `BadExpression`."""
    if len(expression) > LONGEST:
        raise BadExpression(f"an expression has at most {LONGEST} characters")
    if not _CHARACTERS.issuperset(expression):
        raise BadExpression("an expression has numbers, + - * / // % ** and parentheses, and nothing else")
    source = expression.strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise BadExpression("the expression is not well-formed") from None
    return _value(tree.body, source)


def written(value: Fraction) -> str:
    """A value as a calculator shows it: a whole number in full, any other to 12 digits, and never as a power of ten."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{_TWELVE_DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator)):f}"


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):  # as it is written: a float is rounded
            return _bounded(Fraction(source[node.col_offset : node.end_col_offset]))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand, source) if isinstance(sign, ast.USub) else _value(operand, source)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, source), _value(right, source))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _operation(_OPERATIONS[type(sign)], _value(left, source), _value(right, source))
    raise BadExpression("the expression is not well-formed")


def _operation(compute: Callable[[Fraction, Fraction], Fraction | int], left: Fraction, right: Fraction) -> Fraction:
    try:
        return _bounded(Fraction(compute(left, right)))
    except ZeroDivisionError:
        raise BadExpression("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MOST_EXPONENT:
        raise BadExpression(f"an exponent is a whole number from -{MOST_EXPONENT} to {MOST_EXPONENT}")
    if not base and exponent < 0:
        raise BadExpression("division by zero")
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1  # of 2**bits at least
    if bits * abs(exponent) > LARGEST.bit_length():
        raise BadExpression(_TOO_LARGE)
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise BadExpression(_TOO_LARGE)
    return value
