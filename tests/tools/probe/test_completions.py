"""What completions say, and that their answers are what an engine's parser could have made."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.environments.base import Reply
from headrace.environments.script import as_reply
from headrace.environments.tools import Tool, run_call
from headrace.rollout.types import Task
from headrace.tools.probe.completions import BY_NAME, COMPLETIONS, HUGE, LONG, NoGold, Scene
from tests.tools.probe.probed import Asking, Calling


def scene(environment: Any, tools: Any = (), **data: Any) -> Scene:
    messages = [{"role": "system", "content": "You count."}, {"role": "user", "content": "Say 12."}]
    return Scene(environment, Task("probed", data), messages, tools, random.Random(0))


ASKED = scene(Asking(), number=12)
CALLED = scene(Calling(), word="mill")


def said(name: str, at: Scene = ASKED) -> Reply:
    return as_reply(BY_NAME[name].answer(at))


def test_names_are_unique_and_every_kind_is_there():
    assert len(BY_NAME) == len(COMPLETIONS)
    assert {c.kind for c in COMPLETIONS} == {"gold", "mistake", "empty", "garbage", "hostile", "tool call"}


def test_the_gold_answer_stands_once_in_the_middle_of_wrong_ones():
    lines = said("gold among 20 wrong").text.split("\n")
    assert len(lines) == 21
    assert lines[10] == "12"
    assert lines.count("12") == 1


def test_gold_tool_calls_are_listed_and_repeated_as_calls():
    listed = said("gold among 20 wrong", CALLED).tool_calls
    assert [call.arguments["word"] for call in listed].count("mill") == 1
    assert listed[10].arguments == {"word": "mill"}
    repeated = said("gold 1,000 times", CALLED).tool_calls
    assert len(repeated) == len({call.id for call in repeated}) == 100


def test_a_hostile_number_takes_the_place_of_the_gold_one():
    assert said("power tower").text == "9**9**9**9"
    assert "\\boxed{nan}" in said("not a number", CALLED).text  # "mill" has no number


def test_an_open_thought_has_no_answer():
    reply = said("gold in an open thought")
    assert reply.text == ""
    assert reply.message["reasoning_content"] == "12"
    assert reply.raw == "<think>\n12"


def test_long_answers_are_as_long_as_they_say():
    assert len(said("128 KB").text) == LONG == 131_072
    assert len(said("10 MB").text) == HUGE == 10_485_760


def test_the_prompt_is_echoed_and_lone_surrogates_are_no_unicode():
    assert said("prompt echoed").text == "You count.\nSay 12."
    later = [
        *ASKED.messages,
        {"role": "assistant", "content": "You count.\nSay 12."},
        {"role": "user", "content": "No."},
    ]
    assert said("prompt echoed", ASKED._replace(messages=later)).text == "You count.\nSay 12."  # or it would double
    endless = ASKED._replace(messages=[{"role": "user", "content": "x" * HUGE}])
    assert len(said("prompt echoed", endless).text) == LONG
    with pytest.raises(UnicodeEncodeError):
        said("lone surrogates").text.encode()


def test_without_gold_what_is_made_of_it_says_so_and_the_rest_goes_on():
    without = scene(Asking("no gold"), number=12)
    for completion in COMPLETIONS:
        if completion.from_gold:
            with pytest.raises(NoGold):
                completion.answer(without)
        else:
            completion.answer(without)


async def test_malformed_tool_calls_are_refused_by_tools_and_told_to_the_model():
    def press(word: str, times: int = 1) -> str:
        """Press it."""
        raise AssertionError("none of these calls fits")

    tool = Tool(press)
    at = scene(Calling(), tools=[tool.schema], word="mill")
    unreadable, unknown = said("unreadable tool call", at), said("unknown tool", at)
    assert unreadable.tool_calls[0].error
    assert "tool_calls" not in unreadable.message
    assert unknown.message["tool_calls"][0]["function"]["name"] not in ("press", "")
    wrong = said("wrong arguments", at).tool_calls
    assert len(wrong) == 8
    for call in (*unreadable.tool_calls, *unknown.tool_calls, *wrong):
        content, succeeded = await run_call({"press": tool}, call)
        assert not succeeded
        assert content.startswith("Error: ")


def test_the_same_moment_gets_the_same_answer():
    for completion in COMPLETIONS:
        once, again = (said(completion.name, scene(Asking(), number=12)) for _ in range(2))
        assert json.dumps(once.message) == json.dumps(again.message)
