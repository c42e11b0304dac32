"""What OpenAI's own client gets from the proxy."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.environments.agents.episode import ChatRequest, Episode, ignored_settings
from headrace.environments.agents.proxy import Proxy
from headrace.environments.base import Reply
from headrace.environments.script import Script, as_reply, call_tool
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Turn
from tests.environments.agents.agents import ADD, shared
from tests.environments.pools import Failing

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [ADD]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy("policy")
    await proxy.start()
    yield proxy
    await proxy.close()


def client_of(proxy: Proxy, episode: Episode) -> AsyncOpenAI:
    return shared.with_options(base_url=proxy.url(episode), api_key=episode.token)


def in_tokens(text: str, finish_reason: str = "stop") -> Reply:
    turn = Turn([1, 2, 3], [ord(letter) for letter in text], [-1.0] * len(text), [0] * len(text), 1.0, finish_reason)
    return Reply({"role": "assistant", "content": text, "reasoning_content": "hm"}, turn)


async def test_a_reply_has_its_text_thoughts_usage_and_reason(proxy: Proxy):
    with proxy.episode(Script(lambda messages: in_tokens("fine"))) as episode:
        reply = await client_of(proxy, episode).chat.completions.create(model="gpt-9", messages=HELLO)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "fine", "stop")
    assert choice.message.tool_calls is None
    assert choice.message.reasoning_content == "hm"  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 4, 7)
    assert reply.model == "gpt-9"


async def test_calls_come_with_their_arguments_as_json_text(proxy: Proxy):
    with proxy.episode(Script(lambda messages: call_tool("add", a=1, q="é"))) as episode:
        reply = await client_of(proxy, episode).chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "q": "é"})


@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        (in_tokens("fine"), "fine", [], "stop"),
        (in_tokens("fi", "length"), "fi", [], "length"),
        (as_reply(call_tool("add", a=1)), "", [("add", '{"a": 1}')], "tool_calls"),
    ],
)
async def test_a_stream_adds_up_to_the_reply(proxy: Proxy, answer: Reply, content: str, calls: list, reason: str):
    with proxy.episode(Script(lambda messages: answer)) as episode:
        chat = client_of(proxy, episode).chat.completions
        chunks = [
            chunk
            async for chunk in await chat.create(
                model="policy", messages=HELLO, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
        ]
    *parts, last = chunks
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == content
    found = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in found if call.function] == calls
    assert parts[-1].choices[0].finish_reason == reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(answer.turn.completion_ids)


async def test_several_choices_are_sampled_apart(proxy: Proxy):
    words = iter(["one", "two", "three"])
    with proxy.episode(Script(lambda messages: in_tokens(next(words)))) as episode:
        reply = await client_of(proxy, episode).chat.completions.create(model="policy", messages=HELLO, n=3)
        assert [choice.message.content for choice in reply.choices] == ["one", "two", "three"]
        assert len(episode.turns) == 3
        assert len(episode.transcript.conversations) == 3


async def test_a_stop_string_ends_what_the_agent_sees_and_not_what_was_sampled(proxy: Proxy):
    with proxy.episode(Script(lambda messages: in_tokens("Action: look\nObservation: gold"))) as episode:
        chat = client_of(proxy, episode).chat.completions
        reply = await chat.create(model="policy", messages=HELLO, stop=["\nObservation:", "no"])
        assert reply.choices[0].message.content == "Action: look"
        assert reply.choices[0].finish_reason == "stop"
        assert len(episode.turns[0].completion_ids) == len("Action: look\nObservation: gold")


class Recording(Script):
    """A script that knows how many tokens it was allowed, and what its replies had to match."""

    def __init__(self, answer: Callable[[Sequence[Message]], str]) -> None:
        super().__init__(answer)
        self.max_tokens: list[int | None] = []
        self.structured_outputs: list[StructuredOutputs | None] = []

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self.max_tokens.append(max_tokens)
        self.structured_outputs.append(structured_outputs)
        return await super().chat(messages, tools, max_tokens)


async def test_limits_and_tools_reach_the_model_as_they_were_asked_for(proxy: Proxy):
    script = Recording(lambda messages: "x")
    with proxy.episode(script) as episode:
        chat = client_of(proxy, episode).chat.completions
        await chat.create(model="policy", messages=HELLO, max_tokens=5)
        await chat.create(model="policy", messages=HELLO, max_completion_tokens=7, tools=TOOLS)
        await chat.create(model="policy", messages=HELLO, tools=TOOLS, tool_choice="none")
        await chat.create(model="policy", messages=HELLO, tools=TOOLS, tool_choice="required")
    assert script.max_tokens == [5, 7, None, None]
    assert [tools for _, tools in script.calls] == [[], TOOLS, [], TOOLS]


async def test_what_a_reply_must_match_reaches_the_model(proxy: Proxy):
    script = Recording(lambda messages: "x")
    schema = {"type": "object"}
    with proxy.episode(script) as episode:
        chat = client_of(proxy, episode).chat.completions
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await chat.create(model="policy", messages=HELLO, response_format=form)
        await chat.create(model="policy", messages=HELLO, extra_body={"guided_choice": ["a", "b"]})
        with pytest.raises(openai.BadRequestError, match="response_format, guided_regex"):
            await chat.create(model="policy", messages=HELLO, response_format=form, extra_body={"guided_regex": "a"})
    assert script.structured_outputs == [StructuredOutputs(json=schema), StructuredOutputs(choice=["a", "b"])]


async def test_models_are_listed_and_found_by_any_name(proxy: Proxy):
    with proxy.episode(Script(lambda messages: "x")) as episode:
        models = client_of(proxy, episode).models
        assert [model.id async for model in models.list()] == ["policy"]
        assert (await models.retrieve("gpt-9")).id == "gpt-9"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"messages": []}, "messages"),
        ({"n": 0}, r"\bn\b"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"extra_body": {"messages": "hello"}}, "array"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_its_name(proxy: Proxy, asked: dict[str, Any], words: str):
    with proxy.episode(Script(lambda messages: "x")) as episode:
        chat = client_of(proxy, episode).chat.completions
        with pytest.raises(openai.BadRequestError, match=words):
            await chat.create(**{"model": "policy", "messages": HELLO, **asked})
        assert episode.turns == []


async def test_what_would_change_the_distribution_is_ignored_and_named() -> None:
    neutral = {"presence_penalty": 0, "repetition_penalty": 1, "response_format": {"type": "text"}}
    changed = {"frequency_penalty": 0.5, "tool_choice": "required"}
    assert ignored_settings(msgspec.convert({"messages": [], **neutral}, ChatRequest)) == []
    assert {*ignored_settings(msgspec.convert({"messages": [], **changed}, ChatRequest))} == {*changed}


async def test_other_interfaces_are_refused_with_a_word_of_what_to_do(proxy: Proxy):
    with proxy.episode(Script(lambda messages: "x")) as episode:
        client = client_of(proxy, episode)
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await client.completions.create(model="policy", prompt="x")
        with pytest.raises(openai.NotFoundError, match="/v1/responses"):
            await client.responses.create(model="policy", input="x")


async def test_an_episode_that_is_over_or_unknown_is_refused(proxy: Proxy):
    with proxy.episode(Script(lambda messages: "x")) as episode:
        url = proxy.url(episode)
    with proxy.episode(Script(lambda messages: "x")) as other:
        for address in (url, proxy.url(other).replace(other.token, "guessed")):
            client = shared.with_options(base_url=address)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="policy", messages=HELLO)
            assert (caught.value.status_code, caught.value.code) == (410, "episode_over")


async def test_a_failure_of_the_model_ends_the_episode_without_retries(proxy: Proxy):
    context = Failing()
    with proxy.episode(context) as episode:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as caught:
                await client_of(proxy, episode).chat.completions.create(model="policy", messages=HELLO)
            assert caught.value.status_code == 410
        assert episode.failure is context.error


async def test_a_body_that_is_no_json_is_refused_in_openais_form(proxy: Proxy):
    with proxy.episode(Script(lambda messages: "x")) as episode:
        async with httpx.AsyncClient() as http:
            reply = await http.post(f"{proxy.url(episode)}/chat/completions", content=b"{")
        assert reply.status_code == 400
        assert "not valid JSON" in reply.json()["error"]["message"]
