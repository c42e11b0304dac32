"""What is remembered of data, and what is said when it is no longer the same."""

from typing import Any

import pytest

from headrace.rollout.digest import fingerprint

TASKS = [{"question": "2 + 3", "answer": 5}, {"question": "2 + 4", "answer": 6}]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ([{"answer": 5, "question": "2 + 3"}, TASKS[1]], None),
        (TASKS[:1], "2 examples before, 1 now"),
        ([*TASKS, TASKS[0]], "2 examples before, 3 now"),
        ([TASKS[1], TASKS[0]], "still 2 examples, but different ones or in another order"),
        ([TASKS[0], {**TASKS[1], "answer": 7}], "still 2 examples, but different ones or in another order"),
    ],
)
def test_only_what_an_example_says_and_its_place_count(now: list[dict[str, Any]], says: str | None):
    assert fingerprint(TASKS).describe_change(fingerprint(now)) == says


@pytest.mark.parametrize("value", [{1: 2}, "\ud800", 2**70, float("nan"), b"\xff", None])
def test_nothing_that_an_example_may_hold_is_an_error(value: Any):
    assert fingerprint([{"value": value}]) == fingerprint([{"value": value}]) != fingerprint([{"value": "other"}])
