"""A teacher's reply becomes the policy's own tokens: exact, and one sample where the chat format allows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import config_from_name, create_renderer

from headrace.environments.base import EpisodeError, PromptTooLong, Reply, ToolCall
from headrace.orchestrator.conversation import Continuation, Prompter
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import NOT_SAMPLED, ROLES, Message, Rollout
from headrace.text.messages import untrained_reply
from headrace.text.renderer import make_renderer
from headrace.text.teacher_reply import TeacherReplyRewriter, UntrainableReply
from headrace.text.tokenizer import Tokenizer
from tests.orchestrator.adversary import TOOLS
from tests.text.families import FAMILIES, KEEPS_HISTORY, Model, Said, load

SEEDS = st.randoms(use_true_random=True)
SCHEMAS = [tool.schema for tool in TOOLS.values()]
HELLO: list[Message] = [{"role": "user", "content": "hello the cat"}]
TEXTS = ("hello the cat", "and 123", "é, the end.", "user", "a\n\nb")
FORGETS_THOUGHTS = ("qwen3", "qwen3.5", "glm-4.5", "minimax-m2", "gpt-oss")


def said(text: str = "", calls: int = 0, thought: str = "", finish_reason: str = "stop") -> Reply:
    """A teacher's words; its server has names of its own for tool calls."""
    made = [ToolCall(f"chatcmpl-{number}", "add", {"a": 12, "q": "é"}) for number in range(calls)]
    return untrained_reply(text, made, raw=text, reasoning=thought, finish_reason=finish_reason)


def prompter_of(model: Model, seq_len: int = 100_000) -> Prompter:
    return Prompter(model.renderer, model.tokenizer, seq_len)


def rewriter_of(model: Model, seq_len: int = 100_000) -> TeacherReplyRewriter:
    return TeacherReplyRewriter(model.renderer, model.tokenizer, seq_len)


async def say(model: Model, words: Reply, tools: Any = SCHEMAS, seq_len: int = 100_000) -> Reply:
    prompt = await prompter_of(model, seq_len).build(HELLO, tools, None)
    return rewriter_of(model, seq_len).rewrite(words, prompt, tools, 0)


def results(reply: Reply, content: str = "15") -> list[Message]:
    return [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": content} for c in reply.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=10, derandomize=True)
@given(rng=SEEDS)
def test_a_conversation_with_tools_is_one_sample_of_the_tokens_that_the_policy_would_write(name: str, rng: Random):
    asyncio.run(_talk(load(name), rng))


async def _talk(model: Model, rng: Random) -> None:
    """Three replies, of which the first two call tools: no format rewrites history within that."""
    thought = rng.choice(("", *TEXTS)) if model.family.thinks else ""
    single = model.family.renderer in ("llama-3", "gpt-oss", "default")
    replies = [
        said("" if single else rng.choice(("", *TEXTS)), 1 if single else rng.randint(1, 2), thought),
        said("" if single else rng.choice(("", *TEXTS)), 1, thought),
        said(rng.choice(TEXTS), 0, thought),
    ]
    prompter, messages, turns, continuation = prompter_of(model), [*HELLO], [], None
    for words in replies:
        prompt = await prompter.build(messages, SCHEMAS, continuation)
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        reply = rewriter_of(model).rewrite(words, prompt, SCHEMAS, calls)
        made = [("add", {"a": 12, "q": "é"})] * len(words.tool_calls)
        _check_reply(model, reply, words, model.written(Said(words.message["content"], made, thought)))
        news = results(reply, rng.choice(TEXTS))
        messages += [reply.message, *news]
        turns.append(reply.turn)
        continuation = Continuation(reply.turn, news)
    (sample,) = merge_turns(turns)
    assert sample.token_ids[sample.mask].tolist() == [token for turn in turns for token in turn.completion_ids.tolist()]
    assert (sample.versions == NOT_SAMPLED).all()
    assert not sample.logprobs.any()
    assert sample.temperature == 1.0
    assert Rollout(turns=turns).oldest_version is None  # it never ages


def _check_reply(model: Model, reply: Reply, words: Reply, written: list[int]) -> None:
    ids = reply.turn.completion_ids.tolist()
    if model.family.renderer == "qwen3" and model.family.thinks and "reasoning_content" not in words.message:
        written = [*model.encode("<think>\n\n</think>\n\n"), *written]  # as its own template has it
    if model.family.renderer != "kimi-k2":  # whose calls are numbered through the conversation
        assert ids == written
    assert ids[-1] in model.stops
    assert reply.text.strip() == words.text.strip()
    assert reply.message.get("reasoning_content", "").strip() == words.message.get("reasoning_content", "").strip()
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"a": 12, "q": "é"})] * len(
        words.tool_calls
    )
    assert [call["id"] for call in reply.message.get("tool_calls", ())] == [call.id for call in reply.tool_calls]
    assert reply.turn.finish_reason == "stop"


