"""What another model said, in the tokens that this one would have written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import Renderer

from headrace.rollout.types import Message
from headrace.text.renderer import make_renderer
from headrace.text.teacher_reply import EncodedReply, ReplyEncoder
from headrace.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, Model, Said, load

HELLO: Any = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "q": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
WORDS = st.lists(st.sampled_from(["the", "cat", "é", "123", "1 + 1 = 2.", "\n\n", "你好", "{}", "</p>"]), min_size=1)
TEXTS = WORDS.map(" ".join).map(str.strip).filter(bool)
ASK = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ SAID }}<|im_end|>\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
HIDES_THOUGHTS = ASK.replace("SAID", "m.content.split('</think>')[-1]") + GENERATE.replace("OPENED", "<think>\n")
PLANS = ASK.replace("SAID", "m.content") + GENERATE.replace("OPENED", "Plan:")


def message(said: Said) -> Message:
    result: Message = {"role": "assistant", "content": said.text}
    if said.thought:
        result["reasoning_content"] = said.thought
    if said.calls:
        result["tool_calls"] = [
            {"id": f"functions.{name}:{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(said.calls)
        ]
    return result


def encode_reply(
    renderer: Renderer, tokenizer: Tokenizer, reply: Message, tools: Any = (), finished: bool = True
) -> EncodedReply:
    return ReplyEncoder(renderer, tokenizer, tools).encode(reply, finished)


def written(model: Model, answer: EncodedReply) -> str:
    assert answer.dropped == 0
    return model.decode(answer.ids)


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=15, derandomize=True)
@given(text=TEXTS, thought=TEXTS, a=st.integers(-9, 99), q=TEXTS, calls=st.integers(0, 2))
def test_an_answer_has_the_tokens_that_a_model_of_the_family_samples(
    name: str, text: str, thought: str, a: int, q: str, calls: int
):
    model = load(name)
    most = 1 if model.family.renderer in ("llama-3", "gpt-oss", "default") else 2
    said = Said(text, [("add", {"a": a, "q": q})] * min(calls, most), thought if model.family.thinks else "")
    if name == "default" and calls:
        said.text = ""  # here that template and the family that it takes after part
    answer = encode_reply(model.renderer, model.tokenizer, message(said), TOOLS)
    assert written(model, answer) == model.decode(model.written(said))
    assert answer.ids == model.written(said)


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=10, derandomize=True)
@given(text=TEXTS, thought=st.just("") | TEXTS, called=st.booleans())
def test_an_answer_is_what_its_rendering_has_beyond_the_prompt_where_it_begins_with_that(
    name: str, text: str, thought: str, called: bool
):
    model = load(name)
    reply = message(Said(text, [("add", {"a": 1})] if called else [], thought))
    tools: Any = TOOLS
    messages: Any = [{"role": "system", "content": "Be brief."}, *HELLO, message(Said("yes")), *HELLO]
    asked = model.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    whole = model.renderer.render_ids([*messages, reply], tools=tools)
    if whole[: len(asked)] == asked:
        answer = encode_reply(model.renderer, model.tokenizer, reply, TOOLS)
        beyond = whole[len(asked) :]
        assert answer.dropped == 0
        assert answer.ids[: len(beyond)] == beyond[: len(answer.ids)]
        assert model.decode(beyond[len(answer.ids) :]).strip() == ""
        assert answer.ids[-1] in model.stops


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_was_cut_off_has_no_stop_token(name: str):
    model = load(name)
    for said in (Said("yes the"), Said("yes", thought="hm"), Said(calls=[("add", {"a": 1})], thought="hm")):
        whole = encode_reply(model.renderer, model.tokenizer, message(said), TOOLS).ids
        cut = encode_reply(model.renderer, model.tokenizer, message(said), TOOLS, finished=False).ids
        assert cut == whole[:-1]
        assert not set(cut) & set(model.stops)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", "<think>\nhm the"),
        ("qwen3.5", "hm the"),
        ("minimax-m2", "hm the"),
        ("glm-4.5", "\n<think>hm the"),
        ("gpt-oss", "hm the"),
        ("llama-3", ""),
        ("qwen3-without-thoughts", ""),
    ],
)
def test_a_thought_that_was_cut_off_is_not_closed(name: str, tokens: str):
    model = load(name)
    apart: Message = {"role": "assistant", "content": "", "reasoning_content": "hm the"}
    assert written(model, encode_reply(model.renderer, model.tokenizer, apart, finished=False)) == tokens


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "minimax-m2", "glm-4.5", "gpt-oss", "qwen3-without-thoughts"])
def test_thoughts_that_a_server_leaves_in_the_text_are_thoughts(name: str):
    model = load(name)
    apart: Message = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    for content in ("<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"):
        inline: Message = {"role": "assistant", "content": content}
        assert encode_reply(model.renderer, model.tokenizer, inline) == encode_reply(
            model.renderer, model.tokenizer, apart
        )
    cut: Message = {"role": "assistant", "content": "<think>\nhm"}
    apart["content"] = ""
    if name != "qwen3-without-thoughts":
        assert encode_reply(model.renderer, model.tokenizer, cut, finished=False) == encode_reply(
            model.renderer, model.tokenizer, apart, finished=False
        )


def test_where_the_prompt_rules_thoughts_out_there_are_none():
    model = load("qwen3-without-thoughts")
    for reply in (message(Said("yes", thought="hm")), message(Said("<think>\nhm\n</think>\n\nyes"))):
        assert written(model, encode_reply(model.renderer, model.tokenizer, reply)) == "yes<|im_end|>"


def test_a_format_that_has_no_thoughts_leaves_them_out_unless_they_are_in_the_text():
    model = load("default")
    assert written(model, encode_reply(model.renderer, model.tokenizer, message(Said("yes", thought="hm")))) == (
        "yes<|im_end|>"
    )
    inline = message(Said("<think>\nhm\n</think>\n\nyes"))
    assert written(model, encode_reply(model.renderer, model.tokenizer, inline)) == (
        "<think>\nhm\n</think>\n\nyes<|im_end|>"
    )


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", "<think>\n\n</think>\n\nyes<|im_end|>"),  # its own template puts them there
        ("qwen3.5", "\n</think>\n\nyes<|im_end|>"),
        ("minimax-m2", "\n</think>\n\nyes[e~["),
        ("gpt-oss", "<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"),
    ],
)
def test_an_answer_without_thoughts_closes_those_that_the_prompt_opened(name: str, tokens: str):
    model = load(name)
    assert written(model, encode_reply(model.renderer, model.tokenizer, message(Said("yes")))) == tokens


def template(write_model: Callable[..., Path], text: str) -> tuple[Renderer, Tokenizer]:
    directory = write_model(template=text)
    tokenizer = Tokenizer(directory)
    return make_renderer(directory, tokenizer, "default"), tokenizer


def test_a_template_that_opens_thoughts_and_shows_none_gets_them_all_the_same(write_model: Callable[..., Path]):
    model = template(write_model, HIDES_THOUGHTS)
    texts = [("yes", ""), ("hm\n</think>\n\nyes", "hm"), ("<think>\nhm\n</think>\n\nyes", "hm")]
    for content, thought in texts:
        answer = encode_reply(*model, message(Said(content)))
        assert (model[1].decode(answer.ids), answer.dropped) == (f"{thought}\n</think>\n\nyes<|im_end|>", 0)
    answer = encode_reply(*model, message(Said("yes", thought="hm")))
    assert model[1].decode(answer.ids) == "hm\n</think>\n\nyes<|im_end|>"
    cut = encode_reply(*model, message(Said("", thought="hm")), finished=False)
    assert model[1].decode(cut.ids) == "hm"


def test_a_prompt_that_begins_what_no_answer_has_is_cut_back_to_what_they_share(write_model: Callable[..., Path]):
    renderer, tokenizer = template(write_model, PLANS)
    answer = encode_reply(renderer, tokenizer, message(Said("yes")))
    asked = renderer.render_ids(HELLO, add_generation_prompt=True)
    assert tokenizer.decode(asked[len(asked) - answer.dropped :]) == "Plan:"
    assert tokenizer.decode(answer.ids) == "yes<|im_end|>"
