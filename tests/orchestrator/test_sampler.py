"""Sampling from the engine: the requests that are sent, and how responses become replies."""

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable
from typing import Any
from unittest.mock import patch

import pytest
from renderers import config_from_name, create_renderer

from headrace.environments.base import EpisodeError, PromptTooLong
from headrace.environments.chat import Tool
from headrace.inference.schema import Completion, StructuredOutputs
from headrace.orchestrator.conversation import derive_seed
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.types import Message
from headrace.text.completion import MAX_TOOL_CALLS
from headrace.text.tokenizer import Tokenizer
from tests.orchestrator.recording_engine import RecordingEngine, scripted
from tests.text.families import FAMILIES, Model, Said, load

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def add(a: int) -> int:
    """Add."""
    return a


SCHEMAS = [Tool(add).schema]


def yes(model: Model) -> RecordingEngine:
    """Answers yes to every request."""
    return RecordingEngine(lambda prompt, sampling: (model.written(Said("yes")), "stop"))


def sampler_of(model: Model, engine: RecordingEngine, seq_len: int = 1000, **options: Any) -> Sampler:
    return Sampler(engine.client, model.renderer, model.tokenizer, seq_len, **options)


async def say(model: Model, text: str, reason: str = "stop", tools: Any = SCHEMAS) -> Any:
    """The reply that a completion with this text becomes."""
    engine = RecordingEngine(scripted(model.encode(text), reason=reason))
    return await sampler_of(model, engine, 100_000).open("session", "episode").chat(HELLO, tools)


@pytest.mark.parametrize(
    ("of_run", "of_call", "asked"), [(None, None, 970), (50, None, 50), (None, 40, 40), (50, 40, 40), (20, 40, 20)]
)
async def test_a_reply_may_be_as_long_as_the_least_of_room_run_and_call_allow(
    of_run: int | None, of_call: int | None, asked: int
):
    model = load("qwen3")
    prompt = len(model.renderer.render_ids(HELLO, add_generation_prompt=True))
    engine = yes(model)
    line = sampler_of(model, engine, prompt + 970, max_tokens=of_run).open("session", "episode")
    await line.chat(HELLO, max_tokens=of_call)
    assert engine.exchanges[0].sampling.max_tokens == asked


async def test_a_prompt_may_leave_room_for_one_token_and_no_less():
    model = load("qwen3")
    length = len(model.renderer.render_ids(HELLO, add_generation_prompt=True))
    engine = yes(model)
    await sampler_of(model, engine, length + 1).open("session", "episode").chat(HELLO)
    assert engine.exchanges[0].sampling.max_tokens == 1
    with pytest.raises(PromptTooLong, match=rf"\b{length}\b.*seq_len.*\b{length}\b"):
        await sampler_of(model, engine, length).open("session", "episode").chat(HELLO)
    assert len(engine.exchanges) == 1


@pytest.mark.parametrize(
    ("trains", "tools", "followed"), [(False, [], True), (True, [], False), (False, SCHEMAS, False)]
)
async def test_structured_outputs_are_followed_where_tokens_are_not_trained_on(
    trains: bool, tools: Any, followed: bool, caplog: pytest.LogCaptureFixture
):
    model = load("qwen3")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'  # of a structured reply, it is text
    engine = RecordingEngine(lambda prompt, sampling: ([*model.encode(call), *model.encode("<|im_end|>")], "stop"))
    line = sampler_of(model, engine, trains=trains).open("session", "episode")
    outputs = StructuredOutputs(regex=re.escape(call))
    replies = [await line.chat(HELLO, tools, structured_outputs=outputs) for _ in range(2)]
    sent = [exchange.sampling.structured_outputs for exchange in engine.exchanges]
    assert sent == [outputs if followed else None] * 2
    assert len(caplog.records) == (0 if followed else 1)
    if followed:
        assert replies[0].message == {"role": "assistant", "content": call}
        assert replies[0].tool_calls == []


