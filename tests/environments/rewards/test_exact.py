"""The answer is the gold answer."""

import pytest

from headrace.environments.rewards import Exact
from tests.environments.hostile import hostile


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("", "", 1.0),
        ("42", 42, 1.0),
        ("42.0", 42, 0.0),
        ("\ud800", "\ud800", 1.0),
    ],
)
def test_the_text_must_be_the_gold_answer_up_to_space_around_it(text: str, gold: object, score: float):
    assert Exact()(text, {"answer": gold}) == score


def test_space_and_case_matter_as_asked():
    assert Exact(strip=False)("Paris ", {"answer": "Paris"}) == 0.0
    assert Exact(ignore_case=True)("pARIS", {"answer": "Paris"}) == 1.0
    assert Exact(ignore_case=True)("STRASSE", {"answer": "straße"}) == 1.0
    assert Exact(ignore_case=True)("ß" * 4, {"answer": "SSSSSSSS"}) == 1.0
    assert Exact(ignore_case=True)("ssssss", {"answer": "ßßß"}) == 1.0


def test_the_gold_answer_may_stand_elsewhere():
    assert Exact("capital")("Paris", {"capital": "Paris", "answer": "no"}) == 1.0


def test_a_field_that_is_not_there_is_named():
    with pytest.raises(LookupError, match=r"'answer'.*'question', 'gold'"):
        Exact()("x", {"question": "?", "gold": "!"})


@hostile
def test_no_text_is_too_much(text: str):
    assert Exact(ignore_case=True)(text, {"answer": "Paris"}) == 0.0
