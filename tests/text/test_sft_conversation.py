"""Rows of data are checked, and exactly the assistant's tokens are trained."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataError
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.text.training_examples import SftConversation, parse_row, render_sample
from tests.refusals import refused

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}},
    {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 3}'}},
]
SEVERAL_TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2? 3+3?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "tool", "tool_call_id": "b", "content": "6"},
    {"role": "assistant", "content": "4 and 6."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]
TOOLS_TEXT = (
    "<|im_start|>system\nAdd.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools>\n\nFor each function call, return a '
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
CALLS_TEXT = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 3}}\n</tool_call><|im_end|>'
)
ASSISTANT = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
ASKED = f"{TOOLS_TEXT}<|im_start|>user\n2+2? 3+3?<|im_end|>\n{ASSISTANT}"
RESPONSES = (
    "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
    f"{ASSISTANT}"
)
THANKS = f"\n<|im_start|>user\nThanks.<|im_end|>\n{ASSISTANT}"


def assert_learned(sample: Any, tokenizer: Tokenizer, *pieces: str) -> None:
    """Of the pieces of the text, every second one is learned. No token of this tokenizer spans two of them."""
    encoded = [tokenizer.encode(piece) for piece in pieces]
    assert sample.token_ids.tolist() == [token for ids in encoded for token in ids]
    assert sample.mask.tolist() == [number % 2 == 1 for number, ids in enumerate(encoded) for _ in ids]
    assert sample.streams["ce_weights"].tolist() == sample.mask.tolist()
    assert not sample.streams["rl_weights"].any()


def test_a_family_learns_every_token_of_the_assistant_and_no_other(tiny_model: Path):
    tokenizer = Tokenizer(tiny_model)
    renderer = make_renderer(tiny_model, tokenizer, "qwen3", enable_thinking=False)
    sample = render_sample(SftConversation(SEVERAL_TURNS, tools=[TOOL]), renderer)
    turns = [NO_THOUGHT + text for text in (CALLS_TEXT, "4 and 6.<|im_end|>", "Bye.<|im_end|>")]
    assert_learned(sample, tokenizer, ASKED, turns[0], RESPONSES, turns[1], THANKS, turns[2], "\n")


def test_a_thinking_family_learns_the_last_turn_with_its_empty_thought(tiny_model: Path):
    tokenizer = Tokenizer(tiny_model)
    sample = render_sample(SftConversation(SEVERAL_TURNS, tools=[TOOL]), make_renderer(tiny_model, tokenizer, "qwen3"))
    last = f"{NO_THOUGHT}Bye.<|im_end|>"
    assert_learned(sample, tokenizer, ASKED, CALLS_TEXT, RESPONSES, "4 and 6.<|im_end|>", THANKS, last, "\n")


def test_the_models_own_template_learns_what_follows_its_generation_prompt(tiny_model: Path):
    tokenizer = Tokenizer(tiny_model)
    renderer = make_renderer(tiny_model, tokenizer, "default", enable_thinking=False)
    sample = render_sample(SftConversation(SEVERAL_TURNS, tools=[TOOL]), renderer)
    prompts = [text + NO_THOUGHT for text in (ASKED, RESPONSES, THANKS)]
    assert_learned(
        sample,
        tokenizer,
        *(prompts[0], CALLS_TEXT),
        *(prompts[1], "4 and 6.<|im_end|>"),
        *(prompts[2], "Bye.<|im_end|>"),
        "\n",
    )


def test_a_template_whose_prompt_has_more_than_the_turn_keeps_learns_the_whole_turn(tmp_path: Path, tiny_model: Path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = Tokenizer(tmp_path)
    sample = render_sample(SftConversation(CHAT), make_renderer(tmp_path, tokenizer, "default"))
    assert_learned(sample, tokenizer, f"<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}", "yo<|im_end|>", "\n")


def test_a_template_that_changes_turns_later_on_is_refused_rather_than_masked_wrongly(tiny_model: Path):
    renderer = make_renderer(tiny_model, Tokenizer(tiny_model), "default")  # thinks, but only in the last turn
    with refused(DataError, file="a.jsonl", line=3):
        render_sample(SftConversation(SEVERAL_TURNS, place=("a.jsonl", 3)), renderer)
    render_sample(SftConversation(SEVERAL_TURNS, context=7), renderer)  # a row of its own for the last answer


def test_what_the_models_own_template_cannot_take_names_the_row(tmp_path: Path, tiny_model: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    renderer = make_renderer(tmp_path, Tokenizer(tmp_path), "default")
    with refused(DataError, file="a.jsonl", line=3) as refusal:
        render_sample(SftConversation(CHAT, place=("a.jsonl", 3)), renderer)
    assert "no system messages" in refusal.value.fact
    with refused(DataError, file=None, line=None):
        render_sample(SftConversation(CHAT[1:]), make_renderer(tiny_model, Tokenizer(tiny_model), "default"))


def test_assistant_turns_in_a_prompt_are_context(tiny_model: Path):
    tokenizer = Tokenizer(tiny_model)
    row = {"prompt": [*CHAT, CHAT[0]], "completion": [{"role": "assistant", "content": "ok"}]}
    sample = render_sample(parse_row(row, {}, ("row", 1)), make_renderer(tiny_model, tokenizer, "qwen3"))
    prompt = f"<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}yo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}"
    assert_learned(sample, tokenizer, prompt, f"{NO_THOUGHT}ok<|im_end|>", "\n")


def test_columns_rename_what_is_read():
    row = {"question": "hi", "answer": "yo", "prompt": "not this", "messages": "nor this", "uses": [TOOL]}
    conversation = parse_row(row, {"prompt": "question", "completion": "answer", "tools": "uses"}, ("row", 1))
    assert (conversation.messages, conversation.tools) == (CHAT, [TOOL])
    chat = {"conversations": CHAT, "prompt": "not this", "completion": "nor this"}
    assert parse_row(chat, {"messages": "conversations"}, ("row", 1)).messages == CHAT
    assert parse_row({"prompt": "hi", "answer": "yo"}, {"completion": "answer"}, ("row", 1)).messages == CHAT


def test_a_column_that_is_not_there_is_named_with_its_key():
    with refused(DataError, key="columns.completion", value="anwser", file="row", line=1) as refusal:
        parse_row({"prompt": "hi", "answer": "yo"}, {"completion": "anwser"}, ("row", 1))
    assert "'answer'" in str(refusal.value.fix)


@pytest.mark.parametrize(
    ("row", "key", "value"),
    [
        ([1], None, None),
        ({"text": "hi"}, None, None),
        ({"messages": []}, "messages", []),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", {"role": "robot", "content": "x"}),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", 5),
        ({"messages": CHAT[:1]}, "messages", None),
        ({"prompt": "hi", "completion": [CHAT[0]]}, "completion", None),
        ({"messages": CHAT, "tools": "["}, "tools", "["),
        ({"messages": CHAT, "tools": "{}"}, "tools", {}),
    ],
)
def test_a_bad_row_is_refused_with_its_place(row: Any, key: str | None, value: Any):
    with refused(DataError, key=key, value=value, file="data.jsonl", line=2):
        parse_row(row, {}, ("data.jsonl", 2))
