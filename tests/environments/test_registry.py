"""Environments by id."""

import pytest

from headrace.environments import environment
from headrace.environments.arguments import check_whole
from headrace.environments.base import Environment
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.rewards import Exact
from headrace.environments.shipped.reverse_text import ReverseText
from tests.refusals import refused


class Mine(Environment):
    """A user's own environment."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def tasks(self) -> list[dict[str, int]]:
        return [{"n": n} for n in range(self.size)]


class Buggy(Environment):
    def __init__(self, size: int = 1) -> None:
        self.label = "size " + size


class Particular(Environment):
    def __init__(self, size: int) -> None:
        check_whole("size", size, 3)


READ: list[int] = []


def rows(size: int = 1) -> list[dict[str, str]]:
    READ.append(size)
    return [{"answer": str(n)} for n in range(size)]


@environment(data=rows, rewards={"exact": Exact()})
def lazy(row):
    return row["answer"]


class NotAnEnvironment:
    pass


def test_a_shipped_environment_is_known_by_name():
    environment = load_environment("reverse-text", {"split": "eval", "num_tasks": 3})
    assert isinstance(environment, ReverseText)
    assert len(environment.tasks()) == 3


def test_a_users_environment_is_known_by_import_path():
    environment = load_environment(f"{__name__}:Mine", {"size": 2})
    assert environment.tasks() == [{"n": 0}, {"n": 1}]


def test_a_mistyped_name_suggests_the_nearest_and_lists_the_known():
    with refused(EnvironmentNotFound, key="environment", value="reverse-txt") as failure:
        load_environment("reverse-txt", {})
    assert "mean reverse-text?" in failure.value.fix and "package.module:Class" in failure.value.fix


def test_a_name_like_none_lists_the_known():
    with refused(EnvironmentNotFound, key="environment", value="chess") as failure:
        load_environment("chess", {})
    assert ", reverse-text, " in failure.value.fix


@pytest.mark.parametrize(
    ("identifier", "reason"),
    [
        ("no_such_package.module:Class", "no_such_package"),
        ("headrace.environments.shipped.reverse_text:Absent", "Absent"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_named(identifier: str, reason: str):
    with refused(key="environment", value=identifier) as failure:
        load_environment(identifier, {})
    assert reason in failure.value.fact


def test_wrong_args_are_refused_with_the_environments_name_and_the_arg():
    with refused(EnvironmentNotFound, key="args.colour", value="blue") as failure:
        load_environment("reverse-text", {"colour": "blue"})
    assert "reverse-text" in failure.value.fact and "min_letters" in failure.value.fix


def test_args_are_named_beside_the_key_of_the_id():
    with refused(key="orchestrator.train.env.0.args.split", value="test"):
        load_environment("reverse-text", {"split": "test"}, "orchestrator.train.env.0.id")


def test_a_wrong_value_of_an_arg_is_refused():
    with refused(EnvironmentNotFound, key="args.split", value="test"):
        load_environment("reverse-text", {"split": "test"})


@pytest.mark.parametrize(("args", "key"), [({}, "size"), ({"size": 2}, "size"), ({"size": 3, "colour": 1}, "colour")])
def test_what_a_users_environment_does_not_take_is_named(args: dict, key: str):
    with refused(EnvironmentNotFound, key=f"args.{key}", value=args.get(key)):
        load_environment(f"{__name__}:Particular", args)


def test_a_bug_in_a_users_constructor_keeps_its_traceback():
    with pytest.raises(TypeError, match="concatenate") as failure:
        load_environment(f"{__name__}:Buggy", {})
    assert failure.traceback[-1].name == "__init__"


def test_the_rows_of_a_users_function_are_read_when_the_tasks_are_asked_for_and_once():
    READ.clear()
    environment = load_environment(f"{__name__}:lazy", {"size": 2})
    assert READ == []
    assert environment.tasks() == environment.tasks() == [{"answer": "0"}, {"answer": "1"}]
    assert READ == [2]


def test_the_share_of_mistakes_of_a_users_function_is_checked():
    with refused(EnvironmentNotFound, key="args.demonstrate_mistakes", value=7):
        load_environment(f"{__name__}:lazy", {"demonstrate_mistakes": 7})


def test_a_class_that_is_no_environment_is_refused():
    path = f"{__name__}:NotAnEnvironment"
    with refused(EnvironmentNotFound, key="environment", value=path):
        load_environment(path, {})


def test_an_environment_without_demonstrations_says_so():
    with refused() as error:
        next(Mine().demonstrations(0))
    assert "Mine" in error.value.fact and "gold" in error.value.fix
