"""One agent's conversation: when it goes on, when it is over, and what came of it."""

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.environments.base import ChatFailed, Context, Environment, PromptTooLong, Reply, ToolCall
from headrace.environments.chat import Chat, Tool, ToolError
from headrace.environments.script import Script, as_reply, call_tool
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Rollout, Task, Turn
from tests.environments.pools import pool, task


def double(n: int) -> int:
    """Twice the number."""
    if n > 99:
        raise ToolError("too much")
    return 2 * n


def script(*answers: Any) -> Script:
    left = iter(answers)
    return Script(lambda messages: next(left))


def cut_off(text: str, calls: Sequence[ToolCall] = ()) -> Reply:
    return Reply({"role": "assistant", "content": text}, Turn([], [1], [-1.0], [0], 1.0, "length"), list(calls))


class Small:
    """A model that says yes until a conversation has more messages than it can take, as a sampler does."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[int | None] = []

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self.asked.append(max_tokens)
        if len(messages) > self.most:
            raise PromptTooLong("the conversation has 7 tokens and seq_len is 6")
        return as_reply("yes")


class Talker(Environment):
    """Goes on until the conversation is over."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{}]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, "hello")
        while await chat.reply():
            chat.say("and?")
        return [chat.rollout({"said": float(len(chat.turns))})]


TALKER = f"{__name__}:Talker"


async def test_a_conversation_begins_with_the_system_and_the_prompt():
    line = script("yes")
    await Chat(line, "hello", system="Be brief.").reply()
    assert line.calls == [([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}], [])]


async def test_a_prompt_may_be_messages():
    begun: list[Message] = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    chat = Chat(script("yes"), begun, system="Be brief.")
    chat.say("3")
    await chat.reply()
    assert [message["content"] for message in chat.messages] == ["Be brief.", "1", "2", "3", "yes"]
    assert len(begun) == 2


async def test_a_conversation_has_at_most_its_turns():
    line = script("one", "two", "three")
    chat = Chat(line, "hello", max_turns=2)
    assert chat.text == ""
    assert [reply.text if reply else None for reply in [await chat.reply() for _ in range(4)]] == [
        "one",
        "two",
        None,
        None,
    ]
    assert (chat.stop_reason, len(line.calls), len(chat.turns), chat.text) == ("max_turns", 2, 2, "two")
    assert not chat.rollout({}).truncated


async def test_a_reply_that_was_cut_off_is_the_last():
    line = script("one", cut_off("tw"), "three")
    chat = Chat(line, "hello")
    assert await chat.reply()
    last = await chat.reply()
    assert last is not None
    assert last.text == "tw"
    assert await chat.reply() is None
    assert chat.stop_reason == "truncated"
    assert len(line.calls) == 2
    rollout = chat.rollout({"right": 1.0})
    assert rollout.truncated
    assert rollout.stop_reason == "truncated"
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "length"]


async def test_a_conversation_ends_where_there_is_no_room_for_a_reply():
    chat = Chat(Small(3), "hello")
    assert await chat.reply()
    chat.say("and?")
    assert await chat.reply()
    chat.say("and?")
    assert await chat.reply() is None
    assert chat.stop_reason == "context_full"
    rollout = chat.rollout({})
    assert rollout.truncated
    assert len(rollout.turns) == 2


async def test_no_room_for_the_first_reply_is_an_error():
    with pytest.raises(PromptTooLong, match=r"\b7\b"):
        await Chat(Small(0), "hello").reply()


async def test_room_ends_in_a_worker_process_as_it_does_here():
    async with pool(identifier=TALKER) as workers:
        (there,) = await workers.run(task("talk"), Small(5))
        (here,) = await Talker().run(task("talk"), Small(5))
        assert (there.stop_reason, there.truncated, there.rewards) == ("context_full", True, {"said": 3.0})
        assert there.messages == here.messages
        with pytest.raises(PromptTooLong, match=r"\b7\b"):
            await workers.run(task("talk"), Small(0))


async def test_other_failures_of_the_model_are_passed_on():
    class Failing:
        async def chat(self, messages: Any, tools: Any = (), max_tokens: Any = None) -> Reply:
            if len(messages) > 1:
                raise ChatFailed(0, "EngineTimeout", "no answer")
            return as_reply("yes")

    chat = Chat(Failing(), "hello")
    await chat.reply()
    with pytest.raises(ChatFailed, match="EngineTimeout: no answer"):
        await chat.reply()
    assert chat.stop_reason == ""


async def test_the_first_stop_reason_is_kept():
    chat = Chat(script("yes"), "hello", max_turns=1)
    await chat.reply()
    chat.stop("found")
    chat.stop("bored")
    assert await chat.reply() is None
    assert chat.rollout({}).stop_reason == "found"


async def test_max_tokens_reaches_the_model():
    line = Small(9)
    chat = Chat(line, "hello")
    await chat.reply()
    await chat.reply(7)
    await chat.act(5)
    assert line.asked == [None, 7, 5]


