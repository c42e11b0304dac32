"""Conversations as prompts: their tokens, who wrote each, and how they go on from what was sampled."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from headrace.rollout.types import ROLES, Message, Turn
from headrace.text.prompt import CACHED_PROMPTS, Prompt, PromptRenderer, text_length
from headrace.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, KEEPS_HISTORY, Model, Said, load

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "q": {"type": "string"}}},
        },
    }
]
HELLO: list[Message] = [{"role": "user", "content": "hello"}]
AND: list[Message] = [{"role": "user", "content": "and?"}]


def turn_of(prompt: Prompt, completion: Sequence[int]) -> Turn:
    nothing = np.zeros(len(completion))
    return Turn(prompt.ids, completion, nothing, nothing, 1.0, prompt_roles=prompt.roles)


def runs(model: Model, prompt: Prompt) -> list[tuple[str, str]]:
    """Neighbouring tokens of one role, as text."""
    assert prompt.roles is not None
    edges = [0, *np.flatnonzero(np.diff(prompt.roles)) + 1, len(prompt.ids)]
    return [(ROLES[prompt.roles[begin]], model.decode(prompt.ids[begin:end])) for begin, end in pairwise(edges)]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_reads_what_it_writes(name: str):
    model = load(name)
    thought = "hm" if model.family.thinks else ""
    said = Said("hello cat", [("add", {"a": 12, "q": "é"})], thought)
    prompt = PromptRenderer(model.renderer).render(HELLO, TOOLS).ids
    parsed = model.renderer.parse_response(model.written(said), tools=TOOLS, prompt_ids=prompt)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == said.calls
    assert (parsed.reasoning_content or "").strip() == thought
    assert parsed.content.strip() == ("" if name == "llama-3" else "hello cat")  # which says one or the other


def test_the_roles_of_a_prompt_mark_what_was_said_and_not_the_format():
    model = load("qwen3")
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "12 and 3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}],
        },
        {"role": "tool", "tool_call_id": "0", "content": "15"},
    ]
    assert runs(model, PromptRenderer(model.renderer).render(messages, [])) == [
        ("", "<|im_start|>system\n"),
        ("system", "Be brief."),
        ("", "<|im_end|>\n<|im_start|>user\n"),
        ("user", "12 and 3?"),
        ("", "<|im_end|>\n<|im_start|>assistant\n"),
        ("assistant", '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call><|im_end|>'),
        ("", "\n<|im_start|>user\n<tool_response>\n"),
        ("tool", "15"),
        ("", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_a_prompt_that_goes_on_has_the_roles_of_the_first_the_reply_and_the_news():
    model = load("qwen3-all")
    prompts = PromptRenderer(model.renderer)
    completion = model.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    following = prompts.extend(turn_of(prompts.render(HELLO, []), completion), AND, [])
    assert following is not None
    assert runs(model, following) == [
        ("", "<|im_start|>user\n"),
        ("user", "hello"),
        ("", "<|im_end|>\n<|im_start|>assistant\n"),
        ("assistant", "<think>\nhm\n</think>\n\nyes<|im_end|>"),
        ("", "\n<|im_start|>user\n"),
        ("user", "and?"),
        ("", "<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_the_models_own_template_tells_no_roles_and_does_not_go_on():
    model = load("default")
    prompts = PromptRenderer(model.renderer)
    prompt = prompts.render(HELLO, TOOLS)
    assert prompt.roles is None
    assert prompt.ids == model.tokenizer.apply_chat_template(HELLO, tools=TOOLS, add_generation_prompt=True)
    assert prompts.extend(turn_of(prompt, model.written(Said("yes"))), AND, TOOLS) is None


def test_without_the_roles_of_the_first_prompt_there_are_none_later():
    model = load("llama-3")
    prompts = PromptRenderer(model.renderer)
    prompt = prompts.render(HELLO, [])._replace(roles=None)
    following = prompts.extend(turn_of(prompt, model.written(Said("yes"))), AND, [])
    assert following is not None
    assert following.roles is None


@pytest.mark.parametrize(
    ("name", "cut", "closed"),
    [
        ("qwen3-all", "<think>\nhm", "</think><|im_end|>\n<|im_start|>user\n"),
        ("qwen3-all", "<think>\nhm\n</think>\n\nye", "<|im_end|>\n<|im_start|>user\n"),
        ("qwen3-all", "", "<|im_end|>\n<|im_start|>user\n"),
        ("qwen3.5-all", "hm", "</think><|im_end|>\n<|im_start|>user\n"),
        ("llama-3", "ye", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"),
        ("glm-4.5-all", "\n<think>hm", "</think><|endoftext|><|user|>\n"),
        ("gpt-oss-all", "hm", "<|end|><|start|>user<|message|>"),
    ],
)
def test_a_reply_that_was_cut_off_is_closed_by_the_format(name: str, cut: str, closed: str):
    model = load(name)
    prompts = PromptRenderer(model.renderer)
    prompt, completion = prompts.render(HELLO, []), model.encode(cut)
    following = prompts.extend(turn_of(prompt, completion), AND, [])
    assert following is not None
    known = prompt.ids + completion
    assert following.ids[: len(known)] == known
    assert following.array.tolist() == following.ids
    tail = model.decode(following.ids[len(known) :])
    assert tail.startswith(closed + "and?")
    assert following.roles is not None
    assert not following.roles[len(known) : len(known) + len(model.encode(closed))].any()


@pytest.mark.parametrize("name", ["qwen3-all", "qwen3.5-all", "llama-3", "deepseek-v3", "kimi-k2", "minimax-m2-all"])
def test_a_reply_that_went_on_after_its_stop_token_is_rendered_again(name: str):
    """These formats have no place for what comes after it, so that a prompt with all of it would be none of theirs."""
    model = load(name)
    prompts = PromptRenderer(model.renderer)
    completion = [*model.written(Said("yes", thought="hm")), *model.encode("more")]
    assert prompts.extend(turn_of(prompts.render(HELLO, []), completion), AND, []) is None


@pytest.mark.parametrize("name", KEEPS_HISTORY)
def test_a_conversation_does_not_go_on_over_words_put_into_the_models_mouth(name: str):
    model = load(name)
    prompts = PromptRenderer(model.renderer)
    turn = turn_of(prompts.render(HELLO, []), model.written(Said("yes", thought="hm")))
    assert prompts.extend(turn, [*AND, {"role": "assistant", "content": "no"}, *AND], []) is None


def test_a_format_that_fails_on_a_reply_renders_it_again():
    model = load("glm-4.5-all")
    prompts = PromptRenderer(model.renderer)
    deep = model.encode("\n<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>" + "[" * 100_000)
    completion = [*deep, *model.encode("</arg_value>\n</tool_call><|observation|>")]
    assert prompts.extend(turn_of(prompts.render(HELLO, TOOLS), completion), AND, TOOLS) is None


def test_the_same_conversation_is_rendered_once():
    prompts = PromptRenderer(load("qwen3").renderer)
    first = prompts.render(HELLO, TOOLS)
    assert prompts.render([dict(HELLO[0])], TOOLS) is first
    assert prompts.render(HELLO, []) is not first
    for n in range(CACHED_PROMPTS):
        prompts.render([{"role": "user", "content": str(n)}], [])
    again = prompts.render(HELLO, TOOLS)
    assert again is not first  # the oldest make room
    assert again.ids == first.ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "text", ["the cat and hello " * 40, "</tool_call>" * 60, "e\u0301" * 400, " \n" * 500, "-" * 999]
)
def test_a_conversation_never_has_less_tokens_than_its_length_tells(name: str, text: str):
    model = load(name)
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
    messages: list[Message] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text if name == "default" else [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0", "name": "add", "content": text},
    ]
    prompts = PromptRenderer(model.renderer)
    least = prompts.min_tokens(messages, model.tokenizer)
    assert least <= len(prompts.render(messages, TOOLS).ids)
    assert (least > 0) == (name != "default" and not text.isspace())


def test_the_length_of_a_conversation_is_that_of_what_is_said():
    parts = [{"type": "text", "text": "abc"}, {"type": "image", "url": "x"}, "?", {"type": "text"}]
    messages: list[Message] = [{"role": "user", "content": "hello"}, {"role": "user", "content": parts}]
    assert text_length([*messages, {"role": "assistant", "content": None}, {"role": "assistant"}]) == 8


def byte_level() -> tokenizers.Tokenizer:
    """One token for each byte, and one of eight spaces."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ" * n, "Ġ" * n) for n in (1, 2, 4)]
    vocabulary = [*letters, *("Ġ" * n for n in (2, 4, 8))]
    backend = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def saved(backend: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def test_a_text_has_as_many_tokens_as_its_longest_would_take(tmp_path: Path):
    tokenizer = saved(byte_level(), tmp_path)
    assert tokenizer.min_tokens(" " * 80) == len(tokenizer.encode(" " * 80)) == 10
    assert tokenizer.min_tokens("x" * 80) == 10
    composed = "\u03b1\u0313\u0300\u0345" * 8  # four characters that NFC makes one
    assert tokenizer.min_tokens(composed) == 1
    assert len(tokenizer.encode(composed)) == 8 * 3


def _any_space(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _no_space(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])


def _removed(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])


def _stripped(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _characters(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Metaspace()


def _cut(backend: tokenizers.Tokenizer) -> None:
    backend.enable_truncation(5)


@pytest.mark.parametrize("change", [_any_space, _no_space, _removed, _stripped, _characters, _cut])
def test_a_tokenizer_that_may_leave_characters_out_tells_nothing_by_length(change: Any, tmp_path: Path):
    backend = byte_level()
    change(backend)
    assert saved(backend, tmp_path).min_tokens("x" * 1000) == 0
