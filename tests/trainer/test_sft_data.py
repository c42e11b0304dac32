"""Conversations from files and environments: order, resuming, what is learned, and errors that name the row."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.environments.reverse_text import ReverseText
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.trainer.sft_data import Conversation, DataError, from_environment, from_rows, read_rows, render

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def learned_text(conversation: Conversation, model: Path, name: str = "qwen3") -> str:
    tokenizer = Tokenizer(model)
    options = {"enable_thinking": False} if name == "qwen3" else {}
    sample = render(conversation, make_renderer(model, tokenizer, name, **options))
    assert not sample.streams["rl_weights"].any()
    assert sample.streams["ce_weights"].tolist() == sample.mask.tolist()
    return tokenizer.decode(sample.token_ids[sample.mask].tolist())


def test_jsonl_takes_messages_or_prompt_and_completion(tmp_path: Path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"messages": CHAT, "other": 1},
        "",
        {"prompt": "hi", "completion": "yo"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    )
    rows = read_rows(path)
    assert [row.messages for row in rows] == [CHAT, CHAT, CHAT]


def test_parquet_gives_the_same_conversations(tmp_path: Path):
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    table = pa.Table.from_pylist([{"messages": CHAT + calls, "tools": json.dumps(tools)}, {"messages": CHAT}])
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = read_rows(tmp_path / "a.parquet")
    assert first.messages == [*CHAT, {"role": "assistant", "tool_calls": calls[0]["tool_calls"]}]
    assert first.tools == tools
    assert (second.messages, second.tools) == (CHAT, None)


def test_only_what_the_assistant_says_is_learned(tiny_model: Path):
    messages = [{"role": "system", "content": "s"}, *CHAT, {"role": "user", "content": "more"}, CHAT[1]]
    turn = "<think>\n\n</think>\n\nyo<|im_end|>"
    assert learned_text(Conversation(messages), tiny_model) == turn + turn


def test_assistant_turns_in_a_prompt_are_context(tiny_model: Path):
    messages = [*CHAT, {"role": "user", "content": "more"}, {"role": "assistant", "content": "ok"}]
    assert learned_text(Conversation(messages, context=3), tiny_model) == "<think>\n\n</think>\n\nok<|im_end|>"


def test_models_own_template_can_be_learned_from_too(tiny_model: Path):
    assert "yo<|im_end|>" in learned_text(Conversation(CHAT), tiny_model, name="default")


def test_each_pass_has_its_own_order_and_any_position_continues_it():
    rows = [Conversation([{"role": "assistant", "content": str(n)}]) for n in range(7)]

    def contents(seed: int, position: int, count: int) -> list[str]:
        return [row.messages[0]["content"] for row in islice(from_rows(rows, seed, position), count)]

    whole = contents(0, 0, 21)
    assert sorted(whole[:7]) == sorted(whole[7:14]) == sorted(whole[14:])
    assert whole[:7] != whole[7:14]
    assert contents(1, 0, 21) != whole
    for position in (0, 3, 7, 13, 20):
        assert contents(0, position, 21 - position) == whole[position:]


def test_demonstrations_continue_at_any_position():
    environment = ReverseText()
    whole = [c.messages for c in islice(from_environment(environment, 3, 0), 10)]
    assert [c.messages for c in islice(from_environment(environment, 3, 6), 4)] == whole[6:]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{not json", "not valid JSON"),
        ([1], "expected an object"),
        ({"text": "hi"}, r"neither `messages` nor `prompt` and `completion`; its keys are \['text'\]"),
        ({"messages": []}, "non-empty list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: expected a role"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]: content must be text, not 5"),
        ({"messages": CHAT[:1]}, "no assistant message"),
        ({"prompt": "hi", "completion": [CHAT[0]]}, "no assistant message"),
        ({"messages": CHAT, "tools": "["}, "tools is not valid JSON"),
        ({"messages": CHAT, "tools": "{}"}, "tools must be a list"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path: Path, row: Any, problem: str):
    path = write_lines(tmp_path / "a.jsonl", {"messages": CHAT}, row)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{problem}|a\.jsonl, line 2: {problem}"):
        read_rows(path)


def test_files_that_cannot_be_data_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet"):
        read_rows(write_lines(tmp_path / "a.csv", "x"))
    with pytest.raises(DataError, match="has no rows"):
        read_rows(write_lines(tmp_path / "a.jsonl", ""))
