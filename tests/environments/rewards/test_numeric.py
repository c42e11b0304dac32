"""Numbers in all the ways that people write them, and what is not the gold one."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.rewards.math_rewards import Numeric
from headrace.environments.rewards.mathematics.latex import join_tokens, tokenize
from headrace.environments.rewards.mathematics.numbers import parse_number
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
        (r"\boldsymbol{5}", "5"),
        (r"\underline{5}", "5"),
        (r"\textcolor{red}{5}", "5"),
        (r"\color{red}{5}", "5"),
        (r"\large 5", "5"),
        (r"0.\bar{3}", "1/3"),
        (r"0.333\ldots", "1/3"),
        ("0.1666...", "1/6"),
        ("0.666666", "2/3"),
        ("12.0000001", "12.0"),
        ("3 000 000", "3000000"),
        ("20\u00ba", "20"),
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
        ("0.3\\ldots", "1/3"),
        ("109200001", "109200000"),
        ("1", r"\frac{4036082}{4036081}"),
        (r"\frac{4036082}{4036081}", "1"),
        ("12345678.4", "12345678"),
        ("12345678", "12345678.4"),
        ("1e9", "1000000001"),
        ("12.000001", "12"),
        ("11.9999999999", "12"),
        ("10000001", "10000000.0"),
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


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "eggs",
            "big apples",
            "eggs per day",
            "miles per hour",
            "dollars a day",
            "cups of tea",
            "years old",
            "people",
        ),
        *(
            "bags of dog food left over",
            "sq ft",
            "square feet",
            "feet squared",
            "cm^2",
            "mL",
            "L",
            "m",
            "s",
            "GB",
            "mpg",
        ),
        *("USD", "km/h", "m/s", "m/s^2", "/hour", "mins", "in total", r"\text{ m/s}", r"\text{ m/s}^2"),
        r"\frac{\text{miles}}{\text{hour}}",
    ],
)
def test_whatever_is_counted_or_measured_may_be_named(unit: str):
    assert score(f"18 {unit}", "18") == 1.0
    assert score(f"19 {unit}", "18") == 0.0


@pytest.mark.parametrize(
    "answer", ["18m", "18h", "18mins", "x = 18 m", "\u20ac18", "\u00a318", "18\u20ac", "USD 18", "US$18"]
)
def test_units_may_touch_the_number_and_currencies_stand_in_front(answer: str):
    assert score(answer, "18") == 1.0


@pytest.mark.parametrize("answer", ["-18 degrees Celsius", r"-18^\circ\text{C}", r"-18^\circ C", "-\u20ac18"])
def test_a_negative_number_may_have_a_unit(answer: str):
    assert score(answer, "-18") == 1.0
    assert score(answer, "18") == 0.0


@pytest.mark.parametrize(
    "words",
    [
        *(
            "squared",
            "cubed",
            "halves",
            "thirds",
            "tenths",
            "factorial",
            "doubled",
            "twice",
            "wrong",
            "squared dollars",
        ),
        *(
            "dozen",
            "pairs",
            "gross",
            "hundreds",
            "hundred",
            "thousand dollars",
            "k",
            "K",
            "x",
            "ab",
            "plus tax",
            "mod 5",
        ),
        *("or more", "less than x", "and a half", "to the power of two", "over 2", "minus one", "/x", r"\text{ nd}"),
    ],
)
def test_words_that_change_a_number_are_no_unit(words: str):
    assert score(f"18 {words}", "18") == 0.0


@pytest.mark.parametrize("answer", [r"\not= 18", r"\not 18", r"\ne 18", r"\text{not } 18", r"\cancel{18}"])
def test_what_is_denied_is_not_the_answer(answer: str):
    assert score(answer, "18") == 0.0


def test_only_up_to_one_is_a_thing_named_in_the_singular():
    assert [score(answer, gold) for answer, gold in (("1 egg", "1"), ("1/2 pizza", "0.5"), ("1 half", "1"))] == [
        1,
        1,
        0,
    ]
    assert score("2 nonsense", "2") == 0.0


def test_a_dozen_is_twelve_and_a_pair_two():
    assert [score(answer, "24") for answer in ("2 dozen eggs", "12 pairs", "24 dozen")] == [1.0, 1.0, 0.0]


def test_the_exponent_of_a_unit_must_not_be_wrong():
    gold = r"5\text{ cm}^2"
    assert [score(answer, gold) for answer in ("5", "5 square cm", "5 cm^2", "5 centimeters squared")] == [1.0] * 4
    assert [score(answer, gold) for answer in ("5 cm", "5 cm^3", "5 cubic centimeters", "5 m^2")] == [0.0] * 4


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("18", ["18%"], ["1800%", "0.18%"]),
        ("0.5", ["50%"], ["0.5%", "5%"]),
        ("1/4", ["25%"], ["0.25%"]),
        ("1", [], ["1%", "100%"]),
        ("0", ["0%"], ["1%"]),
        ("50%", ["50", "0.5", "1/2", "50 percent"], ["5", "0.05", "5000", "0.5%"]),
        ("100%", ["1", "100"], ["1%"]),
    ],
)
def test_a_percentage_for_a_plain_number_is_read_in_one_way_alone(gold: str, right: list[str], wrong: list[str]):
    assert [score(answer, gold) for answer in right] == [1.0] * len(right)
    assert [score(answer, gold) for answer in wrong] == [0.0] * len(wrong)


@FIXED
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_every_fraction_equals_its_mixed_number_and_no_other(top: int, bottom: int):
    whole, rest = divmod(abs(top), bottom)
    sign = "-" if top < 0 else ""
    mixed, fraction = rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", f"{top}/{bottom}"
    assert parse_number(join_tokens(tokenize(mixed))) == parse_number(join_tokens(tokenize(fraction)))
    assert score(mixed, fraction) == 1.0
    assert score(f"{top + 1}/{bottom}", fraction) == 0.0


@FIXED
@given(st.integers(0, 10**15), st.integers(0, 6))
def test_commas_and_points_do_not_change_a_value(digits: int, places: int):
    value = Fraction(digits, 10**places)
    written = f"{digits // 10**places:,}.{digits % 10**places:0{places}d}" if places else f"{digits:,}"
    number = parse_number(join_tokens(tokenize(written)))
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


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 18 because 9*2 = 18.",
        "The answer is 18, since 9+9=18.",
        "The answer is 18!",
        "The answer is 18! Great",
        "The answer is 18</answer>",
        "<answer>18</answer>",
        "The answer is 18<|im_end|>",
        "The answer is 18 eggs per day.",
        "The answer is $18/hour.",
        "Answer: 18 dollars a day",
        "The answer is **18 miles**. That is all.",
    ],
)
@pytest.mark.parametrize("extract", ["final", "last_number"])
def test_an_announced_number_is_found_in_its_sentence(text: str, extract: str):
    assert Numeric(extract=extract)(text, {"answer": "18"}) == 1.0


def test_a_task_without_a_gold_number_is_an_error_that_names_the_field():
    with pytest.raises(LookupError, match=r"'answer'.*'gold'"):
        Numeric()("#### 1", {"gold": 1})
    with pytest.raises(ValueError, match="answer = 'Tuesday'"):
        Numeric()("#### 1", {"answer": "Tuesday"})
    with pytest.raises(ValueError, match="answer = "):
        Numeric()("#### 1", {"answer": None})
    with pytest.raises(ValueError, match="answer = "):
        Numeric()("#### 1", {"answer": "{1"})


@hostile
def test_no_text_makes_it_fail(text: str):
    for extract in ("final", "boxed", "last_number", "all"):
        for answer in (text, rf"\boxed{{{text}}}", f"#### {text}"):
            assert Numeric(extract=extract)(answer, {"answer": "5"}) == 0.0