async def test_tools_need_a_renderer_that_reads_calls():
    model = load("default")
    renderer = create_renderer(model.tokenizer, config_from_name("default"))
    line = Sampler(yes(model).client, renderer, model.tokenizer, seq_len=1000).open("session", "episode")
    with pytest.raises(EpisodeError) as raised:
        await line.chat(HELLO, SCHEMAS)
    assert raised.value.reason == "no_tool_parser"
    assert (await line.chat(HELLO)).text == "yes"


async def test_a_run_is_warned_once_that_its_policy_sees_no_tools(caplog: pytest.LogCaptureFixture):
    warning = "the policy's chat template does not show tools"
    await sampler_of(load("default"), yes(load("default"))).open("session", "episode").chat(HELLO, SCHEMAS)
    assert warning not in caplog.text
    with patch("tests.text.families.CHATML", "{% for message in messages %}{{ message.content }}{% endfor %}"):
        model = Model("default")
    line = sampler_of(model, yes(model)).open("session", "episode")
    await line.chat(HELLO)
    assert warning not in caplog.text
    for _ in range(2):
        await line.chat(HELLO, SCHEMAS)
    assert caplog.text.count(warning) == 1


async def test_the_engine_is_asked_as_the_run_says():
    model = load("llama-3")
    engine = yes(model)
    salts = iter(("0-1", "0-2"))
    seen: list[tuple[list[int], Completion, float]] = []
    sampler = sampler_of(
        model,
        engine,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        cache_salt=lambda: next(salts),
        observe=lambda *what: seen.append(what),
    )
    line = sampler.open("group-7", "episode")
    assert engine.joined == ["group-7"]
    replies = [await line.chat(HELLO) for _ in range(2)]
    sampler.close("group-7")
    assert engine.joined == []
    for exchange, salt in zip(engine.exchanges, ("0-1", "0-2"), strict=True):
        sampling = exchange.sampling
        found = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed
        assert found == (0.7, 0.9, 40, 0.05, None)
        assert sampling.stop_token_ids == model.encode("<|eot_id|><|end_of_text|><|eom_id|>")
        assert (exchange.session, exchange.cache_salt) == ("group-7", salt)
    assert [reply.turn.temperature for reply in replies] == [0.7, 0.7]
    assert seen == [(exchange.prompt, exchange.completion, 0.7) for exchange in engine.exchanges]


async def test_every_request_of_a_run_has_a_seed_of_its_own_that_it_has_in_every_run():
    model = load("qwen3")
    other: list[Message] = [{"role": "user", "content": "other"}]

    async def seeds(episode: str, *asked: tuple[list[Message], Any], seed: int = 3) -> list[int | None]:
        engine = yes(model)
        line = sampler_of(model, engine, seed=seed).open("session", episode)
        for messages, tools in asked:
            await line.chat(messages, tools)
        return [exchange.sampling.seed for exchange in engine.exchanges]

    first = await seeds("a", (HELLO, []), (HELLO, []), (other, []), (HELLO, SCHEMAS))
    assert len(set(first)) == 4
    assert await seeds("a", (HELLO, []), (HELLO, []), (other, []), (HELLO, SCHEMAS)) == first
    swapped = await seeds("a", (HELLO, SCHEMAS), (other, []), (HELLO, []), (HELLO, []))
    assert swapped == [first[3], first[2], first[0], first[1]]  # distinguished by content, not by order
    assert set(first).isdisjoint(await seeds("b", (HELLO, []), (other, [])))
    assert set(first).isdisjoint(await seeds("a", (HELLO, []), (other, []), seed=4))
    assert all(seed is not None and 0 <= seed < 2**63 for seed in first)


def test_a_seed_is_the_same_on_every_machine():
    assert derive_seed("3-x") == 0x64C412DF5BB92684 >> 1  # what `printf 3-x | b2sum -l 64` prints


