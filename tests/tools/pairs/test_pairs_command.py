"""`headrace pairs`: which rollouts become pairs, which tasks are held out, and what is refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main, parse, run_command
from headrace.config.dpo import DpoDataConfig
from headrace.errors import BadInput
from headrace.rollout.types import Message, Rollout, RolloutError
from headrace.trainer.sft_data import open_rows
from headrace.transport.rollout_files import write_rollouts
from headrace.transport.run_dir import RunDir

RUN = """
output_dir = "{root}"
max_steps = 3
seq_len = 1000
[model]
name = "/no/such/model"
[orchestrator]
batch_size = 12
group_size = 4
[[orchestrator.train.env]]
id = "reverse-text"
[[orchestrator.train.env]]
id = "calculator"
"""

Group = Callable[..., list[Rollout]]


def group(task: str, rewards: Sequence[float], env: str = "reverse-text", **others: Any) -> list[Rollout]:
    return [
        Rollout(
            env,
            task,
            f"group of {task}",
            episode=number,
            reward=reward,
            messages=[{"role": "user", "content": task}, {"role": "assistant", "content": f"{task} {number}"}],
            **others,
        )
        for number, reward in enumerate(rewards)
    ]


def write_run(root: Path, *steps: list[Rollout]) -> RunDir:
    root.mkdir()
    (run := RunDir(root)).config.write_text(RUN.format(root=root))
    for step, rollouts in enumerate(steps, 1):
        write_rollouts(run.rollouts, step, rollouts, [])
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]


def test_the_best_are_paired_with_the_worst_of_their_group_and_dpo_reads_them(tmp_path: Path):
    run = write_run(tmp_path / "run", group("a", [0.2, 1.0, 0.0, 0.9]) + group("b", [1.0, 1.0]), group("c", [0.0, 0.5]))
    assert main(["pairs", str(run.root)]) == 0
    rows = lines(run.root / "pairs.jsonl")
    assert answers(rows) == [("a 1", "a 2"), ("c 1", "c 0")]
    assert rows[0]["prompt"] == [{"role": "user", "content": "a"}]
    assert {"chosen_reward": 1.0, "rejected_reward": 0.0, "step": 1, "task_key": "a"}.items() <= rows[0].items()
    assert len(open_rows(DpoDataConfig(path=run.root / "pairs.jsonl"))) == 2

    main(["pairs", str(run.root), "--per-group", "4", "--output", str(tmp_path / "more.jsonl")])
    assert answers(lines(tmp_path / "more.jsonl")) == [("a 1", "a 2"), ("a 3", "a 0"), ("c 1", "c 0")]
    main(["pairs", str(run.root), "--per-group", "4", "--min-gap", "0.6", "--steps", "1"])
    assert answers(lines(run.root / "pairs.jsonl")) == [("a 1", "a 2"), ("a 3", "a 0")]


def test_failed_rollouts_are_left_out_and_those_cut_off_are_never_chosen(tmp_path: Path):
    cut = group("a", [1.0, 0.5, 0.0])
    cut[0].truncated = cut[2].truncated = True
    failed = group("b", [1.0, 0.5, 0.0])
    failed[0].error = RolloutError("environment")
    other = group("c", [1.0, 0.0])
    other[0].agent, other[1].trainable = "helper", False
    run = write_run(tmp_path / "run", cut + failed + other)
    assert main(["pairs", str(run.root)]) == 0
    assert answers(lines(run.root / "pairs.jsonl")) == [("a 1", "a 2"), ("b 1", "b 2")]


def test_no_task_is_in_both_files_and_each_stays_on_its_side(tmp_path: Path):
    names = [str(number) for number in range(60)]
    steps = [[r for name in names[start : start + 30] for r in group(name, [1.0, 0.0])] for start in (0, 30, 15)]
    run = write_run(tmp_path / "run", *steps)

    def tasks(*options: str) -> list[set[str]]:
        assert main(["pairs", str(run.root), "--held-out", "0.3", *options]) == 0
        files = (run.root / name for name in ("pairs.jsonl", "pairs-held-out.jsonl"))
        return [{row["task_key"] for row in lines(file)} for file in files]

    trained, held_out = tasks()
    assert trained | held_out == set(names)
    assert not trained & held_out
    assert 8 <= len(held_out) <= 30
    first, some = tasks("--steps", "1")
    assert first == trained & set(names[:30])
    assert some == held_out & set(names[:30])


def test_roles_and_tool_calls_are_kept_and_the_tools_of_the_task_come_from_the_environment(tmp_path: Path):
    from headrace.environments.base import tasks_of
    from headrace.environments.registry import load_environment

    task = tasks_of(load_environment("calculator", {}), "calculator")[0]
    call = {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": {"expression": "1+1"}}}

    def talk(result: str, final: str) -> list[Message]:
        return [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": "1"},
            {"role": "assistant", "content": final},
        ]

    rollouts = group(task.key, [0.0, 1.0], env="calculator")
    rollouts[0].messages, rollouts[1].messages = talk("2", "3"), talk("2", "2")
    run = write_run(tmp_path / "run", rollouts)
    assert main(["pairs", str(run.root), "--env", "calculator"]) == 0
    (row,) = lines(run.root / "pairs.jsonl")
    assert row["prompt"] == talk("2", "")[:3]
    assert row["chosen"] == talk("2", "2")[3:]
    assert [tool["function"]["name"] for tool in row["tools"]]
    rollouts[0].messages = talk("two", "3")
    write_rollouts(run.rollouts, 1, rollouts, [])
    main(["pairs", str(run.root)])
    assert lines(run.root / "pairs.jsonl")[0]["prompt"] == talk("2", "")[:1]  # the answer led to another result


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--env", "other"], "--env"),
        (["--steps", "7"], "--steps"),
        (["--min-gap", "2"], "RUN"),
        (["--held-out", "1.5"], "--held-out"),
        (["--held-out", "1e-9"], "--held-out"),
    ],
)
def test_what_gives_no_pairs_is_refused_and_nothing_is_written(tmp_path: Path, options: list[str], key: str):
    run = write_run(tmp_path / "run", group("a", [1.0, 0.0]))
    with pytest.raises(BadInput) as refusal:
        run_command(parse(["pairs", str(run.root), *options]))
    assert refusal.value.key == key
    assert not list(run.root.glob("pairs*"))
