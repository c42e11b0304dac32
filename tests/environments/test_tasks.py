"""The tasks of an environment are JSON, which an episode in another process gets as they were given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.environments.base import Environment, tasks_of
from tests.refusals import refused


class Tasks(Environment):
    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    def tasks(self) -> Any:
        return self._tasks


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"n": 2**70}, "can't serialize ints"),
        ({"a": [{"b": {1, 2}}]}, "['a'][0]['b'] is a set"),
        ({"a": (1, 2)}, "['a'] is a tuple"),
        ({"a": b"bytes"}, "['a'] is a bytes"),
        ({"a": {5: 1}}, "the key 5 "),
        ({"a": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_task_that_would_not_arrive_as_it_was_is_refused_by_its_number(data: dict[str, Any], complaint: str):
    with refused(key="environment", value="env") as error:
        tasks_of(Tasks([{"n": 1}, data]), "env")
    assert "task 1 " in error.value.fact and complaint in error.value.fact


def test_every_json_value_is_taken():
    data = {"a": [1, 2.5, True, None, "text", {"b": []}], "n": 2**64 - 1, "undefined": math.nan}
    assert tasks_of(Tasks([data]), "env")[0].data is data


def test_a_task_may_come_again_also_with_what_is_not_a_number():
    first, second = tasks_of(Tasks([{"key": "same", "x": float("nan")} for _ in range(2)]), "env")
    assert first.key == second.key == "same"


@pytest.mark.parametrize("tasks", [None, 5])
def test_what_cannot_be_gone_through_is_refused_as_tasks(tasks: Any):
    with refused(key="orchestrator.train.env.0.id", value="env") as error:
        tasks_of(Tasks(tasks), "env", "orchestrator.train.env.0.id")
    assert type(tasks).__name__ in error.value.fact
