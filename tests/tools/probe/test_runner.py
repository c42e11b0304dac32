"""Scripted completions in a process that environments may block, crash or end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.environments.base import evenly_spaced
from headrace.environments.fault import dumped_code_location, user_code_location
from headrace.errors import BadInput
from headrace.rollout.types import Task
from headrace.tools.probe.completions import BY_NAME, COMPLETIONS
from headrace.tools.probe.report import ProbeEpisode, ProbeReport
from headrace.tools.probe.runner import (
    MEMORY_MB,
    ProbeFailed,
    ProbeRunner,
    first_difference,
    probe,
    same_reward,
)
from headrace.tools.probe.worker import MAX_REPLIES
from tests.tools.probe.probed import ASKING, BIDDING, CALLING, DUEL, FLAWED, FLAWS

TIMEOUT = 1.0


@asynccontextmanager
async def probe_runner(identifier: str, load_timeout: float = 60.0, **args: Any) -> AsyncIterator[ProbeRunner]:
    with tempfile.TemporaryDirectory() as scratch:
        opened = ProbeRunner(identifier, args, TIMEOUT, Path(scratch), load_timeout)
        try:
            yield opened
        finally:
            await opened.kill()


@pytest.fixture(scope="module")
def episodes() -> dict[str, ProbeEpisode]:
    """Episodes by flaw, each with a completion that triggers the flaw."""
    names = dict.fromkeys(FLAWS, "forged feedback") | {
        "exit": "empty",
        "regex": "bait for regexes",
        "contains": "gold among 20 wrong",
        "": "gold",
    }

    async def run_all() -> dict[str, ProbeEpisode]:
        async with probe_runner(FLAWED) as runner:
            order = sorted(FLAWS, key=lambda flaw: flaw == "")  # the healthy one runs last, after kills
            return {flaw: await runner.run(BY_NAME[names[flaw]], FLAWS.index(flaw)) for flaw in order}

    return asyncio.run(run_all())


def test_an_exception_is_named_with_the_line_of_the_environment(episodes: dict[str, ProbeEpisode]):
    problem = episodes["crash"].problem
    assert problem is not None
    assert (problem.reason, episodes["crash"].reward) == ("exception", None)
    assert problem.text.startswith("ValueError: invalid literal for int()")
    assert "probe/probed.py:" in problem.place
    assert len(problem.text) < 400


def test_an_exception_of_a_library_is_named_with_the_line_that_called_it(episodes: dict[str, ProbeEpisode]):
    problem = episodes["library"].problem
    assert problem is not None
    assert "probe/probed.py:" in problem.place


def test_a_blocking_regular_expression_is_killed_and_its_line_named(
    episodes: dict[str, ProbeEpisode],
):
    episode = episodes["regex"]
    assert episode.problem is not None
    assert episode.problem.reason == "blocked"
    assert "probe/probed.py:" in episode.problem.place
    assert episode.blocked_seconds == TIMEOUT
    assert episode.cpu_seconds is None


def test_an_episode_that_ignores_cancellation_is_killed_and_reported(episodes: dict[str, ProbeEpisode]):
    episode = episodes["stubborn"]
    assert episode.problem is not None
    assert (episode.problem.reason, episode.problem.place) == ("not_cancelled", "")
    assert (episode.blocked_seconds, episode.cpu_seconds) == (0, None)


def test_an_episode_that_waits_too_long_is_ended_and_has_not_blocked_the_loop(episodes: dict[str, ProbeEpisode]):
    episode = episodes["wait"]
    assert episode.problem is not None
    assert (episode.problem.reason, episode.problem.place) == ("timeout", "")  # it was not killed


def test_a_scorer_that_blocks_the_loop_is_noticed(episodes: dict[str, ProbeEpisode]):
    episode = episodes["sleep"]
    assert episode.problem is None
    assert episode.blocked_seconds > 0.1


def test_a_reward_that_is_no_number_is_a_problem(episodes: dict[str, ProbeEpisode]):
    assert episodes["nan"].problem is not None
    assert episodes["nan"].problem.reason == "invalid_reward"


def test_a_reason_of_the_environments_own_is_kept(episodes: dict[str, ProbeEpisode]):
    assert episodes["refuse"].problem is not None
    assert episodes["refuse"].problem.reason == "not_for_me"


def test_an_environment_that_ends_its_process_costs_one_episode(episodes: dict[str, ProbeEpisode]):
    problem = episodes["exit"].problem
    assert problem is not None
    assert problem.reason == "process"
    assert "exit status 3" in problem.text
    assert episodes[""].reward == 1.0


def test_what_an_environment_may_write_to_is_limited(episodes: dict[str, ProbeEpisode]):
    limit = episodes["memory"].reward
    assert limit is not None
    assert 0 < limit <= MEMORY_MB << 20


def test_a_scorer_that_searches_the_answer_is_fooled(episodes: dict[str, ProbeEpisode]):
    assert episodes["contains"].rewards == {"right": 1.0}


async def test_the_exchange_is_kept_and_a_conversation_without_an_end_is_given_one():
    async with probe_runner(CALLING) as runner:
        gold = await runner.run(BY_NAME["gold"], 0, keep=True)
        endless = await runner.run(BY_NAME["gold"], 1)
        wrong = await runner.run(BY_NAME["wrong arguments"], 0)
    assert gold.exchange is not None
    assert [message["role"] for message in gold.exchange.prompt] == ["user"]
    assert [message["role"] for message in gold.exchange.conversation] == ["user", "assistant", "tool", "assistant"]
    assert gold.exchange.tools[0]["function"]["name"] == "press"
    assert (gold.rewards, gold.offers_tools) == ({"found": 1.0, "brief": 0.1}, True)
    assert (gold.replies, gold.endless) == (2, False)
    assert (endless.replies, endless.endless) == (MAX_REPLIES, True)
    assert (wrong.reward, wrong.problem) == (0.0, None)
    assert (gold.says_gold, wrong.says_gold) == (True, False)


async def test_scored_groups_also_have_a_gold_and_an_empty_episode():
    async with probe_runner(DUEL) as runner:
        earned = [(await runner.run(BY_NAME[name], 0)).reward for name in ("gold", "empty", "gold 1,000 times")]
    assert earned == [1.0, 0.0, 1.0]


async def test_a_whole_probe_of_a_healthy_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    activities: list[str] = []
    report, tasks = await probe(
        ASKING,
        {"path": str(tmp_path / "closed")},
        examples=2,
        sampled=3,
        progress=lambda activity, *_: activities.append(activity),
    )
    assert (report.opening.tasks, report.duplicates, report.first_difference) == (4, 1, None)
    assert (report.closing, report.unstable) == (None, [])
    assert (tmp_path / "closed").read_text() == "closed\n"
    assert [episode.task for episode in report.of("gold")] == report.played == [0, 1, 2, 3]
    assert [episode.task for episode in report.of("10 MB")] == [0, 2]
    assert {episode.completion: episode.reward for episode in report.episodes} == {
        completion.name: float(completion.name == "gold")
        for completion in COMPLETIONS
        if completion.kind != "tool call"
    }
    assert tasks == [Task(ASKING, {"number": number}) for number in (12, 34, 56)]
    assert activities[2:4] == ["gold", "mistake"]
    assert capfd.readouterr().out == ""  # what the environment prints goes elsewhere


@pytest.fixture(scope="module")
def careless() -> ProbeReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        report, _ = asyncio.run(probe(ASKING, {"flaw": "careless"}, examples=1, tasks=2))
        return report


def test_without_gold_all_other_completions_run(careless: ProbeReport):
    names = {episode.completion for episode in careless.episodes}
    assert names == {c.name for c in COMPLETIONS if not c.from_gold and c.kind != "tool call"}


def test_tasks_in_the_order_of_a_set_are_noticed(careless: ProbeReport):
    assert careless.first_difference is not None


def test_a_random_reward_is_noticed(careless: ProbeReport):
    assert set(careless.unstable) == {episode.completion for episode in careless.episodes}


def test_an_exception_of_close_is_reported(careless: ProbeReport):
    assert careless.closing is not None
    assert careless.closing.text == "RuntimeError: nothing is open"


async def test_what_several_agents_earn_is_kept_apart():
    async with probe_runner(BIDDING) as runner:
        gold = await runner.run(BY_NAME["gold"], 0)
    assert (gold.earned, gold.reward, gold.rewards) == ([1.0, -1.0], 0.0, {"won": 0.0})


def test_agents_that_change_places_earn_something_else_though_their_mean_is_the_same():
    once, again = (ProbeEpisode("gold", 0, {"won": 0.0}, 0.0, earned) for earned in ([1.0, -1.0], [-1.0, 1.0]))
    assert same_reward(once, once)
    assert not same_reward(once, again)


async def test_an_environment_that_takes_too_long_to_load_is_refused_with_the_place():
    async with probe_runner(ASKING, load_timeout=1.0, flaw="slow tasks") as runner:
        with pytest.raises(ProbeFailed, match=r"probed\.py:\d+"):
            await runner.load()


async def test_an_environment_that_cannot_be_loaded_is_refused():
    async with probe_runner("no-such-environment") as runner:
        with pytest.raises(BadInput, match="no-such-environment"):
            await runner.load()


def test_the_tasks_that_are_played_are_spread_evenly():
    assert evenly_spaced(2000, 4) == [0, 500, 1000, 1500]
    assert evenly_spaced(3, 16) == [0, 1, 2]
    assert evenly_spaced(5, 2) == [0, 2]


def test_the_first_difference_of_keys():
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("abc", "ab") == 2


def test_the_line_to_blame_is_the_innermost_of_the_environments_own_folder():
    frames = [("/lib/python3/re.py", 5), ("/home/me/.venv/site-packages/x.py", 6), ("/home/me/env.py", 7)]
    assert user_code_location(frames, "/home/me") == "/home/me/env.py:7"
    assert user_code_location(frames, "/elsewhere") == "/lib/python3/re.py:5"
    assert user_code_location([], "/home/me") == ""
    trace = (
        "Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n"
        '  File "/lib/python3/threading.py", line 9 in wait\n\nThread 0x2 (most recent call first):\n'
        '  File "/lib/python3/re.py", line 5 in match\n  File "/home/me/env.py", line 7 in score\n'
    )
    assert dumped_code_location(trace, "/home/me") == "/home/me/env.py:7"
