"""`examples/tool-calls`: what an answer earns, which tasks there are, and that nothing but a right call earns all."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from headrace.environments.base import tasks_of
from headrace.environments.script import play
from headrace.rollout.types import Task
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.probe.findings import list_findings
from headrace.tools.probe.runner import probe

EXAMPLE = Path(__file__).parents[2] / "examples/tool-calls"
GOLD = {"name": "find_hotel", "arguments": {"city": "Oslo", "nights": 3, "stars": 4}}


def call(**changed: object) -> str:
    return f"<tool_call>{json.dumps([GOLD | changed])}</tool_call>"


ROW = {"function": "find_hotel", "example": ["Find a hotel.", "?"], "request": "?", "answer": call()}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)
    import tool_calls

    return tool_calls


@pytest.mark.parametrize(
    ("text", "tag", "form", "name", "arguments", "exact"),
    [
        (call(), 0.2, 0.2, 0.2, 0.4, 1),
        (f" {call()}\n", 0.2, 0.2, 0.2, 0.4, 1),
        (call(arguments={"city": "Oslo", "nights": 3}), 0.2, 0.2, 0.2, 0.4 * 2 / 3, 0),
        (call(arguments={"city": "Oslo", "nights": "3", "stars": 4}), 0.2, 0.2, 0.2, 0.4 * 2 / 3, 0),
        (call(arguments={**GOLD["arguments"], "day": 1}), 0.2, 0.2, 0.2, 0.4 * 3 / 4, 0),  # type: ignore[dict-item]
        (call(arguments={}), 0.2, 0.2, 0.2, 0, 0),
        (call(name="set_timer"), 0.2, 0.2, 0, 0, 0),
        (call(arguments=[]), 0.2, 0, 0, 0, 0),
        ("<tool_call>[]</tool_call>", 0.2, 0, 0, 0, 0),
        ("<tool_call>find_hotel</tool_call>", 0.2, 0, 0, 0, 0),
        (call().replace("[", "").replace("]", ""), 0.2, 0, 0, 0, 0),
        (call().removesuffix("</tool_call>"), 0, 0, 0, 0, 0),
        (f"Of course: {call()}", 0, 0, 0, 0, 0),
        (call() + call(), 0, 0, 0, 0, 0),
        ("", 0, 0, 0, 0, 0),
    ],
)
async def test_every_part_of_a_call_has_its_credit(
    text: str, tag: float, form: float, name: float, arguments: float, exact: float, example: ModuleType
):
    (rollout,), _ = await play(example.tool_calls(), Task("tool_calls", ROW, "k"), lambda messages: text)
    assert rollout.rewards == pytest.approx({"tag": tag, "form": form, "name": name, "arguments": arguments})
    assert rollout.metrics["exact"] == exact


def test_what_is_held_out_is_never_trained_on(example: ModuleType):
    trained = tasks_of(example.tool_calls(num_tasks=500), "train")
    held_out = tasks_of(example.tool_calls(split="eval", num_tasks=500), "eval")
    assert len(trained) == len(held_out) == 500
    assert not {task.key for task in trained} & {task.key for task in held_out}


async def test_the_prompt_has_the_function_an_example_and_all_values_of_the_call(example: ModuleType):
    environment = example.tool_calls(num_tasks=100)
    for task in tasks_of(environment, "train"):
        _, script = await play(environment, task, lambda messages: "")
        (system, _, shown, request), _ = script.calls[0]
        (gold,) = json.loads(task.data["answer"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert f'"name": "{gold["name"]}"' in system["content"]
        assert f'"name": "{gold["name"]}"' in shown["content"]
        assert all(f'"{argument}"' in system["content"] for argument in gold["arguments"])
        assert all(str(value) in request["content"] for value in gold["arguments"].values())


async def test_a_probe_finds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    report, _ = await probe("tool_calls:tool_calls", {"num_tasks": 20}, examples=1, tasks=4)
    assert list_findings(report) == []


def test_the_run_file_loads():
    config, notices = load(RunConfig, [EXAMPLE / "rl.toml"])
    assert notices == []
    assert config.orchestrator.train.env[0].id == "tool_calls:tool_calls"
