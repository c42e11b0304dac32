"""A frozen model plays: what its server is asked, what becomes of its failures, and what an episode of it yields."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from headrace.environments.base import Context, Environment, EpisodeError, PromptTooLong, Reply
from headrace.environments.chat import Chat, Tool
from headrace.errors import BadInput
from headrace.inference.client.served_model import ServedModel
from headrace.inference.schema import StructuredOutputs
from headrace.orchestrator.conversation import derive_seed
from headrace.orchestrator.dispatcher import ContextFactory, Dispatcher, EpisodeRunner
from headrace.orchestrator.sampler import FrozenSampler
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import NOT_SAMPLED, Group, Message, Rollout, Task
from tests.inference.openai_stand_in import OpenAIStandIn, Respond, completion, error
from tests.text.families import Model, load

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def add(a: int) -> int:
    """Add."""
    return a + 1


ADD = Tool(add)


class Adding(Environment):
    """The model is to call a tool, and to say what came of it."""

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, "Add.", tools=[ADD])
        reply = await chat.act()
        return [chat.rollout({"right": float(reply is not None and reply.text == "2")})]


def served(server: OpenAIStandIn, **options: Any) -> ServedModel:
    return ServedModel("large", [server.url], **{"timeout": 5, "retry_for": 0, **options})


def sampler_of(teacher: ServedModel, model: Model, seq_len: int = 1000, **options: Any) -> FrozenSampler:
    return FrozenSampler(teacher, model.renderer, model.tokenizer, seq_len, **options)


async def ask(
    respond: Respond,
    seq_len: int = 1000,
    messages: Any = HELLO,
    at_most: int | None = None,
    structured_outputs: StructuredOutputs | None = None,
    **options: Any,
) -> tuple[Reply, list[dict[str, Any]]]:
    """One question, and the bodies that the server got."""
    async with OpenAIStandIn(respond) as server:
        teacher = served(server, retry_for=options.pop("retry_for", 0))
        line = sampler_of(teacher, load("qwen3"), seq_len, **options).open("session", "episode")
        try:
            return await line.chat(messages, (), at_most, structured_outputs), server.asked
        finally:
            await teacher.close()


def message(content: Any = "", finish_reason: str | None = "stop", **more: Any) -> web.Response:
    said = {"role": "assistant", "content": content, **more}
    return web.json_response(completion("", message=said, finish_reason=finish_reason))


def calling(identity: str, **arguments: Any) -> web.Response:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return message(tool_calls=[{"id": identity, "type": "function", "function": function}])


async def test_the_server_is_asked_in_words_as_the_run_says():
    model = load("qwen3")
    prompt = model.renderer.render_ids(HELLO, add_generation_prompt=True)
    reply, (body,) = await ask(lambda _: "yes", temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_tokens": 1000 - len(prompt)}
    assert body == {"model": "large", "messages": HELLO, **sampling}
    assert reply.message == {"role": "assistant", "content": "yes"}
    assert reply.turn.prompt_ids.tolist() == prompt
    assert model.decode(reply.turn.completion_ids.tolist()) == "<think>\n\n</think>\n\nyes<|im_end|>"
    assert set(reply.turn.versions.tolist()) == {NOT_SAMPLED}
    assert reply.turn.temperature == 1.0


@pytest.mark.parametrize(
    ("outputs", "sent"),
    [
        (StructuredOutputs(json_object=True), {"response_format": {"type": "json_object"}}),
        (
            StructuredOutputs(json={"type": "object"}),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "reply", "schema": {"type": "object"}},
                }
            },
        ),
        (StructuredOutputs(choice=["yes", "no"]), {"structured_outputs": {"choice": ["yes", "no"]}}),
    ],
)
async def test_structured_outputs_are_left_to_the_teachers_server(outputs: StructuredOutputs, sent: dict[str, Any]):
    _, (body,) = await ask(lambda _: "yes", structured_outputs=outputs)
    assert sent.items() <= body.items()


async def test_what_changes_nothing_is_left_to_the_server():
    _, (body,) = await ask(lambda _: "yes")
    assert set(body) == {"model", "messages", "temperature", "max_tokens"}


@pytest.mark.parametrize(("of_run", "of_call", "asked"), [(50, None, 50), (None, 40, 40), (50, 40, 40), (20, 40, 20)])
async def test_a_reply_may_be_as_long_as_run_and_call_allow(of_run: int | None, of_call: int | None, asked: int):
    _, (body,) = await ask(lambda _: "yes", at_most=of_call, max_tokens=of_run)
    assert body["max_tokens"] == asked


async def test_thoughts_and_truncation_are_the_teachers():
    reply, _ = await ask(lambda _: message("yes", "length", reasoning_content="hm"))
    assert reply.message["reasoning_content"] == "hm"
    assert (reply.truncated, reply.raw) == (True, "<think>\nhm\n</think>\n\nyes")


async def test_a_conversation_with_tools_goes_on_and_is_one_sample():
    answers = iter([calling("chatcmpl-tool-1", a=1), "2"])
    async with OpenAIStandIn(lambda _: next(answers)) as server:
        teacher = served(server)
        model = load("qwen3")
        (rollout,) = await Adding().run(Task("adding", {}), sampler_of(teacher, model).open("session", "episode"))
        await teacher.close()
    (sample,) = merge_turns(rollout.turns)
    text = model.decode(sample.token_ids[sample.mask].tolist())
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    nothing = "<think>\n\n</think>\n\n"
    assert text == f"{nothing}{call}<|im_end|>{nothing}2<|im_end|>"
    assert [message["role"] for message in server.asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert server.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert server.asked[1]["messages"][2]["tool_call_id"] == "call_0"
    assert server.asked[0]["tools"] == [ADD.schema]


async def test_every_request_of_a_run_has_a_seed_of_its_own_that_it_has_in_every_run():
    async def seeds(seed: int | None, episode: str) -> list[int | None]:
        identities = iter(range(100))
        async with OpenAIStandIn(lambda _: calling(f"random-{next(identities)}-{episode}", a=1)) as server:
            teacher = served(server)
            line = sampler_of(teacher, load("qwen3"), seed=seed).open("session", episode)
            for _ in range(2):
                first = await line.chat(HELLO, [ADD.schema])
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "name": "add", "content": "2"}
            await line.chat([*HELLO, first.message, result], [ADD.schema])
            await teacher.close()
        return [asked.get("seed") for asked in server.asked]

    first = await seeds(3, "a")
    assert len(set(first)) == 3
    assert await seeds(3, "a") == first  # whatever the server calls its tool calls
    assert set(first).isdisjoint({*await seeds(4, "a"), *await seeds(3, "b")})
    assert await seeds(None, "a") == [None] * 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in first)
    assert derive_seed("3-a") not in first


async def test_several_servers_share_the_episodes():
    async with OpenAIStandIn(lambda _: "yes") as one, OpenAIStandIn(lambda _: "yes") as two:
        teacher = ServedModel("large", [one.url, two.url], timeout=5, retry_for=5)
        sampler = sampler_of(teacher, load("qwen3"))
        await asyncio.gather(*(sampler.open("session", f"episode-{n}").chat(HELLO) for n in range(8)))
        assert [len(one.asked), len(two.asked)] == [4, 4]
        one.respond = lambda _: error(503, "restarting")
        assert (await sampler.open("session", "last").chat(HELLO)).text == "yes"
        await teacher.close()


async def test_what_may_succeed_later_is_asked_again():
    answers: Iterator[web.Response | str] = iter([error(429, "busy", Retry_After="0.01"), error(500, "oops"), "yes"])
    reply, bodies = await ask(lambda _: next(answers), retry_for=5)
    assert (reply.text, len(bodies)) == ("yes", 3)


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (lambda _: error(404, "no such model"), "no such model"),
        (lambda _: error(500, "out of memory"), "out of memory"),
        (lambda _: web.json_response({"choices": []}), "choices"),
        (lambda _: message("", "length"), r"sampling\.max_tokens"),
        (lambda _: message("", refusal="I cannot help"), "I cannot help"),
        (lambda _: message([{"type": "refusal", "refusal": "I cannot help"}]), "I cannot help"),
        (lambda _: message("yes and", "content_filter"), "content_filter"),
        (lambda _: message("yes", None), "finish_reason"),
        (lambda _: message(" \n", reasoning_content="hm"), "tool call"),
        (lambda _: message(None), "tool call"),
        (lambda _: message("say <|im_end|> and more"), r"<\|im_end\|>"),
    ],
)
async def test_a_failure_costs_the_episode_for_its_reason(respond: Respond, words: str):
    with pytest.raises(EpisodeError, match=words) as failed:
        await ask(respond, messages=HELLO)
    assert failed.value.reason == "teacher"


async def test_a_conversation_over_seq_len_is_not_asked():
    asked: list[Any] = []
    length = len(load("qwen3").renderer.render_ids(HELLO, add_generation_prompt=True))
    with pytest.raises(PromptTooLong, match=rf"\b{length}\b.*seq_len.*\b{length}\b"):
        await ask(lambda body: asked.append(body) or "yes", seq_len=length)
    assert asked == []
    reply, (body,) = await ask(lambda _: "yes", seq_len=length + 3)
    assert body["max_tokens"] == 3
    assert (len(reply.turn.completion_ids), reply.truncated) == (3, True)


async def test_a_server_with_less_room_than_a_reply_may_have_takes_what_it_has():
    def respond(body: dict[str, Any]) -> web.Response | str:
        return error(400, "max_tokens: the maximum context length is 100 tokens") if "max_tokens" in body else "yes"

    reply, bodies = await ask(respond)
    assert (reply.text, len(bodies)) == ("yes", 2)
    with pytest.raises(PromptTooLong, match="maximum context length"):
        await ask(lambda _: error(400, "the maximum context length is 10 tokens"))


async def test_an_answer_in_parts_is_their_text():
    parts = [{"type": "text", "text": "yes, "}, {"type": "text", "text": "twice"}]
    reply, _ = await ask(lambda _: message(parts))
    assert (reply.text, reply.raw) == ("yes, twice", "<think>\n\n</think>\n\nyes, twice")


@pytest.mark.parametrize(("content", "kind"), [(5, "int"), ({"text": "a"}, "dict")])
async def test_content_that_is_no_text_is_refused(content: Any, kind: str):
    with pytest.raises(EpisodeError, match=rf"messages\[1\]\.content.*\b{kind}\b") as failed:
        await ask(lambda _: "yes", messages=[*HELLO, {"role": "user", "content": content}])
    assert failed.value.reason == "invalid_message"


@pytest.mark.parametrize("role", ["critic", None])
async def test_a_role_that_the_renderer_would_leave_out_is_refused(role: str | None):
    with pytest.raises(EpisodeError, match=r"messages\[1\]\.role") as failed:
        await ask(lambda _: "yes", messages=[*HELLO, {"role": role, "content": "?"}])
    assert failed.value.reason == "invalid_message"


async def test_what_is_no_json_costs_its_episode():
    with pytest.raises(EpisodeError, match="JSON"):
        await ask(lambda _: "yes", messages=[*HELLO, {"role": "user", "content": "?", "extra": float("nan")}])


async def test_episodes_arrive_whether_the_teacher_answers_or_not():
    answers = iter([calling("c", a=1), "2", error(400, "no")])
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    async with OpenAIStandIn(lambda _: next(answers)) as server:
        teacher = served(server)
        contexts: ContextFactory = sampler_of(teacher, load("qwen3"))
        dispatcher = Dispatcher(
            {(Kind.TRAIN, "adding"): EpisodeRunner(Adding(), contexts, 10.0)}, arrivals.put_nowait, grace_s=0.1
        )
        group = Group("g", Task("adding", {}), 2, 0, draw_id=0)
        rollouts = []
        for number in range(2):
            dispatcher.start(Episode(number, Kind.TRAIN, group, number))
            rollouts += (await arrivals.get()).rollouts
        await dispatcher.close()
        await teacher.close()
    good, bad = rollouts
    assert (good.reward, good.error, good.oldest_version) == (1.0, None, None)
    assert bad.error is not None
    assert (bad.error.reason, "400" in bad.error.detail) == ("teacher", True)


async def test_a_teacher_that_is_not_there_is_seen_before_the_run():
    async with OpenAIStandIn() as server:
        teacher = served(server)
        assert [entry and entry.id for entry in await teacher.check()] == ["large"]
        await teacher.close()
        with pytest.raises(BadInput, match=r"'huge'.* small, large"):
            await ServedModel("huge", [server.url], retry_for=0).check()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(BadInput, match=f"large.*{url}/models"):
            await ServedModel("large", [url], retry_for=0).check()
