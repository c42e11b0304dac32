"""The replies of scripted completions, in the form that an engine's parser returns."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.environments.base import Reply
from headrace.environments.chat import Tool, run_call
from headrace.environments.script import as_reply
from headrace.rollout.types import Task
from headrace.tools.probe.completions import BY_NAME, COMPLETIONS, HUGE_CHARS, LONG_CHARS, ChatState, NoGold
from tests.tools.probe.probed import Asking, Calling


def make_state(environment: Any, tools: Any = (), **data: Any) -> ChatState:
    messages = [{"role": "system", "content": "You count."}, {"role": "user", "content": "Say 12."}]
    return ChatState(environment, Task("probed", data), messages, tools, random.Random(0))


ASKED = make_state(Asking(), number=12)
CALLED = make_state(Calling(), word="mill")


def reply_of(name: str, at: ChatState = ASKED) -> Reply:
    scripted = BY_NAME[name].reply
    return as_reply(scripted if isinstance(scripted, str) else scripted(at))


def test_names_are_unique_and_every_kind_is_there():
    assert len(BY_NAME) == len(COMPLETIONS)
    assert {c.kind for c in COMPLETIONS} == {"gold", "mistake", "empty", "garbage", "hostile", "tool call"}


def test_the_gold_answer_stands_once_in_the_middle_of_wrong_ones():
    lines = reply_of("gold among 20 wrong").text.split("\n")
    assert len(lines) == 21
    assert lines[10] == "12"
    assert lines.count("12") == 1


def test_gold_tool_calls_are_listed_and_repeated_as_calls():
    listed = reply_of("gold among 20 wrong", CALLED).tool_calls
    assert [call.arguments["word"] for call in listed].count("mill") == 1
    assert listed[10].arguments == {"word": "mill"}
    repeated = reply_of("gold 1,000 times", CALLED).tool_calls
    assert len(repeated) == len({call.id for call in repeated}) == 100


def test_a_hostile_number_takes_the_place_of_the_gold_one():
    assert reply_of("power tower").text == "9**9**9**9"
    assert "\\boxed{nan}" in reply_of("not a number", CALLED).text  # "mill" has no number


def test_an_open_thought_has_no_answer():
    reply = reply_of("gold in an open thought")
    assert reply.text == ""
    assert reply.message["reasoning_content"] == "12"
    assert reply.raw == "<think>\n12"


def test_long_answers_are_as_long_as_they_say():
    assert len(reply_of("128 KB").text) == LONG_CHARS == 131_072
    assert len(reply_of("10 MB").text) == HUGE_CHARS == 10_485_760


def test_the_prompt_is_echoed_and_lone_surrogates_are_no_unicode():
    assert reply_of("prompt echoed").text == "You count.\nSay 12."
    later = [
        *ASKED.messages,
        {"role": "assistant", "content": "You count.\nSay 12."},
        {"role": "user", "content": "No."},
    ]
    assert reply_of("prompt echoed", ASKED._replace(messages=later)).text == "You count.\nSay 12."  # or it would double
    endless = ASKED._replace(messages=[{"role": "user", "content": "x" * HUGE_CHARS}])
    assert len(reply_of("prompt echoed", endless).text) == LONG_CHARS
    with pytest.raises(UnicodeEncodeError):
        reply_of("lone surrogates").text.encode()


def test_without_gold_only_completions_made_from_it_fail():
    without = make_state(Asking("no gold"), number=12)
    for completion in COMPLETIONS:
        if completion.from_gold:
            with pytest.raises(NoGold):
                reply_of(completion.name, without)
        else:
            reply_of(completion.name, without)


async def test_malformed_tool_calls_are_refused_by_tools_with_an_error_message():
    def press(word: str, times: int = 1) -> str:
        """Press it."""
        raise AssertionError("none of these calls fits")

    tool = Tool(press)
    at = make_state(Calling(), tools=[tool.schema], word="mill")
    unreadable, unknown = reply_of("unreadable tool call", at), reply_of("unknown tool", at)
    assert unreadable.tool_calls[0].error
    assert "tool_calls" not in unreadable.message
    assert unknown.message["tool_calls"][0]["function"]["name"] not in ("press", "")
    wrong = reply_of("wrong arguments", at).tool_calls
    assert len(wrong) == 8
    for call in (*unreadable.tool_calls, *unknown.tool_calls, *wrong):
        content, succeeded = await run_call({"press": tool}, call)
        assert not succeeded
        assert content.startswith("Error: ")


def test_completions_are_deterministic():
    for completion in COMPLETIONS:
        once, again = (reply_of(completion.name, make_state(Asking(), number=12)) for _ in range(2))
        assert json.dumps(once.message) == json.dumps(again.message)
