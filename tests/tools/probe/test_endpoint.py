"""Episodes sampled from a server: requests, replies, and predictions about groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from headrace.environments.base import EpisodeError, PromptTooLong, Reply
from headrace.errors import BadInput
from headrace.inference.client.openai_client import OpenAIUnreachable
from headrace.rollout.types import Task
from headrace.text.messages import openai_messages, parse_reply
from headrace.tools.evaluate.servers import TextContexts
from headrace.tools.probe import sampling
from headrace.tools.probe.report import LoadResult, ProbeReport
from headrace.tools.probe.sampling import SamplingEndpoint, sample
from tests.inference.openai_stand_in import OpenAIStandIn, Respond, completion, error
from tests.tools.probe.probed import ASKING, BIDDING, CALLING, DUEL

HELLO = [{"role": "user", "content": "hello"}]


def report(environment: str, scores_groups: bool = False) -> ProbeReport:
    opening = LoadResult(0.1, 0.1, 0.1, 2, 100, scores_groups, "")
    return ProbeReport(environment, {}, opening, [], [], 0, None, [], [], None)


def reply(message: dict[str, Any], finish_reason: str = "stop") -> web.Response:
    return web.json_response(completion("", message={"role": "assistant", **message}, finish_reason=finish_reason))


def calling(name: str, arguments: str) -> web.Response:
    function = {"name": name, "arguments": arguments}
    return reply({"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]})


async def ask(respond: Respond, max_tokens: int | None = None) -> tuple[Reply, list[dict[str, Any]]]:
    """Send one request through a context; return the reply and the bodies that the server received."""
    async with OpenAIStandIn(respond) as server:
        model = SamplingEndpoint(server.url, "m").served_model()
        context = TextContexts(model, {"temperature": 0.7, "max_tokens": 100}, None).open("", "episode")
        try:
            return await context.chat(HELLO, max_tokens=max_tokens), server.asked
        finally:
            await model.close()


async def test_a_question_carries_the_sampling_and_its_answer_becomes_a_reply():
    answer, (body,) = await ask(lambda _: reply({"content": "hi"}, "length"), max_tokens=20)
    assert body == {"model": "m", "messages": HELLO, "temperature": 0.7, "max_tokens": 20}
    assert (answer.text, answer.raw, answer.truncated) == ("hi", "hi", True)


async def test_transient_errors_are_retried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "RETRY_FOR_S", 0.5)
    answers: Iterator[web.Response | str] = iter([error(429, "busy"), error(500, "oops"), "hi"])
    answer, bodies = await ask(lambda _: next(answers))
    assert (answer.text, len(bodies)) == ("hi", 3)
    with pytest.raises(EpisodeError, match="oops") as failed:
        await ask(lambda _: error(500, "oops"))
    assert failed.value.reason == "endpoint"


async def test_permanent_errors_are_not_retried_and_a_full_context_ends_the_episode():
    with pytest.raises(EpisodeError, match="no such model"):
        await ask(lambda _: error(404, "no such model"))
    with pytest.raises(PromptTooLong):
        await ask(lambda _: error(400, "maximum context length is 8"))


async def test_messages_that_are_not_json_fail_their_episode():
    context = TextContexts(SamplingEndpoint("http://127.0.0.1:9/v1", "m").served_model(), {}, None).open("", "episode")
    for content in (float("nan"), b"bytes"):
        with pytest.raises(EpisodeError) as failed:
            await context.chat([{"role": "user", "content": content}])
        assert failed.value.reason == "invalid_message"


async def test_a_zero_sum_game_has_signal():
    lengths = iter([1, 2, 2, 1])
    async with OpenAIStandIn(lambda _: "x" * next(lengths)) as server:
        task, endpoint = Task(BIDDING, {"prize": 1}), SamplingEndpoint(server.url, "m", concurrency=1)
        result = await sample(report(BIDDING), [task], endpoint, 2, 2, lambda *_: None)
    assert result.rewards == [[[-1.0, 1.0], [1.0, -1.0]]]
    assert [p.without_signal for p in result.predictions] == [0]


def test_tool_calls_are_read_and_those_that_cannot_be_are_kept_as_text():
    given = [
        {"id": "a", "type": "function", "function": {"name": "press", "arguments": '{"word": "x"}'}},
        {"id": "b", "type": "function", "function": {"name": "press", "arguments": '{"word": '}},
        {"id": "c", "type": "function", "function": {"name": "press", "arguments": "[1]"}},
        {"id": "d", "type": "function"},
        {"id": "e", "type": "function", "function": {"name": "press", "arguments": ""}},
        {"id": "f", "type": "function", "function": {"name": "press", "arguments": '{"a": 99999999999999999999}'}},
    ]
    answer = parse_reply({"content": None, "tool_calls": given, "reasoning_content": "hm"}, "tool_calls")
    assert [(call.id, call.arguments) for call in answer.tool_calls if not call.error] == [
        ("a", {"word": "x"}),
        ("e", {}),
    ]
    assert [call.error for call in answer.tool_calls if call.error] == [
        "the tool call is not valid JSON",
        "the arguments of a tool call must be a JSON object",
        "the tool call names no tool",
        "the tool call has a number or a character that cannot be passed on",
    ]
    assert [call["id"] for call in answer.message["tool_calls"]] == ["a", "e"]
    assert answer.text.count("\n") == 3
    assert (answer.message["reasoning_content"], answer.raw, answer.truncated) == (
        "hm",
        "<think>\nhm\n</think>\n\n",
        False,
    )


def test_messages_go_out_in_openais_form():
    call = {"id": "a", "type": "function", "function": {"name": "press", "arguments": {"word": "x"}}}
    sent = openai_messages(
        [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "a", "content": "pressed"},
            {"role": "tool", "tool_call_id": "b", "content": "Error: not valid JSON"},
        ]
    )
    assert sent[1]["tool_calls"][0]["function"] == {"name": "press", "arguments": '{"word": "x"}'}
    assert "reasoning_content" not in sent[1]
    assert sent[2]["role"] == "tool"
    assert sent[3] == {"role": "user", "content": "Error: not valid JSON"}  # without a matching call


def test_calls_without_an_id_get_one_and_so_do_their_results():
    calls = [{"type": "function", "function": {"name": "press", "arguments": {}}}] * 2
    replies = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    asked, *results = openai_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *replies, replies[0]])
    identities = [call["id"] for call in asked["tool_calls"]]
    assert len(set(identities)) == 2
    assert results[:2] == [{**result, "tool_call_id": name} for result, name in zip(replies, identities, strict=True)]
    assert results[2] == {"role": "user", "content": "one"}  # without a matching call


def test_arguments_that_are_a_json_text_are_sent_as_they_are():
    call = {"id": "a", "type": "function", "function": {"name": "press", "arguments": '{"word": "x"}'}}
    (sent,) = openai_messages(
        [{"role": "assistant", "content": "", "tool_calls": [call, {"function": {"name": "press"}}]}]
    )
    assert [made["function"]["arguments"] for made in sent["tool_calls"]] == ['{"word": "x"}', "{}"]


async def test_calls_that_cannot_be_sent_fail_their_episode():
    context = TextContexts(SamplingEndpoint("http://127.0.0.1:9/v1", "m").served_model(), {}, None).open("", "episode")
    for call in ({"id": "a"}, "press", {"id": "a", "function": {"name": "press", "arguments": {"a": b"bytes"}}}):
        with pytest.raises(EpisodeError) as failed:
            await context.chat([*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert failed.value.reason == "invalid_message"


async def test_an_answer_in_parts_is_their_text():
    parts = [{"type": "text", "text": "hi, "}, {"type": "image_url", "image_url": {}}, "you"]
    answer, _ = await ask(lambda _: reply({"content": parts}))
    assert (answer.text, answer.raw) == ("hi, you", "hi, you")


async def test_episodes_with_tools_are_played_and_predict_the_signal():
    words = iter(["no"] + ["mill"] * 7)

    def respond(body: dict[str, Any]) -> web.Response | str:
        has_result = body["messages"][-1]["role"] == "tool"
        return "Done." if has_result else calling("press", json.dumps({"word": next(words)}))

    progress: list[tuple[str, int, int]] = []
    tasks = [Task(CALLING, {"word": "mill"}), Task(CALLING, {"word": "other"})]
    async with OpenAIStandIn(respond) as server:
        endpoint = await SamplingEndpoint(server.url, concurrency=1).with_model()  # in the order of tasks
        result = await sample(report(CALLING), tasks, endpoint, 4, 2, lambda *step: progress.append(step))
    assert result.model == "small"
    first, second = ([reward for (reward,) in episodes] for episodes in result.rewards)
    assert (first, second) == (pytest.approx([0.0, 1.1, 1.1, 1.1]), [0.0] * 4)
    assert (result.problems, result.episodes, result.truncated) == ([], 8, 0)
    # of the first task's 6 pairs 3 are equal, of the second task's all
    assert [(p.group_size, p.without_signal) for p in result.predictions] == [(2, 0.75), (4, 0.5)]
    assert progress[-1] == ("sampling from small", 8, 8)
    assert server.asked[0]["tools"][0]["function"]["name"] == "press"


async def test_failed_and_cut_off_episodes_are_counted_and_groups_are_scored_together():
    lengths = iter([1, 2, 3, 4])

    def respond(body: dict[str, Any]) -> web.Response:
        length = next(lengths)
        return error(400, "no") if length == 1 else reply({"content": "x" * length}, "length")

    task = Task(DUEL, {"letter": "x"})
    async with OpenAIStandIn(respond) as server:
        result = await sample(report(DUEL, True), [task], SamplingEndpoint(server.url, "m"), 4, 4, lambda *_: None)
    assert sorted(result.rewards[0]) == [[0.0], [0.0], [1.0]]  # the longest of those that came to an end
    assert [problem.reason for problem in result.problems] == ["endpoint"]
    assert (result.episodes, result.truncated) == (4, 3)


async def test_a_server_that_is_not_there_is_an_error_at_once_and_needs_an_address():
    with pytest.raises(OpenAIUnreachable):
        await SamplingEndpoint("http://127.0.0.1:9/v1").with_model()
    with pytest.raises(BadInput, match="address"):
        await SamplingEndpoint("localhost:8000").with_model()
    assert (await SamplingEndpoint("localhost:8000", "named").with_model()).model == "named"


async def test_a_task_whose_episodes_all_fail_has_no_rewards():
    async with OpenAIStandIn(lambda _: error(400, "no")) as server:
        task, endpoint = Task(ASKING, {"number": 12}), SamplingEndpoint(server.url, "m")
        result = await sample(report(ASKING), [task], endpoint, 2, 4, lambda *_: None)
    assert (result.rewards, result.predictions) == ([[]], [])
    assert len(result.problems) == 2
