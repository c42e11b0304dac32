"""What docs/how-to/hacking.md shows is what runs."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

from headrace.environments.hackable import build_objective, build_reward
from headrace.environments.hackable.objectives import TokenGrpo
from headrace.environments.hackable.registry import DATA_PROVIDERS, OBJECTIVES
from headrace.environments.rewards.base import REWARDS
from headrace.environments.rewards.running import FAILED, NOT_A_NUMBER, TIMED_OUT, WRONG_COUNT
from tests.environments.hackable.completions import scores_of, thought

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/hacking.md").read_text()
REWARD, DATA, OBJECTIVE, TRYING, *_ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
CHECK = """
from headrace.environments.hackable import Scorer, build_rewards
first, *rest = build_data_provider("squares", {"largest": 3}, seed=7)
assert (first.prompt, first.answer, first.info, len(rest)) == ("What is 1 squared?", "1", {"number": 1}, 2)
*_, last = build_data_provider("strict_squares", {"largest": 4})
assert last.answer == "16" and last.prompt.endswith("nothing else.\\n\\n4*4")
polite = build_objective("right_and_polite", {"politeness": 0.5})
scores = {"gsm8k_correctness_reward": [1.0, 1.0], "format_tag_reward": [1.0, 0.0]}
assert polite.combine_rewards(scores, [first] * 2) == [1.0, 0.0]
assert polite.extra_reward([first] * 2, ["yes please", "no"]) == [0.5, 0.0]
"""


def test_the_plugins_of_the_page_run_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for registry in (DATA_PROVIDERS, REWARDS, OBJECTIVES):  # what the page registers is not for other tests
        monkeypatch.setattr(registry, "_plugins", dict(registry._load_plugins()))
    file = tmp_path / "mine.py"
    file.write_text("\n".join((REWARD, DATA, OBJECTIVE, TRYING, CHECK)))
    runpy.run_path(str(file))
    right, wrong = capsys.readouterr().out.splitlines()
    assert right == "2.2 {'gsm8k_correctness_reward': 1.0, 'format_tag_reward': 1.0, 'few_commas': 0.2} None"
    assert wrong == "0.2 {'gsm8k_correctness_reward': 0.0, 'format_tag_reward': 0.0, 'few_commas': 0.2} None"


def test_every_plugin_that_ships_is_listed():
    rows = re.findall(r"^\| (?:data provider|reward|objective) \| .* \| (.*) \|$", DOCS, re.MULTILINE)
    listed = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    registries = (DATA_PROVIDERS, REWARDS, OBJECTIVES)  # which may also have plugins of examples that other tests load
    shipped = [{n for n in r.names if r.find(n).__module__.startswith("headrace.")} for r in registries]
    assert listed == shipped


def test_every_kwarg_of_the_objective_and_every_reason_is_explained():
    explained = set(re.findall(r"`(\w+)`", DOCS.partition("## token_grpo")[2]))
    assert set(inspect.signature(TokenGrpo).parameters) <= explained
    assert {FAILED, NOT_A_NUMBER, TIMED_OUT, WRONG_COUNT} == set(
        re.findall(r"^\| `(reward_\w+)` \| it", DOCS, re.MULTILINE)
    )


async def test_the_worked_group_comes_to_what_the_page_says():
    brief = await scores_of(build_reward("length_penalty_reward"), [thought(n) for n in (2, 4, 6, 12)])
    objective = build_objective("token_grpo", {"reward_mode": "weighted_length_penalty"})
    scores = dict(zip(objective.reward_names(), ([1.0] * 4, [1.0] * 4, brief), strict=True))
    assert objective.combine_rewards(scores, [None] * 4) == pytest.approx([2.33, 2.17, 2, 2], abs=0.005)
