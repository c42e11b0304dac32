"""Exact evaluation of arithmetic expressions in bounded time: + - * / // % **, parentheses, signs.

Evaluation walks Python's syntax tree and accepts numbers only: no names, no calls. Numbers are fractions, so nothing is
rounded; an expression that is too long, too deep or too large is refused before it is computed.
"""

from __future__ import annotations

import ast
import operator
import string
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 200
"""Length of an expression, which also bounds its depth."""
LARGEST = 10**100
"""Limit of every intermediate numerator and denominator."""
MAX_EXPONENT = 1000
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
    """An expression that cannot be computed; the message has the reason."""


def evaluate(expression: str) -> Fraction:
    """Return the value of an expression. Raises `BadExpression`."""
    if len(expression) > MAX_CHARACTERS:
        raise BadExpression(f"an expression has at most {MAX_CHARACTERS} characters")
    if not _CHARACTERS.issuperset(expression):
        raise BadExpression("an expression has numbers, + - * / // % ** and parentheses, and nothing else")
    source = expression.strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise BadExpression("the expression is not well-formed") from None
    return _evaluate_node(tree.body, source)


def format_value(value: Fraction) -> str:
    """Format a value as a calculator shows it: whole numbers in full, others to 12 digits, never as a power of ten."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{_TWELVE_DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator)):f}"


def _evaluate_node(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):  # read from the source: a float is rounded
            return _check_size(Fraction(source[node.col_offset : node.end_col_offset]))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_evaluate_node(operand, source) if isinstance(sign, ast.USub) else _evaluate_node(operand, source)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate_node(left, source), _evaluate_node(right, source))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            operands = _evaluate_node(left, source), _evaluate_node(right, source)
            try:
                return _check_size(Fraction(_OPERATIONS[type(sign)](*operands)))
            except ZeroDivisionError:
                raise BadExpression("division by zero") from None
    raise BadExpression("the expression is not well-formed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise BadExpression(f"an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    if not base and exponent < 0:
        raise BadExpression("division by zero")
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1  # the base is at least 2**bits
    if bits * abs(exponent) > LARGEST.bit_length():
        raise BadExpression(_TOO_LARGE)
    return _check_size(Fraction(base ** int(exponent)))


def _check_size(value: Fraction) -> Fraction:
    """Return the value; raise `BadExpression` if it is too large."""
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise BadExpression(_TOO_LARGE)
    return value
