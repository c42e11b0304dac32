"""Families of reasoning-gym as environments: what is loaded, what is refused, and that no answer breaks a run."""

import json
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import parse
from headrace.environments.adapters import import_library
from headrace.environments.adapters.reasoning_gym import ReasoningGym
from headrace.environments.adapters.reasoning_gym_family import (
    Family,
    Request,
    from_json_values,
    generate_tasks,
    is_held_out,
    score,
    tasks_of_family,
    to_json_values,
)
from headrace.environments.base import tasks_of
from headrace.environments.registry import load_environment
from headrace.environments.rewards import base as rewards
from headrace.environments.script import play
from headrace.rollout.types import Rollout, Task
from tests.refusals import refused

PAGE = (Path(__file__).parents[3] / "docs/how-to/reasoning-gym.md").read_text()


def request(family: str, split: str = "train", num_tasks: int = 8, seed: int = 0, **settings: Any) -> Request:
    return Request(family, settings, split, num_tasks, seed)


def tasks(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """As the process makes them that an environment starts, in this one."""
    return [line["task"] for line in generate_tasks(request(*args, **kwargs)) if "task" in line]


async def played(environment: ReasoningGym, data: dict[str, Any], reply: str) -> Rollout:
    (rollout,), _ = await play(environment, Task("gym", data), lambda messages: reply)
    return rollout


@pytest.mark.parametrize(
    "family", ["knights_knaves", "chain_sum", "rearc", "codeio", "polynomial_multiplication", "binary_matrix"]
)
def test_tasks_are_json_and_gold_earns_everything_after_the_journey(family: str):
    for task in tasks(family):
        arrived = json.loads(json.dumps(task))
        assert arrived == task
        assert score(family, {}, arrived["answer"], arrived) == 1.0


def test_settings_reach_the_family():
    for people in (2, 5):
        (task, *_) = tasks("knights_knaves", n_people=people)
        assert len(task["metadata"]["names"]) == people
    lists_and_dates = {"min_date": "2024-02-01", "max_date": "2024-03-01", "max_date_difference_days": 5}
    dates = tasks("time_intervals", task_types=["date"], **lists_and_dates)
    assert {task["metadata"]["task_type"] for task in dates} == {"date"}
    assert all("2024" in task["question"] for task in dates)
    differences = tasks("complex_arithmetic", operations=["-"], operations_weights=[1.0])
    assert {task["metadata"]["operation"] for task in differences} == {"-"}


@pytest.mark.parametrize(
    ("family", "settings", "key", "value", "words"),
    [
        ("knights_knaves", {"n_peple": 3}, "args.n_peple", 3, "mean n_people?"),
        ("knights_knaves", {"n_people": 0}, "args", {"n_people": 0}, "Number of people must be at least 1"),
        ("knights_knaves", {"size": 9}, "args.size", 9, "num_tasks"),
        ("knigths_knaves", {}, None, "reasoning-gym:knigths_knaves", "mean knights_knaves?"),
        ("composite", {}, None, "reasoning-gym:composite", "families"),
        ("graph_color", {}, None, "reasoning-gym:graph_color", "16 of 16 tasks"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(
    family: str, settings: dict[str, Any], key: str | None, value: Any, words: str
):
    with refused(key=key, value=value) as refusal:
        tasks(family, **settings)
    assert words in str(refusal.value)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with refused() as error:
        Family("chain_sum", {})
    assert "headrace[reasoning-gym]" in error.value.fix


def test_no_question_is_in_both_splits_whatever_the_seed():
    train = {task["question"] for seed in (0, 1) for task in tasks("coin_flip", num_tasks=500, seed=seed)}
    held_out = {task["question"] for task in tasks("coin_flip", split="eval", num_tasks=500)}
    assert len(train) > len(held_out) > 0
    assert not train & held_out
    assert all(map(is_held_out, held_out))


def test_seeds_give_other_tasks_and_more_tasks_begin_with_the_same():
    first, second = tasks("chain_sum"), tasks("chain_sum", seed=1)
    assert not {task["question"] for task in first} & {task["question"] for task in second}
    assert tasks("chain_sum", num_tasks=20)[:8] == first


def test_another_process_makes_the_same_tasks_and_says_where_there_are_no_more(caplog: pytest.LogCaptureFixture):
    environment = load_environment("reasoning-gym:coin_flip", {"split": "eval", "num_tasks": 500})
    found = tasks_of(environment, "coins")
    assert [task.data for task in found] == tasks("coin_flip", split="eval", num_tasks=500)
    assert f"only {len(found)} different questions for eval, not 500" in caplog.text


async def test_an_answer_that_its_scorer_fails_on_earns_nothing_and_is_counted(monkeypatch: pytest.MonkeyPatch):
    (task, *_) = tasks("binary_matrix")
    environment = ReasoningGym("binary_matrix", terse=True)
    try:
        right = await played(environment, task, task["answer"])
        wrong = await played(environment, task, "[[0]]")
        ends_process = await played(environment, task, "__import__('sys').exit(1)")
        monkeypatch.setattr(environment._reward, "_timeout", 0.2)
        monkeypatch.setattr(rewards, "WALL_FACTOR", 1.0)
        never_ends = await played(environment, task, "9**9**9**9")
    finally:
        await environment.close()
    assert (right.rewards, right.metrics) == ({"score": 1.0}, {"solved": 1.0, "answered": 1.0, "scorer_error": 0.0})
    assert (wrong.rewards, wrong.metrics["scorer_error"]) == ({"score": 0.0}, 0.0)
    for rollout in (ends_process, never_ends):
        assert rollout.error is None
        assert (rollout.rewards, rollout.metrics["scorer_error"]) == ({"score": 0.0}, 1.0)


def test_a_task_that_cannot_be_made_or_has_no_gold_answer_is_left_out(monkeypatch: pytest.MonkeyPatch):
    kind = type(Family("chain_sum", {}).build_dataset(0, 1))
    plain = kind.__getitem__

    def broken(self: Any, index: int) -> dict[str, Any]:
        if index % 5 == 0:
            raise KeyError("no such number")
        return plain(self, index) | ({"answer": None} if index % 5 == 1 else {})

    monkeypatch.setattr(kind, "__getitem__", broken)
    *lines, end = generate_tasks(request("chain_sum", num_tasks=30))
    assert len(lines) == 30
    assert all(line["task"]["metadata"]["source_index"] % 5 > 1 for line in lines)
    assert end["why"] == "making it raises KeyError: 'no such number'"
    assert end["left_out"] >= 20


@pytest.mark.parametrize("value", [float("nan"), -1, 1.5, None])
def test_a_score_that_is_none_is_a_failure_of_the_scorer(value: Any, monkeypatch: pytest.MonkeyPatch):
    (task, *_) = tasks("chain_sum")
    score("chain_sum", {}, "1", task)
    kind = type(Family("chain_sum", {}).build_dataset(0, 1))
    monkeypatch.setattr(kind, "score_answer", lambda self, answer, entry: value)
    with pytest.raises((ValueError, TypeError)):
        score("chain_sum", {}, "1", task)


async def test_the_answer_stands_between_tags_once():
    environment = ReasoningGym("chain_sum", system="Be brief.")
    task = Task("gym", {"question": "2 + 2?", "answer": "4", "metadata": {}})
    assert environment.gold(task, []) == "<answer>4</answer>"
    assert environment.mistake(task, [], random.Random(0)) not in ("4", "<answer>4</answer>")
    for reply in ("4", "<answer>4</answer> or <answer>5</answer>", "<answer>4", ""):
        (rollout,), script = await play(environment, task, lambda messages, reply=reply: reply)
        assert rollout.rewards == {"score": 0.0}
        assert (rollout.metrics["answered"], rollout.metrics["scorer_error"]) == (0.0, 0.0)
    ((messages, _),) = script.calls
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"].startswith("2 + 2?\n\nThink step by step.")
    terse = ReasoningGym("chain_sum", terse=True)
    assert (terse.question(task.data), terse.gold(task, [])) == ("2 + 2?", "4")


def test_what_json_does_not_have_comes_back_as_it_was():
    held = {
        "grid": ((0, 1), (2, 3)),
        "by number": {1: "one", (2, 3): None},
        "words": {"b", "a"},
        "large": 2**80,
        "marker": {"(tuple)": [1]},
        "plain": [True, 0.5, "x", {"y": []}],
    }
    travelled = json.loads(json.dumps(to_json_values(held)))
    assert from_json_values(travelled) == held
    assert type(from_json_values(travelled)["grid"][0]) is tuple
    with pytest.raises(TypeError, match="complex"):
        to_json_values({"z": 1j})


def test_the_page_shows_what_runs_and_lists_every_family():
    (commands, *_) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    probing = [line.split()[1:] for line in commands.splitlines() if line.startswith("headrace ")]
    assert [parse(command).command for command in probing] == ["probe"]
    (run_file,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    slots = tomllib.loads(run_file)["orchestrator"]
    environments = [load_environment(env["id"], env.get("args", {})) for slot in slots.values() for env in slot["env"]]
    assert [type(environment) for environment in environments] == [ReasoningGym] * 3
    listed = re.findall(r"^\| (\w+) \|", PAGE.partition("## Every family")[2], re.MULTILINE)
    assert set(listed) - {"family"} == set(import_library("reasoning_gym", "reasoning-gym").factory.DATASETS)


@pytest.mark.full
@pytest.mark.parametrize("family", ["polynomial_multiplication", "isomorphic_strings", "word_ladder", "codeio"])
def test_families_that_draw_from_sets_give_the_same_tasks_in_every_process(family: str):
    assert tasks_of_family(request(family)) == tasks_of_family(request(family))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_family_is_loaded_or_refused_with_its_reason(tmp_path: Path):
    script = Path(__file__).parents[3] / "benchmarks/environments/families.py"
    table = tmp_path / "families.md"
    subprocess.run([sys.executable, script, "--output", table], check=True, timeout=1800)
    rows = [line.split(" | ") for line in table.read_text().splitlines()[2:]]
    assert len(rows) == 106
    refused = {name.removeprefix("| ") for name, loads, *_ in rows if loads.startswith("refused")}
    assert refused == {"boxnet", "composite", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    assert {gold for _, loads, gold, *_ in rows if not loads.startswith("refused")} == {"1"}
