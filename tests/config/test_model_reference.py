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
    ("given", "named"),
    [
        ({"X-Team": "hunter\n2"}, "X-Team"),
        ({"X-Team": "h\u00fcnter2"}, "X-Team"),
        ({"X-Team": "hunter2 "}, "X-Team"),
        ({"X-Team": ["hunter2"]}, "X-Team"),
        ({"X-A": "1", "X-Key: hunter2": ""}, "header 2"),
        ({"": "hunter2"}, "header 1"),
        ("X-Key: hunter2", "table"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(given: Any, named: str):
    with pytest.raises(ConfigError) as refused:
        headers(given)
    assert (refused.value.key, refused.value.value) == ("orchestrator.algo.teacher.headers", None)
    assert named in refused.value.fact
    assert "nter" not in str(refused.value)