@pytest.mark.parametrize(
    ("name", "completion", "raw"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nyes<|im_end|>", "<think>\nhm\n</think>\n\nyes"),
        ("qwen3", "yes<|endoftext|>", "yes"),
        ("qwen3", "<think>\nhm", "<think>\nhm"),
        ("qwen3-without-thoughts", "yes<|im_end|>", "yes"),
        ("qwen3.5", "hm\n</think>\n\nyes<|im_end|>", "<think>hm\n</think>\n\nyes"),
        ("minimax-m2", "hm\n</think>\n\nyes[e~[", "<think>hm\n</think>\n\nyes"),
        ("llama-3", '{"name": "add", "parameters": {}}<|eom_id|>', '{"name": "add", "parameters": {}}'),
        ("qwen3", "a<|im_end|>b", "a<|im_end|>b"),
        ("qwen3", "", ""),
    ],
)
async def test_raw_is_all_that_was_written_with_thoughts_that_the_prompt_began(name: str, completion: str, raw: str):
    assert (await say(load(name), completion)).raw == raw


async def test_thoughts_text_and_calls_are_separated():
    model = load("qwen3")
    reply = await say(
        model, model.family.write(Said("ok", [("add", {"a": 1}), ("add", {"a": 2})], "hm")) + "<|im_end|>"
    )
    assert reply.text == "ok"
    assert reply.message == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
        ],
    }
    assert [(call.id, call.name, call.arguments, call.error) for call in reply.tool_calls] == [
        ("call_0", "add", {"a": 1}, ""),
        ("call_1", "add", {"a": 2}, ""),
    ]
    assert not reply.truncated


async def test_calls_are_numbered_through_a_conversation():
    model = load("qwen3")
    call = model.written(Said("", [("add", {"a": 1})]))
    unread = model.encode("<tool_call>\n{no}\n</tool_call><|im_end|>")
    line = sampler_of(model, RecordingEngine(scripted(unread, call, call))).open("session", "episode")
    messages = [*HELLO]
    for n in range(3):
        reply = await line.chat(messages, SCHEMAS)
        assert [each.id for each in reply.tool_calls] == [f"call_{n}"]
        messages += [reply.message, {"role": "tool", "tool_call_id": f"call_{n}", "content": "1"}]


async def test_a_call_keeps_the_name_that_its_format_gives_it():
    model = load("kimi-k2")
    reply = await say(model, model.family.write(Said("", [("add", {"a": 1})])) + "<|im_end|>")
    assert reply.tool_calls[0].id == reply.message["tool_calls"][0]["id"] == "functions.add:0"


UNREADABLE = {
    "{no json}": "the tool call is not valid JSON",
    '{"arguments": {}}': "the tool call names no tool",
    '{"name": "", "arguments": {}}': "the tool call names no tool",
    '{"name": 5, "arguments": {}}': "the tool call names no tool",
    '{"name": ["add"], "arguments": {}}': "the tool call names no tool",
    '{"name": "\\ud800", "arguments": {}}': "the tool call names no tool",
    '{"name": "add", "arguments": [1]}': "the arguments of a tool call must be a JSON object",
    '{"name": "add", "arguments": "{}"}': "the arguments of a tool call must be a JSON object",
    '{"name": "add", "arguments": {"a": 18446744073709551616}}': "a number or a character that cannot be passed on",
    '{"name": "add", "arguments": {"a": "\\ud800"}}': "a number or a character that cannot be passed on",
    '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}": "the tool call is not valid JSON",
    "[" * 100_000: "the tool call is not valid JSON",
}


@pytest.mark.parametrize("written", UNREADABLE, ids=lambda text: text[:40])
async def test_a_call_that_cannot_be_read_says_why_and_stays_in_the_text(written: str):
    reply = await say(load("qwen3"), f"ok\n<tool_call>\n{written}\n</tool_call><|im_end|>")
    (call,) = reply.tool_calls
    assert UNREADABLE[written] in call.error
    assert call.arguments == {}
    assert written in reply.text
    assert reply.text.startswith("ok")
    assert "tool_calls" not in reply.message