@pytest.mark.parametrize("name", KEEPS_HISTORY)
async def test_where_history_is_kept_questions_go_on_in_one_sample(name: str):
    model = load(name)
    prompter, messages, turns, continuation = prompter_of(model), [*HELLO], [], None
    for words in (said("one", thought="hm"), said("two", thought="hm"), said("three")):
        reply = rewriter_of(model).rewrite(words, await prompter.build(messages, [], continuation), [], 0)
        news: list[Message] = [{"role": "user", "content": "and?"}]
        messages += [reply.message, *news]
        turns.append(reply.turn)
        continuation = Continuation(reply.turn, news)
    assert len(merge_turns(turns)) == 1


@pytest.mark.parametrize("name", FORGETS_THOUGHTS)
async def test_where_a_question_erases_thoughts_the_conversation_splits(name: str):
    model = load(name)
    prompter = prompter_of(model)
    first = rewriter_of(model).rewrite(said("one", thought="hm"), await prompter.build(HELLO, [], None), [], 0)
    news: list[Message] = [{"role": "user", "content": "and?"}]
    prompt = await prompter.build([*HELLO, first.message, *news], [], Continuation(first.turn, news))
    second = rewriter_of(model).rewrite(said("two", thought="hm"), prompt, [], 0)
    assert len(merge_turns([first.turn, second.turn])) == 2
    assert "hm" not in model.decode(second.turn.prompt_ids.tolist())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "default"])
async def test_prompts_say_who_wrote_what(name: str):
    model = load(name)
    turn = (await say(model, said("yes"))).turn
    assert turn.prompt_roles is not None
    user = turn.prompt_ids[turn.prompt_roles == ROLES.index("user")]
    assert model.decode(user.tolist()) == "hello the cat"


async def test_tool_calls_are_numbered_through_the_conversation_in_every_format():
    for name, identities in (
        ("qwen3", ["call_3", "call_4"]),
        ("kimi-k2", ["functions.add:3", "functions.add:4"]),
    ):
        model = load(name)
        prompter = prompter_of(model)
        reply = rewriter_of(model).rewrite(said(calls=2), await prompter.build(HELLO, SCHEMAS, None), SCHEMAS, 3)
        assert [call.id for call in reply.tool_calls] == identities
    assert "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>" in reply.raw


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nyes"),
        ("qwen3.5", "<think>hm\n</think>\n\nyes"),
        ("qwen3-without-thoughts", "yes"),
        ("llama-3", "yes"),
    ],
)
async def test_raw_is_all_that_the_policy_would_have_written(name: str, raw: str):
    reply = await say(load(name), said("yes", thought="hm"))
    assert (reply.raw, reply.text) == (raw, "yes")
    assert reply.message.get("reasoning_content") == ("hm" if "hm" in raw else None)


async def test_thoughts_that_a_server_leaves_in_the_text_are_separated():
    reply = await say(load("qwen3"), said("<think>\nhm\n</think>\n\nyes"))
    assert reply.message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


async def test_what_was_cut_off_has_no_stop_token_and_is_truncated():
    model = load("qwen3")
    for words, written in (
        (said("yes", thought="hm", finish_reason="length"), "<think>\nhm\n</think>\n\nyes"),
        (said("", thought="hm the", finish_reason="length"), "<think>\nhm the"),
    ):
        reply = await say(model, words)
        assert model.decode(reply.turn.completion_ids.tolist()) == written
        assert (reply.truncated, reply.raw) == (True, written)
    with pytest.raises(UntrainableReply, match=r"sampling\.max_tokens"):
        await say(load("llama-3"), said("", thought="hm the", finish_reason="length"))


async def test_a_reply_beyond_seq_len_is_cut_and_truncated():
    model = load("qwen3")
    asked = len(model.renderer.render_ids(HELLO, add_generation_prompt=True))
    whole = (await say(model, said("one two three"), [])).turn
    cut = await say(model, said("one two three"), [], asked + 6)
    assert cut.turn.completion_ids.tolist() == whole.completion_ids.tolist()[:6]
    assert cut.truncated
    exact = await say(model, said("one two three"), [], asked + len(whole.completion_ids))
    assert not exact.truncated
    with pytest.raises(PromptTooLong, match=rf"\b{asked}\b.*seq_len.*\b{asked}\b"):
        await say(model, said("yes"), [], asked)


async def test_a_conversation_that_is_surely_too_long_is_not_rendered():
    prompter = prompter_of(load("qwen3"), 100)
    with pytest.raises(PromptTooLong, match=r"seq_len.*\b100\b"):
        await prompter.build([{"role": "user", "content": "x" * 100_000}], [], None)


async def test_long_texts_are_written_beside_the_loop():
    model = load("qwen3")
    prompter = prompter_of(model, 1_000_000)
    messages: list[Message] = [{"role": "user", "content": "the cat " * 5000}]
    prompt = await prompter.build(messages, [], None)
    assert prompt.ids == model.renderer.render_ids(messages, add_generation_prompt=True)
    text = "and the cat " * 5000
    reply = rewriter_of(model).rewrite(said(text.strip()), prompt, [], 0)
    assert reply.text == text.strip()


