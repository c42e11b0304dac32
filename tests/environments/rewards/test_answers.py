r"""Where the answer stands: boxes, `####`, "the answer is", and texts of any size."""

import pytest

from headrace.environments.rewards.answers import boxed_answer, final_answer, find_extract
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} is too small, so it is \boxed{2}", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\\}", r"\\"),
        (r"\fbox{7}", "7"),
        (r"\fbox{7} and later \boxed{8 } ", "8"),
        (r"\boxed 7", "7"),
        (r"it is $\boxed 12$.", "12"),
        (r"\boxed 7. Done", "7"),
        (r"\boxed\frac12", r"\frac12"),
        ("\\boxed  {\n5\n}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{5} (write \boxed{} as asked)", "5"),
        (r"\boxed{5} and then it broke off: \boxed{6", None),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{5} }", "5"),
        (r"\boxed{{5}", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxedanswer{5}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer_if_it_is_complete(text: str, answer: str | None):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"$\boxed{1}$ \text{ or } $\boxed{2}$", "1, 2"),
        ("\\boxed{1}\n\\boxed{2}", "1, 2"),
        (r"\boxed{5} \boxed{5}", "5"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
    ],
)
def test_boxes_side_by_side_are_one_list(text: str, answer: str):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1 = 2\n#### 2", "2"),
        ("#### 1\nno:\n#### 1,234 \nbye", "1,234"),
        (r"#### 1 and \boxed{2}", "2"),
        ("The answer is 5.", "5"),
        ("The answer is 3.5. That was easy", "3.5"),
        ("First the answer is 4\nbut then the ANSWER IS: $\\frac{1}{2}$", r"$\frac{1}{2}$"),
        ("Answer: 7", "7"),
        ("The answer is x<3, because of x", "x<3"),
        ("the answer is 5! Next", "5"),
        ("the answer is $5!$", "$5!$"),
        ("The answer is 5! + 1", "5! + 1"),
        ("<answer> 7 </answer>", "7"),
        ("the answer is 7<|im_end|>", "7"),
        ("the answer is not 5", "not 5"),
        ("I have 3 apples", None),
        ("", None),
    ],
)
def test_a_final_answer_is_boxed_or_marked_or_announced(text: str, answer: str | None):
    assert final_answer(text) == answer


def test_the_last_number_is_an_answer_only_where_that_is_asked_for():
    assert final_answer("First 3, then $1,250.50 in all.", last_number=True) == "$1,250.50"
    assert find_extract("last_number")("3 and then -4") == "-4"
    assert find_extract("final")("3 and then -4") is None


def test_the_last_number_is_taken_where_the_announced_answer_is_prose():
    last_number = find_extract("last_number")
    assert last_number("the answer is not 5, it is 18") == "18"
    assert last_number("the answer is easy to see") == "easy to see"
    assert last_number("the answer is 3 or 5, 9 + 9 being 18") == "18"
    assert last_number("the answer is 3 or 5") == "3 or 5"
    assert last_number(r"the answer is $\frac{\sqrt3}{2}$ by 4") == "4"
    assert last_number(r"the answer is $\frac{\sqrt3}{2}$") == r"$\frac{\sqrt3}{2}$"


def test_an_unknown_extraction_lists_those_that_there_are():
    with refused(key="extract", value="box"):
        find_extract("box")
    assert find_extract(str.upper)("a") == "A"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_000_000,
        "{" * 10_000_000,
        "\\" * 10_000_000,
        r"\boxed{" * 1_000_000,
        r"\boxed " * 1_000_000,
        r"\boxed{" + "{" * 100_000 + "}" * 100_001,
        r"\boxed{" + "9" * 10_000_000 + "}",
        "answer is " * 1_000_000,
        "the answer is" + " " * 10_000_000,
        "answer" + " " * 10_000_000,
        r"\boxed{1}" + " " * 5_000_000 + r"\boxed{" + " " * 5_000_000 + "}",
    ],
    ids=lambda text: f"{text[:12]}...",
)
def test_ten_megabytes_are_no_trouble(text: str):
    for extract in (boxed_answer, final_answer, find_extract("all"), find_extract("last_number")):
        answer = extract(text)
        assert answer is None or len(answer) < 10_000


def test_an_answer_is_found_in_front_of_ten_megabytes():
    assert boxed_answer(r"\boxed{5}" + "and so on " * 1_000_000) == "5"
    assert final_answer("#### 5\n" + "and so on " * 1_000_000) == "5"