async def test_a_call_that_was_cut_off_is_not_closed():
    reply = await say(load("qwen3"), '<tool_call>\n{"name": "add"', reason="length")
    assert [call.error for call in reply.tool_calls] == ["the tool call is not closed"]
    assert reply.text == '{"name": "add"'
    assert reply.truncated


async def test_a_name_that_no_tool_has_is_a_call_all_the_same():
    for name in ("qwen3", "glm-4.5", "gpt-oss"):
        model = load(name)
        text = model.family.write(Said("", [("subtract", {"a": 1})], "hm"))
        reply = await say(model, text + (model.family.stop_after_call or model.family.stop))
        assert [(call.name, call.error) for call in reply.tool_calls] == [("subtract", "")]


async def test_only_the_unreadable_calls_of_a_reply_are_left_out_of_its_message():
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = await say(load("qwen3"), f"{good}\n<tool_call>\n{{no}}\n</tool_call>\n{good}<|im_end|>")
    assert [bool(call.error) for call in reply.tool_calls] == [False, True, False]
    assert [call["id"] for call in reply.message["tool_calls"]] == ["call_0", "call_2"]
    assert reply.text == "{no}"


async def test_the_calls_beyond_the_most_are_answered_as_one():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = await say(load("qwen3"), "ok" + call * (MAX_TOOL_CALLS + 3) + "<|im_end|>")
    assert [bool(each.error) for each in reply.tool_calls] == [False] * MAX_TOOL_CALLS + [True]
    assert reply.tool_calls[-1].id == f"call_{MAX_TOOL_CALLS}"
    assert "at most 16 tools" in reply.tool_calls[-1].error
    assert len(reply.message["tool_calls"]) == MAX_TOOL_CALLS
    assert reply.text.startswith("ok")
    assert reply.text.count('"name": "add"') == 3  # as it was written
    exact = await say(load("qwen3"), call * MAX_TOOL_CALLS + "<|im_end|>")
    assert [each.error for each in exact.tool_calls] == [""] * MAX_TOOL_CALLS


