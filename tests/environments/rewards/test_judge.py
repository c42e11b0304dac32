"""A model judges the answer: a real server that answers, stalls, refuses and lies."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.environments.base import EpisodeError
from headrace.environments.rewards import Judge, Rewards, judge
from headrace.environments.rewards.judge import AnswerCache, JudgeFailed, parse_score
from tests.environments.heartbeat import ticks_during
from tests.environments.hostile import HOSTILE
from tests.inference.openai_stand_in import OpenAIStandIn, completion, error
from tests.refusals import refused

PROMPT = "Question: {question}\nAnswer: {text}\nEnd with Score: X."
DATA = {"question": "What is 2 + 2?"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
async def server() -> AsyncIterator[OpenAIStandIn]:
    async with OpenAIStandIn() as server:
        yield server


@asynccontextmanager
async def judging(server: OpenAIStandIn, prompt: str = PROMPT, **options: Any) -> AsyncIterator[Judge]:
    reward = Judge(server.url, "wise", prompt, **options)
    yield reward
    await reward.close()


def contents(server: OpenAIStandIn) -> list[str]:
    return [asked["messages"][-1]["content"] for asked in server.asked]


async def test_the_judge_sees_the_answer_and_the_task_and_its_score_is_read(server: OpenAIStandIn):
    server.respond = lambda asked: "Almost.\n\nScore: 0.75"
    async with judging(server, system="Be strict.", max_tokens=50) as reward:
        assert await reward("4", DATA) == 0.75
    [asked] = server.asked
    assert asked == {
        "model": "wise",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Question: What is 2 + 2?\nAnswer: 4\nEnd with Score: X."},
        ],
        "temperature": 0.0,
        "max_tokens": 50,
    }


async def test_braces_in_values_stay_as_they_are(server: OpenAIStandIn):
    async with judging(server, "{{{text}}} of {question}, {list}") as reward:
        await reward("{question} {0} {{}} %s {text.__class__}", {"question": "{text}", "list": [1, {"ä": None}]})
    assert contents(server) == ['{{question} {0} {{}} %s {text.__class__}} of {text}, [1, {"ä": null}]']


@pytest.mark.parametrize("prompt", ["Is it good?", "{text} {", "{text} {}", "{text!r}", "{text:>30}"])
def test_a_prompt_that_cannot_work_is_refused_at_once(prompt: str):
    with refused(key="prompt", value=prompt):
        Judge("http://localhost:1/v1", "wise", prompt)


def test_what_to_give_on_failure_must_be_a_number():
    with refused(key="on_failure", value="zero"):
        Judge("http://localhost:1/v1", "wise", PROMPT, on_failure="zero")  # type: ignore[arg-type]


async def test_a_field_that_a_task_does_not_have_is_named(server: OpenAIStandIn):
    async with judging(server) as reward:
        with pytest.raises(EpisodeError, match=r"'judge'.*LookupError.*'question'.*'x'"):
            await Rewards([reward]).score("4", {"x": 1})
    assert server.asked == []


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 1", 1.0),
        ("score = .5", 0.5),
        ("**Score:** 0.25.", 0.25),
        ('{"score": 0.9}', 0.9),
        ("Score: 0.1 was my first thought. Score: 0.7", 0.7),
        ("**Score** 0.5", 0.5),
        ("Score (0-1): _0.5_", 0.5),
        ('{"score": 1, "final_score": 0}', 0.0),
        ("Score: 0.7. This score reflects what is missing.", 0.7),
        ("Score: 8/10", 0.8),
        ("Score: **8** / 10", 0.8),
        ("Score: 1 (out of 10)", 0.1),
        ("Score: 80 %", 0.8),
        ("Score: 1 means that it is right.\nScore: 0/10", 0.0),
        ("Score: 1 means that it is right.\nScore: zero", None),
        ("Score: 1 means that it is right.\nScore: -1", None),
        ("Score: 1\nOf 3 mistakes, none counts.", 1.0),
        ("Score: 1 out of ten", None),
        ("Score: 11/10", None),
        ("Score: 0/0", None),
        ("Score: 120%", None),
        ("Score: 1/10/2", None),
        ("Score: 0-1", None),
        ("Score: 0,5", None),
        ("Score: -1", None),
        ("Score: 7", None),
        ("Score: 1e-1", None),
        ("underscore: 1", None),
        ("I like it.", None),
        ("", None),
        ("score" * 100_000 + ":" * 100_000, None),
        ("score(" * 100_000, None),
    ],
)
def test_the_default_score_is_the_last_between_zero_and_one(answer: str, score: float | None):
    assert parse_score(answer) == score


async def test_a_score_may_be_read_otherwise(server: OpenAIStandIn):
    server.respond = lambda asked: "Grade 7 of 10"
    async with judging(server, parse=r"(\d+) of") as reward:
        assert await reward("4", DATA) == 7.0
    async with judging(server, parse=lambda answer: float("Grade" in answer)) as reward:
        assert await reward("4", DATA) == 1.0
    with refused(key="parse", value=r"\d+"):
        Judge(server.url, "wise", PROMPT, parse=r"\d+")
    with refused(key="parse", value="("):
        Judge(server.url, "wise", PROMPT, parse="(")


async def test_an_answer_without_a_score_is_a_failure_and_is_not_kept(server: OpenAIStandIn):
    answers = iter(["No idea.", "Score: 1"])
    server.respond = lambda asked: next(answers)
    async with judging(server) as reward:
        with pytest.raises(JudgeFailed, match=r"No idea\."):
            await reward("4", DATA)
        assert await reward("4", DATA) == 1.0
        assert (reward.counts["calls"], reward.counts["cached"], reward.counts["failures"]) == (2, 0, 1)


async def test_an_answer_that_was_cut_says_so(server: OpenAIStandIn):
    server.respond = lambda asked: web.json_response(completion("Score: 0.1", finish_reason="length"))
    async with judging(server) as reward:
        with pytest.raises(JudgeFailed, match="max_tokens"):
            await reward("4", DATA)


async def test_a_question_is_asked_once(server: OpenAIStandIn):
    server.hold = asyncio.Event()
    async with judging(server) as reward:
        asking = [asyncio.create_task(reward("4", DATA)) for _ in range(5)]
        while not server.asked:
            await asyncio.sleep(0.001)
        asking[0].cancel()
        server.hold.set()
        assert await asyncio.gather(*asking[1:]) == [1.0] * 4
        assert await reward("4", {**DATA, "not in the prompt": 1}) == 1.0
        assert await reward("5", DATA) == 1.0
        assert (len(server.asked), reward.counts["calls"], reward.counts["cached"]) == (2, 2, 5)


async def test_answers_outlive_the_judge_and_serve_others_at_the_same_time(server: OpenAIStandIn, tmp_path: Path):
    path = tmp_path / "new" / "answers.sqlite"
    async with judging(server, cache=path) as first, judging(server, cache=path) as second:
        assert await first("4", DATA) == await second("4", DATA) == 1.0
        assert (first.counts["calls"], second.counts["calls"], second.counts["cached"]) == (1, 0, 1)
    async with judging(server, cache=path) as third:
        await third("4", DATA)
        await third.close()
        assert await third("4", DATA) == 1.0
        assert (third.counts["calls"], third.counts["cached"]) == (0, 2)
    async with judging(server, cache=path, temperature=0.5) as other:
        await other("4", DATA)
        assert other.counts["calls"] == 1


def test_a_file_that_is_no_cache_is_refused_at_once(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("this is no database, but it is long enough to be looked at" * 20)
    with refused(file=text):
        AnswerCache(text)
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as file:
        file.execute("PRAGMA user_version = 2")
    file.close()
    with refused(file=newer):
        AnswerCache(newer)
    with refused(file=tmp_path):
        AnswerCache(tmp_path)


def test_an_answer_that_the_file_does_not_take_is_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = AnswerCache(tmp_path / "answers")
    with sqlite3.connect(tmp_path / "answers") as file:
        file.execute("DROP TABLE answers")
    file.close()
    cache.put("a", "1")
    cache.put("b", "2")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("1", "2", None)
    [warning] = caplog.records
    assert str(tmp_path / "answers") in warning.message
    cache.close()


def test_memory_keeps_what_was_used_last(tmp_path: Path):
    cache = AnswerCache(in_memory=2)
    cache.put("a", "1")
    cache.put("b", "2")
    assert cache.get("a") == "1"
    cache.put("c", "3")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("1", None, "3")


def one_after_another(*responses: web.Response | str) -> Any:
    left: Iterator[web.Response | str] = iter(responses)
    return lambda asked: next(left)


async def test_what_may_pass_is_tried_again(server: OpenAIStandIn):
    server.respond = one_after_another(error(429, "slow down", Retry_After="0"), error(503, "busy"), "Score: 0.5")
    async with judging(server) as reward:
        assert await reward("4", DATA) == 0.5
        assert (reward.counts["calls"], reward.counts["failures"]) == (3, 0)


async def test_what_will_not_pass_is_not_tried_again(server: OpenAIStandIn):
    server.respond = lambda asked: error(400, "the prompt is too long")
    async with judging(server) as reward:
        with pytest.raises(JudgeFailed, match="the prompt is too long"):
            await reward("4", DATA)
        assert (reward.counts["calls"], reward.counts["failures"]) == (1, 1)


async def test_a_judge_that_stays_away_fails_the_episode_or_gives_what_was_agreed(server: OpenAIStandIn):
    server.hold = asyncio.Event()
    async with judging(server, timeout=0.05, retries=1) as reward:
        with pytest.raises(EpisodeError, match=r"'judge'.*0\.05 s") as failure:
            await Rewards([reward]).score("4", DATA)
        assert failure.value.reason == "reward_failed"
        assert (reward.counts["calls"], reward.counts["failures"]) == (2, 1)
    async with judging(server, timeout=0.05, retries=0, on_failure=0.25) as reward:
        score, ticks = await ticks_during(reward("4", DATA))
        assert (score, reward.counts["failures"]) == (0.25, 1)
        assert ticks > 5


async def test_requests_are_spread_over_the_minute(server: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch):
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    async with judging(server, requests_per_minute=6) as reward:
        monkeypatch.setattr(asyncio, "sleep", note)
        await asyncio.gather(*(reward(str(n), DATA) for n in range(4)))
        monkeypatch.undo()
    assert sorted(round(seconds) for seconds in waited if seconds > 1) == [10, 20, 30]


async def test_a_request_whose_caller_is_cancelled_is_not_sent(server: OpenAIStandIn):
    async with judging(server, requests_per_minute=1200) as reward:
        leaving = [asyncio.create_task(reward(f"{n // 2}", DATA)) for n in range(100)]
        staying = asyncio.create_task(reward("3", DATA))
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        assert (await asyncio.gather(*leaving, return_exceptions=True)).count(1.0) <= 2
        assert await staying == 1.0
        assert await reward("49", DATA) == 1.0
        assert reward._pending == {}
    assert len(server.asked) <= 3


def test_a_server_may_ask_for_minutes_but_not_for_hours():
    assert [judge.backoff_s(0, seconds) for seconds in (60.0, 3600.0)] == [60.0, 300.0]
    assert judge.backoff_s(20, None) <= 30.0


async def test_no_more_questions_are_open_than_allowed(server: OpenAIStandIn):
    async with judging(server, max_concurrent=2) as reward:
        await asyncio.gather(*(reward(str(n), DATA) for n in range(8)))
    assert (len(server.asked), server.most_at_once <= 2) == (8, True)


async def test_closing_ends_what_is_being_asked(server: OpenAIStandIn):
    server.hold = asyncio.Event()
    async with judging(server) as reward:
        scoring = asyncio.create_task(Rewards([reward]).score("4", DATA))
        while not server.asked:
            await asyncio.sleep(0.001)
    with pytest.raises(EpisodeError, match=r"'judge'.*CancelledError"):
        await scoring


async def test_no_text_is_too_much(server: OpenAIStandIn):
    async with judging(server) as reward:
        for text in HOSTILE.values():
            assert await reward(text, DATA) == 1.0
    assert "\ufffd and \ufffd" in contents(server)[2]
    assert len(contents(server)) == len(HOSTILE)
