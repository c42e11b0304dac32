"""GSM8K, MATH and the strict format, on real examples."""

from pathlib import Path

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.registry import EnvironmentNotFound, load_environment
from headrace.environments.script import play
from headrace.environments.tables import DataError
from tests.refusals import refused

DATA = Path(__file__).parents[2] / "data"
STRICT = "<think>\n{}\n</think>\n\n\\boxed{{{}}}"


async def worth(environment, task, answer: str) -> dict[str, float]:
    (rollout,), _ = await play(environment, task, lambda messages: answer)
    return rollout.rewards


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gsm8k", {"source": str(DATA / "gsm8k"), "split": "test"}),
        ("math", {"source": str(DATA / "math"), "split": "test"}),
        ("math", {"source": str(DATA / "math500"), "split": "test"}),
        ("strict-math", {"data": "gsm8k", "source": str(DATA / "gsm8k"), "split": "test"}),
        ("strict-math", {"data": "math", "source": str(DATA / "math"), "split": "test"}),
        ("strict-math", {"data": "arithmetic", "num_tasks": 50, "digits": 3}),
    ],
)
async def test_the_gold_solution_of_every_example_earns_all(name: str, args: dict):
    environment = load_environment(name, args)
    tasks = tasks_of(environment, name)
    assert len(tasks) == 50
    for task in tasks:
        rewards = await worth(environment, task, str(environment.gold(task, [])))
        assert rewards["correct"] == 1.0, task
        assert rewards.get("format", 0.2) == 0.2
    await environment.close()


async def test_a_problem_of_aime_is_answered_by_its_number_however_it_is_written(tmp_path: Path):
    path = tmp_path / "aime.jsonl"
    path.write_text('{"id": 7, "problem": "How many?", "answer": 33, "year": 2024}\n')
    for name, args in (("math", {}), ("strict-math", {"data": "math"})):
        environment = load_environment(name, {**args, "source": str(path)})
        (task,) = tasks_of(environment, name)
        said = "so \\boxed{{{}}}" if name == "math" else STRICT.replace("{}", "hm", 1)
        for answer, reward in (("33", 1.0), ("033", 1.0), ("34", 0.0), ("3", 0.0)):
            assert (await worth(environment, task, said.format(answer)))["correct"] == reward
        assert (await worth(environment, task, str(environment.gold(task, []))))["correct"] == 1.0
        await environment.close()


async def test_a_right_answer_outside_a_box_is_none():
    environment = load_environment("gsm8k", {"source": str(DATA / "gsm8k"), "split": "test"})
    for task in tasks_of(environment, "gsm8k"):
        answer = task.data["answer"]
        assert await worth(environment, task, f"The answer is {answer}.") == {"correct": 0.0}
        assert await worth(environment, task, f"so \\boxed{{{int(answer) + 1}}}") == {"correct": 0.0}
        assert await worth(environment, task, f"so \\boxed{{{answer}}}") == {"correct": 1.0}


async def test_the_strict_format_is_paid_by_itself_and_an_answer_in_another_form_is_none():
    environment = load_environment("strict-math", {"data": "arithmetic", "num_tasks": 5})
    task = tasks_of(environment, "strict-math")[0]
    answer = task.data["answer"]
    assert await worth(environment, task, STRICT.format("hm", answer)) == {"correct": 1.0, "format": 0.2}
    assert await worth(environment, task, STRICT.format("hm", "x")) == {"correct": 0.0, "format": 0.2}
    assert await worth(environment, task, f"\\boxed{{{answer}}}") == {"correct": 0.0, "format": 0.0}
    assert await worth(environment, task, STRICT.format("hm", answer) + " Done.") == {"correct": 0.0, "format": 0.0}


async def test_the_strict_prompt_asks_for_its_own_tags():
    tags = {"opening": "<redacted_thinking>", "closing": "</redacted_thinking>"}
    environment = load_environment("strict-math", {"data": "arithmetic", "num_tasks": 5, **tags})
    task = tasks_of(environment, "strict-math")[0]
    (rollout,), script = await play(environment, task, lambda messages: environment.gold(task, messages))
    assert "between <redacted_thinking> and </redacted_thinking>" in script.calls[0][0][0]["content"]
    assert rollout.rewards == {"correct": 1.0, "format": 0.2}
    assert rollout.metrics == {"thinking_words": 1.0}


def test_math_can_be_narrowed_to_levels():
    environment = load_environment("math", {"source": str(DATA / "math"), "split": "test", "levels": [1, 5]})
    assert {task["level"] for task in environment.tasks()} == {1, 5}


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("gsm8k", {"sauce": "x"}, "sauce"),
        ("math", {"sauce": "x"}, "sauce"),
        ("strict-math", {"sauce": "x"}, "sauce"),
        ("strict-math", {"data": "arithmetic", "digits": 0}, "digits"),
        ("strict-math", {"opening": "think", "closing": "/think"}, "closing"),
        ("gsm8k", {"demonstrate_mistakes": 7}, "demonstrate_mistakes"),
    ],
)
def test_wrong_args_are_refused_by_name(name: str, args: dict, key: str):
    with refused(EnvironmentNotFound, key=f"args.{key}"):
        load_environment(name, args)


@pytest.mark.parametrize("name", ["gsm8k", "math", "strict-math"])
def test_data_is_read_when_the_tasks_are_asked_for(name: str, tmp_path: Path):
    environment = load_environment(name, {"source": str(tmp_path / "absent.jsonl")})
    with refused(DataError, file=tmp_path / "absent.jsonl"):
        environment.tasks()


def test_the_tasks_are_the_same_list_each_time():
    for name, args in (("gsm8k", {"source": str(DATA / "gsm8k"), "split": "test"}), ("arithmetic", {}), ("copy", {})):
        environment = load_environment(name, args)
        assert list(environment.tasks()) == list(environment.tasks()) != []


def test_unknown_data_is_refused():
    with refused(EnvironmentNotFound, key="args.data", value="aime"):
        load_environment("strict-math", {"data": "aime"})
