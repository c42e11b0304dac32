"""Messages to prompts and results to messages, with the renderer of a real family."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.inference.embedded.request import InvalidRequest, Result
from headrace.inference.server.chat import Chat, ChatRequest
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer

ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "add 1 and 2"}]


@pytest.fixture
def chat(tiny_model: Path) -> Chat:
    tokenizer = Tokenizer(tiny_model)
    return Chat("tiny", tokenizer, make_renderer(tiny_model, tokenizer))


def ask(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": ASK, **fields}, ChatRequest)


def reply_to(chat: Chat, body: ChatRequest, text: str) -> dict[str, Any]:
    ids = chat.tokenizer.encode(text)
    result = Result(ids, [0.0] * len(ids), [], "stop", None, None)
    choice: dict[str, Any] = chat.reply(body, chat.prompt(body), [result])["choices"][0]
    return choice


def test_tools_reach_the_prompt_and_calls_come_back(chat: Chat) -> None:
    body = ask(tools=[ADD])
    assert json.dumps(ADD) in chat.tokenizer.decode(chat.prompt(body))
    text = '<think>\nsum\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    choice = reply_to(chat, body, text)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "sum"
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a":1}'})


def test_an_assistants_null_content_is_rendered(chat: Chat) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    history = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    prompt = chat.tokenizer.decode(chat.prompt(ask(messages=ASK + history)))
    assert "<tool_call>" in prompt
    assert "None" not in prompt


def test_the_family_ends_a_turn_where_its_template_does(chat: Chat) -> None:
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    [params] = chat.params(ask(stop_token_ids=[7]))
    assert {end, 7} <= set(params.stop_token_ids)
    [params] = chat.params(ask(ignore_eos=True))
    assert params.stop_token_ids == []


def test_choices_have_seeds_of_their_own(chat: Chat) -> None:
    assert [params.seed for params in chat.params(ask(n=3, seed=5))] == [5, 6, 7]
    assert [params.seed for params in chat.params(ask(n=2))] == [None, None]


@pytest.mark.parametrize("content", [{"not": "text"}, 7])
def test_content_that_is_not_text_is_refused(chat: Chat, content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content"):
        chat.prompt(ask(messages=[*ASK, {"role": "user", "content": content}]))


def test_messages_that_cannot_be_rendered_are_refused(chat: Chat) -> None:
    with pytest.raises(InvalidRequest, match="messages cannot be rendered"):
        chat.prompt(ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"function": 7}]}]))
