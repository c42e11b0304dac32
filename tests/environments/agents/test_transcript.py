"""A conversation that an agent sends back in OpenAI's form goes on from the very tokens that were sampled."""

import asyncio
import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.agents.episode import ChatRequest, Episode, Transcript, response_body
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Message, Turn
from headrace.text.messages import InvalidMessage, canonical_messages
from tests.orchestrator.adversary import TOOLS, Adversary
from tests.orchestrator.exactness import check_samples, check_turns, is_clean
from tests.orchestrator.recording_engine import RecordingEngine, scripted
from tests.refusals import refused
from tests.text.families import FAMILIES, KEEPS_HISTORY, Said, load

SCHEMAS = [tool.schema for tool in TOOLS.values()]


def restored_by(transcript: Transcript, messages: list[Any]) -> list[Message]:
    return transcript.restore(canonical_messages(messages))


def calling(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


class Client:
    """An agent's copy of one conversation, which it sends back in any of the ways that agents do."""

    def __init__(self, episode: Episode, rng: Random, system: str, tools: bool = True) -> None:
        self.episode = episode
        self.rng = rng
        self.tools = SCHEMAS if tools else None
        self.messages: list[Any] = [
            {"role": "developer", "content": system},
            {"role": "user", "content": "hello the cat"},
        ]
        self.turns: list[Turn] = []

    async def turn(self) -> None:
        """Ask, and put the reply and what follows from it into the conversation."""
        request = msgspec.convert({"messages": self.messages, "tools": self.tools}, ChatRequest)
        (choice,) = choices = await self.episode.reply(request)
        self.turns.append(choice.reply.turn)
        received = json.loads(msgspec.json.encode(response_body(request, choices, "policy")))["choices"][0]["message"]
        calls = received.get("tool_calls", [])
        if calls and self.rng.random() < 0.3:  # a framework with ids of its own
            for call in calls:
                call["id"] = f"own-{self.rng.random()}"
        self.messages.append(self.rewritten(received))
        for call in calls:
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": self.rng.choice(["15", [{"type": "text", "text": "15"}]]),
            }
            self.messages.append(result | ({"name": call["function"]["name"]} if self.rng.random() < 0.3 else {}))
        if not calls:
            self.messages.append({"role": "user", "content": "and?"})
        self.messages = [self.again(message) for message in self.messages]

    def rewritten(self, received: dict[str, Any]) -> dict[str, Any]:
        """The reply as an agent keeps it."""
        kept = {
            name: value for name, value in received.items() if name != "reasoning_content" or self.rng.random() < 0.3
        }
        content = kept["content"]
        if not content:
            kept["content"] = self.rng.choice(["", None])
            if kept["content"] is None and self.rng.random() < 0.5:
                del kept["content"]
        elif self.rng.random() < 0.5:
            kept["content"] = self.rng.choice([content.strip(), [{"type": "text", "text": content}]])
        return kept | {"refusal": None, "annotations": []}

    def again(self, message: dict[str, Any]) -> dict[str, Any]:
        """The same message in another spelling, as a store or a framework may give it back."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            spaced = self.rng.choice([None, 1, 4])
            turned = dict(reversed(arguments.items()))
            calls.append({**call, "function": {**call["function"], "arguments": json.dumps(turned, indent=spaced)}})
        return {**message, "tool_calls": calls}


async def talk(name: str, rng: Random, steps: int) -> None:
    model = load(name)
    engine = RecordingEngine(Adversary(model, rng), rng.randrange(1000))
    context = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=100_000).open("session", "episode")
    episode = Episode(context)
    systems = ("You are left.", "You are right.")  # sub-agents with prompts of their own, at once
    clients = [Client(episode, Random(rng.random()), system) for system in systems[: rng.randint(1, 2)]]
    for _ in range(steps):
        await asyncio.gather(*(client.turn() for client in clients))
    check_turns(engine, episode.turns)
    check_samples(episode.turns, merge_turns(episode.turns))
    for client in clients:
        if name in KEEPS_HISTORY and all(is_clean(model, turn) for turn in client.turns[:-1]):
            assert len(merge_turns(client.turns)) == 1
    assert len(episode.transcript.conversations) == len(clients)


@pytest.mark.parametrize("name", ["qwen3-all", "qwen3", "llama-3", "kimi-k2", "default"])
@settings(deadline=None, max_examples=10, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_however_an_agent_sends_replies_back_their_tokens_are_kept(name: str, rng: Random):
    asyncio.run(talk(name, rng, steps=4))


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=100, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_in_any_chat_format_and_over_many_turns_their_tokens_are_kept(name: str, rng: Random):
    asyncio.run(talk(name, rng, steps=8))


async def test_thoughts_that_the_agent_drops_are_put_back():
    model = load("qwen3-all")
    engine = RecordingEngine(scripted(*(model.written(Said("fine", thought=thought)) for thought in ("hm", "so"))))
    context = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=1000).open("session", "episode")
    client = Client(Episode(context), Random(0), "Be brief.", tools=False)
    await client.turn()
    client.messages[2] = {"role": "assistant", "content": "fine"}
    await client.turn()
    assert "hm" in model.decode(engine.exchanges[1].prompt)
    (sample,) = merge_turns(client.turns)
    assert sample.mask.sum() == sum(len(turn.completion_ids) for turn in client.turns)


async def test_tools_that_are_not_in_the_prompt_can_be_called():
    model = load("qwen3-all")
    said = [Said("", [("add", {"a": 12})]), Said("fine")]
    engine = RecordingEngine(scripted(*map(model.written, said)))
    context = Sampler(engine.client, model.renderer, model.tokenizer, seq_len=1000).open("session", "episode")
    episode = Episode(context, describe_tools=False)
    client = Client(episode, Random(0), "Be brief.")
    for _ in said:
        await client.turn()
    assert "<tools>" not in model.decode(engine.exchanges[0].prompt)
    assert [message["role"] for message in client.messages[2:5]] == ["assistant", "tool", "assistant"]
    assert episode.calls == 1
    assert len(merge_turns(client.turns)) == 1


# The transcript alone

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def calls(*arguments: dict[str, Any], content: str = "") -> Message:
    called = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": given}}
        for n, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": "hm", "tool_calls": called}


def as_seen(reply: Message, ids: list[str]) -> Message:
    functions = [call["function"] for call in reply["tool_calls"]]
    written = [{"name": f["name"], "arguments": json.dumps(f["arguments"])} for f in functions]
    pairs = zip(ids, written, strict=True)
    return {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": f} for i, f in pairs]}


def test_results_go_to_the_calls_that_they_are_of_whatever_their_order():
    transcript, reply = Transcript(), calls({"a": 1}, {"a": 2})
    one, two = transcript.record(HELLO, reply)
    sent = [
        *HELLO,
        as_seen(reply, [one, two]),
        *({"role": "tool", "tool_call_id": i, "content": i} for i in (two, one)),
    ]
    restored = restored_by(transcript, sent)
    assert restored[1] is reply
    assert restored[2:] == [
        {"role": "tool", "tool_call_id": "call_1", "content": two, "name": "add"},
        {"role": "tool", "tool_call_id": "call_0", "content": one, "name": "add"},
    ]


def test_ids_are_unique_in_an_episode_although_the_chat_formats_are_not():
    transcript = Transcript()
    given = [transcript.record([{"role": "user", "content": str(n)}], calls({"a": n})) for n in range(3)]
    assert len({i for ids in given for i in ids}) == 3


def test_a_reply_that_was_moved_is_known_by_the_ids_of_its_calls():
    transcript, reply = Transcript(), calls({"a": 1})
    ids = transcript.record(HELLO, reply)
    elsewhere: list[Any] = [{"role": "user", "content": "a summary of what was"}]
    assert restored_by(transcript, [*elsewhere, as_seen(reply, ids)])[1] is reply
    assert restored_by(transcript, [*elsewhere, as_seen(reply, ["other"])])[1] is not reply


@pytest.mark.parametrize("changed", [{"a": 2}, {"a": "1"}, {"a": 1.0}, {"a": 1, "b": 0}, {}])
def test_a_call_that_an_agent_has_changed_is_its_own(changed: dict[str, Any]):
    transcript, reply = Transcript(), calls({"a": 1})
    ids = transcript.record(HELLO, reply)
    sent = [*HELLO, as_seen(calls(changed), ids), {"role": "tool", "tool_call_id": ids[0], "content": "x"}]
    restored = restored_by(transcript, sent)
    assert restored[1]["tool_calls"][0]["function"]["arguments"] == changed
    assert "reasoning_content" not in restored[1]
    assert restored[2]["tool_call_id"] == restored[1]["tool_calls"][0]["id"]


def test_a_reply_that_says_something_else_or_stands_elsewhere_is_the_agents_own():
    transcript = Transcript()
    reply = {"role": "assistant", "content": "fine", "reasoning_content": "hm"}
    transcript.record(HELLO, reply)
    said: Message = {"role": "assistant", "content": "fine"}
    assert restored_by(transcript, [*HELLO, said])[1] is reply
    assert restored_by(transcript, [*HELLO, {**said, "content": " fine\n"}])[1] is reply
    assert restored_by(transcript, [*HELLO, {**said, "content": "fine!"}])[1] == {
        **said,
        "content": "fine!",
    }
    assert restored_by(transcript, [{"role": "user", "content": "bye"}, said])[1] == said


def test_conversations_are_as_many_as_do_not_go_on_from_one_another():
    transcript = Transcript()
    first, other = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}
    transcript.record(HELLO, first)
    longer = [*HELLO, first, {"role": "user", "content": "and?"}]
    transcript.record(longer, other)
    assert transcript.conversations == [[*longer, other]]
    branch = [*HELLO, first, {"role": "user", "content": "or?"}]
    transcript.record(branch, other)
    assert transcript.conversations == [[*longer, other], [*branch, other]]


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("hello", ""),
        ({"content": "x"}, ".role"),
        ({"role": "function", "content": "x"}, ".role"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0]"),
        ({"role": "assistant", "function_call": {"name": "x"}}, ".function_call"),
        ({"role": "assistant", "tool_calls": {}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, ".tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [calling("{")]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [calling("[1]")]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [calling(f'{{"a": {2**80}}}')]}, ""),
    ],
)
def test_a_message_that_cannot_be_parsed_is_named(message: Any, key: str):
    with refused(InvalidMessage, key=f"messages[0]{key}"):
        restored_by(Transcript(), [message])
