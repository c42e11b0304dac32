"""From an `algo` section to an algorithm: what of a user's code is refused before it runs, and in which words."""

from typing import Any

import pytest

from headrace.algorithms.base import Algorithm, MakeContext
from headrace.tools.check_algorithm.fixtures import algorithm_config
from tests.algorithms.teachers import Teacher
from tests.refusals import refused

HERE = "tests.algorithms.test_registry"


class Touchy(Algorithm):
    """Cannot be constructed, for a reason of its own."""

    def __init__(self, decay: float) -> None:
        raise TypeError("decay must not be what it is")


def even(given: Any, share: float = 1.0) -> Any:
    raise AssertionError("must not be called")


async def slow(given: Any) -> Any:
    """Would have to be awaited."""


NUMBER = 3

REFUSED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"type": f"{HERE}:even"}, {"key": "algorithm", "value": f"{HERE}:even"}),
    ({"type": f"{HERE}:Touchy"}, {"key": "algorithm", "value": f"{HERE}:Touchy"}),
    ({"type": f"{HERE}:Touchy", "kwargs": {"decay": 1, "x": 2}}, {"key": "algorithm", "value": f"{HERE}:Touchy"}),
    ({"type": "custom", "import_path": f"{HERE}:even", "kwargs": {"x": 1}}, {"value": f"{HERE}:even"}),
    ({"type": "custom", "import_path": f"{HERE}:slow"}, {"key": "algorithm", "value": f"{HERE}:slow"}),
    ({"type": "grpo", "terms": [f"{HERE}:even", f"{HERE}:slow"]}, {"key": "term", "value": f"{HERE}:slow"}),
    ({"type": "echo", "terms": [f"{HERE}:slow"]}, {"key": "term", "value": f"{HERE}:slow"}),
    ({"type": "rlcsd", "terms": [f"{HERE}:slow"]}, {"key": "term", "value": f"{HERE}:slow"}),
    ({"type": "echo", "filter": f"{HERE}:slow"}, {"key": "filter of echo", "value": f"{HERE}:slow"}),
]
MISSING: list[dict[str, Any]] = [
    {"type": f"{HERE}:Gone"},
    {"type": "custom", "import_path": f"{HERE}:gone"},
    {"type": "custom", "import_path": f"{HERE}:NUMBER"},
    {"type": "grpo", "terms": [f"{HERE}:gone"]},
    {"type": "rlcsd", "hint_filter": f"{HERE}:gone"},
]


def make(settings: dict[str, Any]) -> Algorithm:
    return algorithm_config(settings, "test").make(MakeContext(100, lambda _: Teacher()))


@pytest.mark.parametrize(("settings", "fields"), [*REFUSED, *((settings, {}) for settings in MISSING)])
def test_code_that_cannot_work_is_refused_without_and_with_an_algorithm_to_make(
    settings: dict[str, Any], fields: dict[str, str]
):
    for refuses in (lambda: algorithm_config(settings, "test").check_imports(), lambda: make(settings)):
        with refused(**fields):
            refuses()


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "grpo"},
        {"type": "max_rl"},
        {"type": f"{HERE}:Touchy", "kwargs": {"decay": 1}},
        {"type": "custom", "import_path": f"{HERE}:even", "kwargs": {"share": 0.5}},
        {"type": "echo", "terms": [f"{HERE}:even"], "filter": f"{HERE}:even"},
        {"type": "rlcsd", "terms": [f"{HERE}:even"], "hint_filter": f"{HERE}:even"},
    ],
)
def test_looking_for_code_runs_none_of_it(settings: dict[str, Any]):
    algorithm_config(settings, "test").check_imports()


def test_an_error_inside_a_constructor_is_not_reported_as_wrong_kwargs():
    with pytest.raises(TypeError, match="decay must not be what it is"):
        make({"type": f"{HERE}:Touchy", "kwargs": {"decay": 1}})