async def meanwhile(work: Awaitable[Any]) -> tuple[Any, set[str]]:
    """What came of the work, and the names of the threads that encoded or decoded text meanwhile."""
    seen: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in (Tokenizer.encode.__code__, Tokenizer.decode.__code__):
            seen.add(threading.current_thread().name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        return await work, seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("calls", [1, 5000])
async def test_a_long_reply_is_read_in_a_thread(calls: int):
    reply, threads = await meanwhile(say(load("qwen3"), "<tool_call></tool_call>" * calls + "<|im_end|>"))
    assert len(reply.tool_calls) == min(calls, MAX_TOOL_CALLS + 1)
    assert any(name.startswith("asyncio") for name in threads) == (calls > 1)


@pytest.mark.parametrize("words", [1, 10_000])
async def test_a_long_prompt_is_made_in_a_thread_and_is_the_same(words: int):
    model = load("qwen3-all")
    engine = yes(model)
    line = sampler_of(model, engine, 100_000).open("session", "episode")
    messages: list[Message] = [{"role": "user", "content": "cat " * words}]
    expected = model.renderer.render_ids(messages, add_generation_prompt=True)
    reply, threads = await meanwhile(line.chat(messages))
    assert any(name.startswith("asyncio") for name in threads) == (words > 1)
    messages += [reply.message, {"role": "user", "content": "and " * words}]
    await line.chat(messages)
    before = expected + reply.turn.completion_ids.tolist()
    assert engine.exchanges[0].prompt == expected
    assert engine.exchanges[1].prompt[: len(before)] == before


async def test_episodes_that_ask_the_same_long_prompt_share_it():
    model = load("qwen3")
    sampler = sampler_of(model, yes(model), 100_000)
    messages: list[Message] = [{"role": "user", "content": "cat " * 10_000}]
    replies = await asyncio.gather(*(sampler.open("session", f"{n}").chat(messages) for n in range(4)))
    assert all(reply.turn.prompt_ids is replies[0].turn.prompt_ids for reply in replies)


@pytest.mark.parametrize("pool_size", [1, 3])
async def test_as_many_long_prompts_are_made_at_once_as_the_pool_holds(monkeypatch: pytest.MonkeyPatch, pool_size: int):
    model = load("qwen3")
    sampler = sampler_of(model, yes(model), 100_000, pool_size=pool_size)
    render, full, counting = sampler.prompter.prompts.render, threading.Event(), threading.Lock()
    inside: list[int] = []
    most = 0

    def seen(messages: Any, tools: Any) -> Any:
        nonlocal most
        with counting:
            inside.append(1)
            most = max(most, len(inside))
        if most >= pool_size:
            full.set()
        full.wait(60)  # for the others that may be inside
        prompt = render(messages, tools)
        with counting:
            inside.pop()
        return prompt

    monkeypatch.setattr(sampler.prompter.prompts, "render", seen)
    asked: list[list[Message]] = [[{"role": "user", "content": f"cat {n} " * 5_000}] for n in range(5)]
    await asyncio.gather(*(sampler.open("session", f"{n}").chat(asked[n]) for n in range(5)))
    assert most == pool_size


async def test_a_prompt_that_cannot_fit_is_not_tokenised():
    model = load("qwen3")
    line = sampler_of(model, yes(model), 1000).open("session", "episode")
    long: list[Message] = [*HELLO, {"role": "tool", "tool_call_id": "0", "content": "lorem ipsum " * 100_000}]
    refused, threads = await meanwhile(asyncio.gather(line.chat(long), return_exceptions=True))
    assert threads == set()
    with pytest.raises(PromptTooLong, match=r"seq_len.*\b1000\b"):
        raise refused[0]


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({"role": "developer", "content": "a"}, "messages[1].role"),
        ({"role": "User", "content": "a"}, "messages[1].role"),
        ({"role": "", "content": "a"}, "messages[1].role"),
        ({"role": ["user"], "content": "a"}, "messages[1].role"),
        ({"content": "a"}, "messages[1].role"),
        ("hello", "messages[1]"),
        ({"role": "user", "content": 5}, "messages[1].content"),
    ],
)
async def test_a_message_that_the_prompt_would_lack_is_refused(message: Any, key: str):
    model = load("qwen3")
    engine = yes(model)
    with pytest.raises(EpisodeError, match=re.escape(key)) as raised:
        await sampler_of(model, engine).open("session", "episode").chat([*HELLO, message])
    assert raised.value.reason == "invalid_message"
    assert engine.exchanges == []


@pytest.mark.parametrize("name", FAMILIES)
async def test_where_there_are_no_tools_a_call_and_what_follows_it_stay_in_the_text(name: str):
    model = load(name)
    written = model.family.write(Said("-61", [("x", {})], "hm" if model.family.thinks else ""))
    reply = await say(model, f"{written}\nno idea, maybe 7{model.family.stop}", tools=[])
    assert "no idea, maybe 7" in reply.text
    assert "x" in reply.text
    assert "tool_calls" not in reply.message


async def test_a_call_where_there_are_no_tools_is_listed_all_the_same():
    text = '-61\n<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>\nmaybe 7'
    reply = await say(load("qwen3"), f"<think>\nhm\n</think>\n\n{text}<|im_end|>", tools=[])
    assert reply.text == text
    assert reply.message == {"role": "assistant", "content": text, "reasoning_content": "hm"}
    assert [call.name for call in reply.tool_calls] == ["x"]
