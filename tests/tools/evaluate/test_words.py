"""Servers that have only chat completions: known numbers of their replies are reported, the rest is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.environments.rewards import Exact
from headrace.environments.single_turn import environment
from headrace.errors import BadInput
from headrace.text.tokenizer import Tokenizer
from headrace.tools.evaluate.candidates import Candidate
from headrace.tools.evaluate.evaluation import Evaluation, evaluate
from headrace.tools.evaluate.report import write_report
from headrace.tools.evaluate.results import zero_shot_record
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind
from tests.inference.openai_stand_in import OpenAIStandIn, completion, error

WORDS = ("river", "wheel", "mill", "gate")


@environment(
    data=lambda: [{"word": word, "answer": word.upper()} for word in WORDS], rewards={"correct": Exact("answer")}
)
def shout(row: dict[str, Any]) -> str:
    return f"Write {row['word']} in capitals."


@contextmanager
def silent(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def asked(output: Path, tokenizer: Path | None = None, **changes: Any) -> Evaluation:
    given: dict[str, Any] = {"sampling": {"temperature": 0.0, "max_tokens": 32}, "seed": 7, "concurrency": 4} | changes
    directory = None if tokenizer is None else str(tokenizer)
    return Evaluation(output, f"{__name__}:shout", {}, tokenizer=directory, key_var="WORDS_KEY", **given)


def word_in(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"]).split()[1]


def three_of_four(request: dict[str, Any]) -> web.Response | str:
    """All but the mill, with a thought of two words that the server tells apart."""
    word = word_in(request) if "Write" in request["messages"][-1]["content"] else "hello"
    answer = "no" if word == "mill" else word.upper()
    thought = {"role": "assistant", "content": answer, "reasoning_content": "big letters"}
    return web.json_response(completion(answer, message=thought))


@contextmanager
def one_model(server: OpenAIStandIn) -> Iterator[Candidate]:
    server.entries = [{"id": "small"}]
    yield Candidate("words", "endpoint", server.url)


async def test_what_was_right_and_how_long_is_told_by_the_words_and_by_usage(tmp_path: Path):
    async with OpenAIStandIn(three_of_four) as server:
        with one_model(server) as candidate:
            (outcome,) = await evaluate(asked(tmp_path), [candidate], silent)
    assert outcome.result.failure == ""
    values = {name: estimate.value for name, estimate in outcome.result.estimates.items()}
    assert (values["avg@1"], values["reward/correct"], values["failed"]) == (0.75, 0.75, 0.0)
    assert (values["tokens"], values["thinking_words"], values["thinks"]) == (2.0, 2.0, 1.0)  # as `usage` says
    assert "thinking_tokens" not in values
    assert len(RolloutFiles(tmp_path / "words/rollouts", RolloutKind.EVAL).read(0)) == 4
    request = server.asked[-1]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("small", 0.0, 32)
    assert len({asked["seed"] for asked in server.asked[1:]}) == 4  # after the greeting, every episode has its own


async def test_what_the_server_does_not_count_is_left_out(tmp_path: Path):
    def silent_about_tokens(request: dict[str, Any]) -> web.Response:
        answer = completion("<think>one two three</think>RIVER")
        del answer["usage"]
        return web.json_response(answer)

    async with OpenAIStandIn(silent_about_tokens) as server:
        with one_model(server) as candidate:
            (outcome,) = await evaluate(asked(tmp_path), [candidate], silent)
    result = outcome.result
    assert not {"tokens", "thinking_tokens"} & set(result.estimates)
    assert result.estimates["thinking_words"].value == 3.0
    written = write_report(tmp_path / "report", "shout", {}, [result])
    assert "words of thinking, mean" in next(path for path in written if path.name == "accuracy-length.svg").read_text()
    with pytest.raises(BadInput) as error:
        zero_shot_record(outcome.scored)
    assert error.value.key == "--zero-shot"


async def test_tags_that_no_completion_has_are_named_in_a_notice(tmp_path: Path):
    async with OpenAIStandIn(lambda request: "[r]one two[/r]RIVER") as server:
        with one_model(server) as candidate:
            (unmatched,) = await evaluate(asked(tmp_path / "a"), [candidate], silent)
            (matched,) = await evaluate(asked(tmp_path / "b", tags=("[r]", "[/r]")), [candidate], silent)
    (notice,) = unmatched.result.notices
    assert "<think>...</think>" in notice
    assert matched.result.notices == []
    assert matched.result.estimates["thinking_words"].value == 2.0


async def test_a_tokenizer_that_is_given_counts_thoughts(tmp_path: Path, tiny_model: Path):
    async with OpenAIStandIn(three_of_four) as server:
        with one_model(server) as candidate:
            (outcome,) = await evaluate(asked(tmp_path, tiny_model), [candidate], silent)
    expected = len(Tokenizer(tiny_model).encode("big letters"))
    assert outcome.result.estimates["thinking_tokens"].value == expected
    assert [line.thinking_tokens for line in zero_shot_record(outcome.scored)] == [expected] * 4


async def test_of_several_models_one_is_named(tmp_path: Path):
    async with OpenAIStandIn(three_of_four) as server:
        candidate = Candidate("words", "endpoint", server.url)
        (refused,) = await evaluate(asked(tmp_path / "a"), [candidate], silent)
        assert isinstance(refused.error, BadInput) and refused.error.key == "--endpoint-model"
        assert "small, large" in refused.error.fact
        (outcome,) = await evaluate(asked(tmp_path / "b", endpoint_model="large"), [candidate], silent)
        assert outcome.result.estimates["pass@1"].value == 0.75
        assert {request["model"] for request in server.asked} == {"large"}
    settings = json.loads((tmp_path / "b/words/settings.json").read_text())
    assert settings["endpoint_model"] == "large"


async def test_a_limit_in_tokens_of_a_conversation_is_refused(tmp_path: Path):
    async with OpenAIStandIn(three_of_four) as server:
        with one_model(server) as candidate:
            (outcome,) = await evaluate(asked(tmp_path, seq_len=64), [candidate], silent)
    assert isinstance(outcome.error, BadInput)
    assert (outcome.error.key, outcome.error.value) == ("--seq-len", 64)


async def test_episodes_go_to_all_servers_and_one_that_fails_costs_nothing(tmp_path: Path):
    async with OpenAIStandIn(three_of_four) as first, OpenAIStandIn(three_of_four) as second:
        first.entries = second.entries = [{"id": "small"}]
        candidate = Candidate("words", "endpoint", f"{first.url},{second.url}")
        (outcome,) = await evaluate(asked(tmp_path / "a"), [candidate], silent)
        assert len(first.asked) > 1 and len(second.asked) > 1
        assert outcome.result.errors == {}
        second.respond = lambda request: error(500, "broken") if "Write" in str(request) else "hello"
        (outcome,) = await evaluate(asked(tmp_path / "b"), [candidate], silent)
        assert (outcome.result.errors, outcome.result.estimates["pass@1"].value) == ({}, 0.75)


async def test_a_key_is_sent_and_a_server_that_is_neither_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORDS_KEY", "secret")
    async with OpenAIStandIn(three_of_four) as server:
        with one_model(server) as candidate:
            await evaluate(asked(tmp_path / "a"), [candidate], silent)
            assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
            (outcome,) = await evaluate(
                asked(tmp_path / "b"), [candidate._replace(source=f"{server.url}/other")], silent
            )
    assert isinstance(outcome.error, BadInput)
    assert (outcome.error.key, outcome.error.value) == ("CHECKPOINT", f"{server.url}/other")
