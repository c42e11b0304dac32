"""The adapter against transformers' own class."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from headrace.text.tokenizer import Tokenizer, TokenizerError
from tests.refusals import refused
from tests.text.conftest import CHATML, WriteModel

TEXTS = [
    "",
    "the cat sat on the mat",
    "  two  spaces\n\nand\tlines ",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<think>\nhm\n</think>\n\nyes",
    "é 漢字 😀 \u200b",
    "It 's \" quoted \" , isn 't it ?",
]

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "hello to the cat"},
    {"role": "assistant", "content": "é ok"},
]


def both(directory: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer(directory), AutoTokenizer.from_pretrained(directory)


def test_text_becomes_the_same_tokens_and_the_same_text_again(write_model: WriteModel):
    ours, theirs = both(write_model())
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours(text)["input_ids"] == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for token_id in range(len(theirs)):
        assert ours.decode(token_id) == theirs.decode(token_id)


def test_merges_are_used_so_that_the_comparison_means_something(write_model: WriteModel):
    assert len(Tokenizer(write_model()).encode("the cat")) < len("the cat")


def test_tokens_and_ids_translate_both_ways(write_model: WriteModel):
    ours, theirs = both(write_model())
    names = ["<|im_end|>", "<think>", "the", "no such token"]
    assert ours.convert_tokens_to_ids(names) == [theirs.convert_tokens_to_ids(name) for name in names]
    ids = list(range(len(theirs)))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_are_the_same(write_model: WriteModel):
    ours, theirs = both(write_model(bos_token="<|im_start|>"))
    for name in ("eos_token", "bos_token", "unk_token", "eos_token_id", "bos_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_special_token_may_be_written_as_a_record(write_model: WriteModel):
    record = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    assert Tokenizer(write_model(eos_token=record)).eos_token == "<|endoftext|>"


def test_offsets_are_the_same(write_model: WriteModel):
    ours, theirs = both(write_model())
    expected = theirs("the cat é", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert ours("the cat é", return_offsets_mapping=True)["offset_mapping"] == expected


TEMPLATES = {
    "chatml": CHATML,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "padding token": "{{ pad_token }}{{ messages[0].content }}",
    "json": "{{ tools | tojson }}|{{ messages | tojson(indent=2) }}",
    "json, sorted and compact": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks and white space": "{% for m in messages %}\n  {% if m %}\n  {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "assistant spans": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "own variables": "{{ messages[0].content }}{% if enable_thinking is false %}quiet{% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_chat_templates_render_as_in_transformers(write_model: WriteModel, kind: str):
    ours, theirs = both(write_model(TEMPLATES[kind], bos_token="<|endoftext|>"))
    tools = [{"type": "function", "function": {"name": "f<g>", "parameters": {"b": "é", "a": [1]}}}]
    for prompt in (False, True):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "enable_thinking": False}
        expected = theirs.apply_chat_template(CONVERSATION, tokenize=False, **options)
        assert ours.apply_chat_template(CONVERSATION, tokenize=False, **options) == expected
        ids = theirs.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **options)
        assert ours.apply_chat_template(CONVERSATION, **options) == ids


def test_chatml_renders_as_written_here(write_model: WriteModel):
    text = Tokenizer(write_model()).apply_chat_template(CONVERSATION[1:2], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello to the cat<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_can_refuse_a_conversation(write_model: WriteModel):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(jinja2.TemplateError, match="no system role"):
        Tokenizer(write_model(template)).apply_chat_template(CONVERSATION)


def test_a_template_cannot_reach_into_python(write_model: WriteModel):
    escape = "{{ ().__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(jinja2.exceptions.SecurityError):
        Tokenizer(write_model(escape)).apply_chat_template(CONVERSATION)


@pytest.mark.parametrize(
    "setting",
    [
        "{{ messages[0].content }}",
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}],
    ],
)
def test_a_template_may_be_in_the_settings(write_model: WriteModel, setting: Any):
    tokenizer = Tokenizer(write_model(None, chat_template=setting))
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) == "Be brief & <kind>."


def test_a_missing_template_is_an_error_that_names_the_directory(write_model: WriteModel):
    directory = write_model(None)
    with refused(TokenizerError, file=str(directory)):
        Tokenizer(directory).apply_chat_template(CONVERSATION)


def test_a_missing_tokenizer_is_an_error_that_names_the_directory(tmp_path: Path):
    with refused(TokenizerError, file=tmp_path / "tokenizer.json"):
        Tokenizer(tmp_path)


def test_a_garbled_tokenizer_is_an_error_that_names_the_file(write_model: WriteModel):
    directory = write_model()
    (directory / "tokenizer.json").write_text("{")
    with refused(TokenizerError, file=directory / "tokenizer.json"):
        Tokenizer(directory)
