"""What docs/how-to/rewards.md shows is what runs, and its table is that of the registry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from headrace.environments import environment
from headrace.environments.base import Environment, tasks_of
from headrace.environments.hackable.providers import local
from headrace.environments.registry import load_environment
from headrace.environments.rewards.base import REWARDS
from headrace.environments.rewards.running import Rewards
from headrace.environments.script import play
from headrace.rollout.types import Rollout
from tests.refusals import refused

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/rewards.md").read_text()
COMPLETION, GROUP = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
(TOML,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)


def words():
    yield {"word": "mill", "answer": "MILL"}
    yield {"word": "river", "answer": "RIVER"}


TRL = """
def upper(completions, word, **columns):
    return [float(completion == each.upper()) for completion, each in zip(completions, word)]


def right(prompts, completions, answer, **columns):
    rows = zip(prompts, completions, answer)
    return [float(prompt[0]["role"] == "user" and reply[0]["content"] == gold) for prompt, reply, gold in rows]
"""


@environment(data=words, rewards={})
def shout(row):
    return f"Write {row['word']} in capitals."


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, in which the process runs."""
    (tmp_path / "few_commas.py").write_text(COMPLETION)
    (tmp_path / "shortest.py").write_text(GROUP)
    (tmp_path / "trl.py").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def group_of(made: Environment, *texts: str) -> list[Rollout]:
    """Rollouts of the second task, scored as a run does."""
    task = tasks_of(made, "shout")[1]
    rollouts = [(await play(made, task, lambda messages, text=text: text))[0][0] for text in texts]
    if made.scores_groups:
        await made.score_group(rollouts)
    await made.close()
    return rollouts


async def test_the_rewards_of_an_environment_can_be_named_in_its_run_file(beside: Path):
    (section,) = tomllib.loads(TOML)["orchestrator"]["train"]["env"]
    (rollout,) = await group_of(load_environment(f"{__name__}:shout", section["args"]), "RIVER,")
    assert rollout.rewards == {"exact": 0.0, "commas": 0.1}


async def test_a_hackable_run_takes_the_same_function(beside: Path):
    tree = yaml.safe_load(YAML)
    args = {"provider": "arithmetic", "objective_kwargs": tree["objective"]["kwargs"]}
    made = load_environment("hackable", {**args, "reward_kwargs": tree["rewards"]["kwargs"]})
    rollouts = await group_of(made, "a", "a, b")
    assert [rollout.rewards for rollout in rollouts] == [{"objective": 0.2}, {"objective": 0.1}]


async def test_a_group_reward_scores_when_all_episodes_are_in(beside: Path):
    table = {"short": {"name": "shortest.py:shortest", "weight": 0.5}, "exact": "exact_match_reward"}
    made = load_environment(f"{__name__}:shout", {"rewards": table})
    assert made.scores_groups
    rollouts = await group_of(made, "RIVER", "RIVERS")
    assert [rollout.rewards for rollout in rollouts] == [{"exact": 1.0, "short": 0.5}, {"exact": 0.0, "short": 0.0}]


async def test_a_group_reward_that_fails_marks_the_group_with_its_reason(beside: Path):
    (beside / "broken.py").write_text(GROUP.replace("min(map(len, texts))", "data[0]['no such field']"))
    made = load_environment(f"{__name__}:shout", {"rewards": ["broken.py:shortest"]})
    assert [r.error and r.error.reason for r in await group_of(made, "a", "b")] == ["reward_failed"] * 2


async def test_an_environment_takes_the_batch_signature_and_gives_it_prompt_and_answer(beside: Path):
    code = "def batch(prompts, completions, answers, infos):\n    return [float(p.count(i['word']) and a == c) for "
    (beside / "batch.py").write_text(code + "p, c, a, i in zip(prompts, completions, answers, infos)]\n")
    made = load_environment(f"{__name__}:shout", {"rewards": ["batch.py:batch"]})
    assert [r.rewards for r in await group_of(made, "RIVER", "no")] == [{"batch": 1.0}, {"batch": 0.0}]


async def test_a_reward_of_trl_gets_the_columns_of_the_data_by_keyword(beside: Path):
    made = load_environment(f"{__name__}:shout", {"rewards": {"upper": {"name": "trl.py:upper", "weight": 0.5}}})
    assert [r.rewards for r in await group_of(made, "RIVER", "no")] == [{"upper": 0.5}, {"upper": 0.0}]


async def test_a_reward_of_trl_sees_messages_where_the_prompts_are_messages(beside: Path):
    (beside / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}\n' * 2)
    (sample, _) = local(str(beside / "data.jsonl"), instructions="")
    assert sample.prompt == "2+2"
    scores = await Rewards(["trl.py:right"]).score_group(["4", "5"], [sample.data, sample.data])
    assert scores == {"right": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"exact": "exact_match"}, "rewards.exact"),
        ({"commas": "no_such_file.py:few_commas"}, "rewards.commas"),
        ({"commas": {"name": "few_commas.py:few_commas", "kwargs": {"wait": 1}}}, "rewards.commas.kwargs.wait"),
        ({"commas": {"reward": "few_commas.py:few_commas"}}, "rewards.commas.reward"),
        ({"upper": {"name": "trl.py:upper", "kwargs": {"word": "a column"}}}, "rewards.upper.kwargs.word"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_by_its_key(beside: Path, table: object, key: str):
    with refused(key=f"env.0.args.{key}"):
        load_environment(f"{__name__}:shout", {"rewards": table}, "env.0.id")


def test_the_table_of_the_page_is_that_of_the_registry():
    rows = [f"| `{n}` | {REWARDS.description(n)} | {', '.join(REWARDS.options(n)) or 'none'} |" for n in REWARDS.names]
    assert DOCS.endswith("| name | score | options |\n|---|---|---|\n" + "\n".join(rows) + "\n")
