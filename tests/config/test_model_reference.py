"""A frozen model's table: what is refused, and never shown."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.base import ConfigError
from tests.config.run_files import algo


def headers(given: Any) -> Any:
    teacher = {"name": "teacher", "base_url": "http://host:8001/v1", "headers": given}
    return algo({"type": "opd", "teacher": teacher}).teacher.headers


def test_headers_that_can_be_sent_are_kept():
    given = {"X-Team": "mill", "Authorization": "Basic aGk6aGk=", "X-Empty": ""}
    assert headers(given) == given
    assert headers({}) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"X-Team": "hunter\n2"}, "the value of header X-Team cannot be sent: it has a line break"),
        ({"X-Team": "h\u00fcnter2"}, "the value of header X-Team cannot be sent"),
        ({"X-Team": "hunter2 "}, "the value of header X-Team cannot be sent"),
        ({"X-Team": ["hunter2"]}, "the value of header X-Team is no text: put it in quotes"),
        ({"X-A": "1", "X-Key: hunter2": ""}, "the name of header 2 is none"),
        ({"": "hunter2"}, "the name of header 1 is none"),
        ("X-Key: hunter2", "this is a table"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(given: Any, words: str):
    with pytest.raises(ConfigError) as refused:
        headers(given)
    assert f"teacher.headers: {words}" in str(refused.value)
    assert "nter" not in str(refused.value)