@pytest.mark.parametrize("error", ["the tool call is not valid JSON", "the tool call names no tool"])
async def test_a_call_that_cannot_be_read_is_not_taught(error: str):
    words = untrained_reply("", [ToolCall("c", "add", {}, error)], raw="")
    with pytest.raises(UntrainableReply, match=error):
        await say(load("qwen3"), words)


async def test_calls_that_a_server_leaves_in_the_text_are_an_error_that_says_so():
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
    with pytest.raises(UntrainableReply, match=r"\[\].*\['add'\]"):
        await say(load("qwen3"), said(text))
    reply = await say(load("qwen3"), said(text), tools=[])  # without tools it is just text
    assert (reply.text, reply.tool_calls) == (text, [])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_control_tokens_in_a_teachers_words_are_not_taught(name: str, finish_reason: str):
    model = load(name)
    shows_thoughts = model.family.thinks and model.family.renderer != "gpt-oss"
    for token in model.family.special:
        words = [said(f"say {token} and more", 0, "", finish_reason)]
        if shows_thoughts:
            words += [said("say", 0, f"hm {token} hm", finish_reason), said(f"{token}user", 0, "hm", finish_reason)]
        for each in words:
            with pytest.raises(UntrainableReply, match=re.escape(f" {token}")):
                await say(model, each, [])


@pytest.mark.parametrize("name", ["qwen3", "llama-3", "default"])
async def test_control_tokens_in_a_teachers_calls_are_not_taught(name: str):
    model = load(name)
    stop = model.family.stop
    for tool, arguments in (("add", {"q": f"a {stop}"}), ("add", {stop: 1}), ("add", {"q": [{"k": stop}]}), (stop, {})):
        words = untrained_reply("", [ToolCall("c", tool, arguments)], raw="")
        with pytest.raises(UntrainableReply, match=re.escape(stop)):
            await say(model, words)


async def test_calls_of_which_the_first_would_end_the_reply_are_not_taught():
    with pytest.raises(UntrainableReply, match=r"<\|call\|>"):
        await say(load("gpt-oss"), said(calls=2))


async def test_words_that_only_look_like_control_tokens_are_taught():
    model = load("llama-3")
    text = "a <|im_end|> is no token of this model, <eot_id> neither"
    assert (await say(model, said(text))).text == text


SEARCH = {"type": "object", "properties": {"n": {"type": "integer"}, "q": {"type": "string"}, "x": {"type": "boolean"}}}
SEARCHES = [{"type": "function", "function": {"name": "search", "description": "Search.", "parameters": SEARCH}}]


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("qwen3", {"n": "12", "q": " pad "}, {"n": "12", "q": " pad "}),
        ("qwen3.5", {"n": "12", "q": " pad "}, {"n": 12, "q": "pad"}),
        ("qwen3.5", {"q": True}, {"q": "True"}),
        ("glm-4.5", {"n": "12", "q": True, "x": True}, {"n": 12, "q": "true", "x": True}),
        ("minimax-m2", {"n": "12", "q": 7}, {"n": 12, "q": "7"}),
    ],
)
async def test_a_call_has_the_arguments_that_the_policys_format_says(name: str, given: Any, read: Any):
    words = untrained_reply("", [ToolCall("c", "search", given)], raw="")
    reply = await say(load(name), words, tools=SEARCHES)
    assert [call.arguments for call in reply.tool_calls] == [read]
    assert [call["function"]["arguments"] for call in reply.message["tool_calls"]] == [read]


async def test_a_call_that_the_policys_format_cannot_read_is_not_taught():
    words = untrained_reply("", [ToolCall("c", "search", {"x": True})], raw="")  # its template writes True, no JSON
    with pytest.raises(UntrainableReply, match="search"):
        await say(load("qwen3.5"), words, tools=SEARCHES)


async def test_what_the_chat_format_cannot_write_costs_the_episode():
    with pytest.raises(UntrainableReply):
        await say(load("llama-3"), said(calls=2))


async def test_tools_need_a_renderer_that_reads_calls():
    model = load("default")
    prompter = Prompter(create_renderer(model.tokenizer, config_from_name("default")), model.tokenizer, 1000)
    with pytest.raises(EpisodeError) as raised:
        await prompter.build(HELLO, SCHEMAS, None)
    assert raised.value.reason == "no_tool_parser"


async def test_a_prompt_that_such_an_answer_does_not_go_on_from_is_cut_back(tmp_path: Path):
    model = load("default")
    model.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nPlan:{% endif %}"
    )
    tokenizer = Tokenizer(tmp_path)
    prompter = Prompter(make_renderer(tmp_path, tokenizer), tokenizer, 1000)
    rewriter = TeacherReplyRewriter(make_renderer(tmp_path, tokenizer), tokenizer, 1000)
    turn = rewriter.rewrite(said("yes"), await prompter.build(HELLO, [], None), [], 0).turn
    whole = np.concatenate([turn.prompt_ids, turn.completion_ids]).tolist()
    assert tokenizer.decode(whole) == (
        "<|im_start|>user\nhello the cat<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )
