"""Arithmetic as text: exact, safe, never slow."""

import random
from fractions import Fraction

import pytest

from headrace.environments.shipped.expression import LARGEST, BadExpression, evaluate, format_value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", 84),
        ("  2 + 3 * 4 ", 14),
        ("(2 + 3) * 4", 20),
        ("2 - 3 - 4", -5),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("--5", 5),
        ("+-+5", -5),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("2 ** -3", Fraction(1, 8)),
        ("7 / 2", Fraction(7, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),  # exact, as no float is
        ("0.10000000000000000001 * 10 ** 20", 10**19 + 1),  # more digits than a float has
        ("1.00000000000000000003 - 1.00000000000000000001", Fraction(2, 10**20)),
        ("1 / 3 * 3", 1),
        (".5 * 4.", 2),
        ("1 ** 1000", 1),
        ("10 ** 100", LARGEST),
        ("0 ** 0", 1),
    ],
)
def test_values(expression: str, value: int | Fraction):
    assert evaluate(expression) == value


def test_values_agree_with_python_on_random_expressions():
    rng = random.Random(0)
    for _ in range(300):
        terms = [str(rng.randint(1, 99)) for _ in range(rng.randint(2, 6))]
        expression = terms[0] + "".join(f"{rng.choice(['+', '-', '*', '//', '%'])}{term}" for term in terms[1:])
        assert evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "not well-formed"),
        ("   ", "not well-formed"),
        ("1 +", "not well-formed"),
        ("2 3", "not well-formed"),
        ("(1", "not well-formed"),
        ("1(2)", "not well-formed"),
        ("007", "not well-formed"),
        ("...", "not well-formed"),
        ("()", "not well-formed"),
        ("*1", "not well-formed"),
        ("__import__('os')", "nothing else"),
        ("1e999", "nothing else"),
        ("1,000", "nothing else"),
        ("2^3", "nothing else"),
        ("1\n+1", "nothing else"),
        ("\ud800\x00", "nothing else"),
        ("٣ + ٤", "nothing else"),
        ("1/0", "division by zero"),
        ("1//(2-2)", "division by zero"),
        ("5%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "whole number"),
        ("2**1001", "whole number"),
        ("9**9**9**9", "whole number"),
        ("(-8)**(1/3)", "whole number"),
        ("99**999", "too large"),
        ("10**100+1", "too large"),
        ("10**60*10**60", "too large"),
        ("1/10**60/10**60", "too large"),
        ("9" * 150, "too large"),
        ("9" * 150 + ".", "too large"),
        ("1" * 201, "at most 200 characters"),
        ("1+" * (5 * 2**20) + "1", "at most 200 characters"),
    ],
)
def test_what_cannot_be_computed_says_why(expression: str, complaint: str):
    with pytest.raises(BadExpression, match=complaint):
        evaluate(expression)


def test_the_deepest_expressions_that_fit_are_computed_or_refused():
    assert evaluate("-" * 198 + "1") == 1
    assert evaluate("(" * 90 + "1" + ")" * 90) == 1
    assert evaluate("1" + "+1" * 99) == 100
    assert evaluate("2" + "**1" * 66) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(84), "84"),
        (Fraction(-5), "-5"),
        (Fraction(7, 2), "3.5"),
        (Fraction(1, 3), "0.333333333333"),
        (Fraction(-2, 3), "-0.666666666667"),
        (Fraction(10**60), "1" + "0" * 60),
        (Fraction(10**20) + Fraction(1, 2), "1" + "0" * 20),
        (Fraction(1, 8 * 10**6), "0.000000125"),
    ],
)
def test_values_are_written_as_a_calculator_shows_them(value: Fraction, text: str):
    assert format_value(value) == text
