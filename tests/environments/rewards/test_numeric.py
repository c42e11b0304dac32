"""Numbers in all the ways that people write them, and what is not the gold one."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.rewards.mathematics.latex import latex_of, tokens_of
from headrace.environments.rewards.mathematics.numbers import number_of
from headrace.environments.rewards.numeric import Numeric
from tests.environments.hostile import hostile

FIXED = settings(deadline=None, max_examples=200, derandomize=True)
boxed = Numeric(extract="boxed")


def score(answer: str, gold: Any, reward: Numeric = boxed) -> float:
    return reward(rf"So it is \boxed{{{answer}}}", {"answer": gold})


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("$1,234.50", "1234.5"),
        (r"\$1,234.50", "1234.5"),
        ("1,234,567", 1234567),
        ("1{,}000", "1000"),
        (r"32,\!348", "32348"),
        (r"11,\! 111", "11111"),
        (r"1\,000", "1000"),
        ("1\u2009000", "1000"),
        ("1\u202f000\u202f000", "1000000"),
        ("18 dollars", "18"),
        ("18", "18 dollars"),
        (r"18\text{ dollars per day}", "18"),
        ("18 square feet", "18"),
        (r"5\text{ cm}^2", "5"),
        ("25mph", "25"),
        ("25 sec", "25 seconds"),
        (r"50\%", "50"),
        ("50%", "0.5"),
        ("50 percent", "50%"),
        ("5 million", "5000000"),
        (r"20^\circ", "20"),
        ("20 degrees", r"20^{\circ}"),
        ("20\u00b0", "20"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "1/2"),
        ("1/2", r"\frac{2}{4}"),
        (".5", "0.5"),
        (r"3\frac12", "3.5"),
        (r"3 \frac{1}{2}", "7/2"),
        ("3 1/2", "3.5"),
        (r"-3\frac12", "-3.5"),
        (r"\frac{-1}{2}", "-0.5"),
        ("1e3", "1000"),
        ("1.5E-3", "0.0015"),
        (r"6.02 \times 10^{23}", "6.02e23"),
        ("6.02\u00d710^23", r"6.02\cdot 10^{23}"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("5.", "5"),
        ("5.0", 5),
        ("5", 5.0),
        ("007", "7"),
        ("-0", "0"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", "1/6"),
        ("0.333333", "1/3"),
        ("x = 5", "5"),
        ("5 = x", "5"),
        ("= 5", "5"),
        ("(5)", "5"),
        ("{5}", "5"),
        ("**5**", "5"),
        ("$5$", "5"),
        (r"\(5\)", "5"),
        (r"\text{5}", "5"),
        (r"\mathbf{5}", "5"),
        (r"\boxed{5}", "5"),
        ("12.000001", "12"),
    ],
)
def test_a_number_is_the_same_however_it_is_written(answer: str, gold: Any):
    assert score(answer, gold) == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("4", "3"),
        ("3/7", "3"),
        ("3", "3/7"),
        ("1, 2, 3, 4", "3"),
        ("3 or 4", "3"),
        ("3, 3", "3"),
        ("(3, 4)", "3"),
        ("3:1", "3"),
        ("1 2", "12"),
        ("1 2", "2"),
        ("5 5", "10"),
        ("1 = 2 = 3", "3"),
        ("2x", "2"),
        ("3i", "3"),
        ("2abcd", "2"),
        ("3!", "3"),
        ("3_5", "3"),
        ("50", "0.5"),
        ("0.5%", "50"),
        ("5", "5 million"),
        ("1.5", "15"),
        ("1,5", "1.5"),
        ("0.3333", "1/3"),
        ("109200001", "109200000"),
        ("16386.17", "16386.16"),
        ("-5", "5"),
        ("5 feet", "5 inches"),
        (r"\$5", "5 cents"),
        ("20 radians", r"20^\circ"),
        ("9 p.m.", "9"),
        (r"5 \text{ not } 6", "5"),
        (r"5 \text{ if that is what you wanted to hear}", "5"),
        (r"\text{five}", "5"),
        ("5" + " cm^2" * 300, "5"),
        ("1/0", "1"),
        (r"\infty", "1"),
        ("nan", "1"),
        ("1e999999999", "1"),
        ("9" * 1000, "9"),
        ("5\x00", "5"),
        ("5\ud800", "5"),
        ("(" * 300 + "5" + ")" * 300, "5"),
        ("{5", "5"),
        (r"\frac{5", "5"),
        ("", "5"),
    ],
)
def test_what_is_not_the_gold_number_scores_nothing(answer: str, gold: Any):
    assert score(answer, gold) == 0.0


@FIXED
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_every_fraction_equals_its_mixed_number_and_no_other(top: int, bottom: int):
    whole, rest = divmod(abs(top), bottom)
    sign = "-" if top < 0 else ""
    mixed, fraction = rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", f"{top}/{bottom}"
    assert number_of(latex_of(tokens_of(mixed))) == number_of(latex_of(tokens_of(fraction)))
    assert score(mixed, fraction) == 1.0
    assert score(f"{top + 1}/{bottom}", fraction) == 0.0


@FIXED
@given(st.integers(0, 10**15), st.integers(0, 6))
def test_commas_and_points_do_not_change_a_value(digits: int, places: int):
    value = Fraction(digits, 10**places)
    written = f"{digits // 10**places:,}.{digits % 10**places:0{places}d}" if places else f"{digits:,}"
    number = number_of(latex_of(tokens_of(written)))
    assert number is not None and number.value == value


def test_a_tolerance_is_relative_to_the_gold_number():
    within = Numeric(tolerance=0.05, extract="boxed")
    assert [score(answer, "1000", within) for answer in ("950", "1050", "949", "1051")] == [1.0, 1.0, 0.0, 0.0]
    assert score("-1000", "1000", within) == 0.0
    assert score("0.01", "0", within) == 0.0


def test_the_answer_may_stand_after_four_hashes_or_be_all_of_the_text():
    assert Numeric()("16 - 3 - 4 = 9\n#### 18 dollars", {"answer": "18"}) == 1.0
    assert Numeric()("The answer is $18.", {"answer": "18"}) == 1.0
    assert Numeric()("16, no, 18", {"answer": "18"}) == 0.0
    assert Numeric(extract="last_number")("16, no, 18", {"answer": "18"}) == 1.0
    assert Numeric(extract="all")(" 18 ", {"answer": "18"}) == 1.0
    assert Numeric(extract="all", field="gold")("18", {"gold": 18}) == 1.0


def test_a_task_without_a_gold_number_is_an_error_that_names_the_field():
    with pytest.raises(LookupError, match="no field 'answer', only 'gold'"):
        Numeric()("#### 1", {"gold": 1})
    with pytest.raises(ValueError, match="the task's 'answer' is not a number: 'Tuesday'"):
        Numeric()("#### 1", {"answer": "Tuesday"})
    with pytest.raises(ValueError, match="the task's 'answer' is neither a text nor a number"):
        Numeric()("#### 1", {"answer": None})
    with pytest.raises(ValueError, match="the task's 'answer' cannot be read as an answer"):
        Numeric()("#### 1", {"answer": "{1"})


@hostile
def test_no_text_makes_it_fail(text: str):
    for extract in ("final", "boxed", "last_number", "all"):
        for answer in (text, rf"\boxed{{{text}}}", f"#### {text}"):
            assert Numeric(extract=extract)(answer, {"answer": "5"}) == 0.0