async def test_tools_are_run_until_a_reply_calls_none():
    line = script(call_tool("double", n=21), call_tool("double", n=4), "42 and 8")
    chat = Chat(line, "hello", tools=[double])
    reply = await chat.act()
    assert reply is not None
    assert chat.text == reply.text == "42 and 8"
    assert [message["content"] for message in chat.messages] == ["hello", "", "42", "", "8", "42 and 8"]
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "call_0", "content": "42", "name": "double"}
    assert all(tools == [Tool(double).schema] for _, tools in line.calls)
    assert chat.rollout({}).metrics == {"tool_calls": 2, "tool_errors": 0}


async def test_all_calls_of_a_reply_are_run_in_order():
    seen: list[int] = []

    async def note(n: int) -> str:
        seen.append(n)
        return f"noted {n}"

    calls = [call_tool("note", n=n)["tool_calls"][0] | {"id": f"call_{n}"} for n in range(3)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    chat = Chat(script(message, "done"), "hello", tools=[Tool(note)])
    await chat.act()
    assert seen == [0, 1, 2]
    assert [(m["tool_call_id"], m["content"]) for m in chat.messages if m["role"] == "tool"] == [
        ("call_0", "noted 0"),
        ("call_1", "noted 1"),
        ("call_2", "noted 2"),
    ]


async def test_what_goes_wrong_with_a_call_is_reported_and_counted():
    unread = Reply(
        {"role": "assistant", "content": "{no}"},
        as_reply("").turn,
        [ToolCall("call_3", "", {}, "the tool call is not valid JSON")],
    )
    line = script(call_tool("double", n=100), call_tool("triple", n=1), call_tool("double", n="x"), unread, "sorry")
    chat = Chat(line, "hello", tools=[double])
    await chat.act()
    results = [message["content"] for message in chat.messages if message["role"] == "tool"]
    assert results[0] == "Error: too much"
    assert results[1] == "Error: there is no tool 'triple'; there is double"
    assert results[2].startswith("Error: the arguments of double do not fit: n: ")
    assert results[3] == "Error: the tool call is not valid JSON"
    assert "name" not in chat.messages[-2]  # the tool is unknown
    assert chat.rollout({}, {"turns": 5}).metrics == {"tool_calls": 4, "tool_errors": 4, "turns": 5}


async def test_a_tool_that_breaks_breaks_the_episode():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Chat(script(call_tool("broken")), "hello", tools=[broken]).act()


async def test_calls_of_a_reply_that_was_cut_off_are_not_run():
    chat = Chat(script(cut_off("", [ToolCall("call_0", "double", {"n": 1})])), "hello", tools=[double])
    assert await chat.act() is None
    assert chat.rollout({}).metrics == {"tool_calls": 0, "tool_errors": 0}
    assert chat.stop_reason == "truncated"


async def test_an_agent_that_only_calls_tools_runs_out_of_turns():
    line = Script(lambda messages: call_tool("double", n=1))
    chat = Chat(line, "hello", tools=[double], max_turns=3)
    assert await chat.act() is None
    assert (chat.stop_reason, len(line.calls)) == ("max_turns", 3)


async def test_a_model_that_calls_where_there_are_no_tools_gets_an_error():
    chat = Chat(script(call_tool("double", n=1), "oh"), "hello")
    await chat.act()
    assert chat.messages[2]["content"] == "Error: there is no tool 'double'; there is none"
    assert chat.rollout({}).metrics == {"tool_calls": 1, "tool_errors": 1}


async def test_a_rollout_is_what_the_conversation_came_to():
    chat = Chat(script("yes"), "hello", agent="judge", trainable=False)
    await chat.reply()
    rollout = chat.rollout({"right": 0.5}, {"words": 1})
    assert (rollout.agent, rollout.trainable, rollout.rewards, rollout.metrics) == (
        "judge",
        False,
        {"right": 0.5},
        {"words": 1},
    )
    assert rollout.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    assert (rollout.turns, rollout.truncated, rollout.stop_reason) == (chat.turns, False, "")


async def test_a_made_up_name_that_could_be_markup_is_in_no_message_of_a_tool():
    chat = Chat(script(call_tool("<|im_start|>"), call_tool("triple"), "sorry"), "hello", tools=[double])
    await chat.act()
    assert [message.get("name") for message in chat.messages if message["role"] == "tool"] == [None, "triple"]
    assert "<|im_start|>" not in chat.messages[2]["content"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(TypeError, match="double"):
        Chat(script(), "hello", tools=[double, Tool(double)])


async def test_a_reply_of_no_tokens_cannot_be_asked_for():
    line = Small(9)
    for none in (0, -1):
        with pytest.raises(ValueError, match="max_tokens"):
            await Chat(line, "hello").reply(none)
    assert line.asked == []
