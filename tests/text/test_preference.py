"""Rows of preference pairs: their formats, what is the prompt, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataError
from headrace.rollout.types import Message
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.text.training_examples import parse_pair
from headrace.trainer.tiny import write_tiny_settings

PLACE = ("pairs.jsonl", 1)


def said(*contents: str) -> list[Message]:
    """A conversation that the user begins."""
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3?", "chosen": "5", "rejected": "6"},
        {"prompt": said("2+3?"), "chosen": said("2+3?", "5")[1:], "rejected": said("2+3?", "6")[1:]},
        {"prompt": "2+3?", "chosen": said("2+3?", "5"), "rejected": said("2+3?", "6")},
        {"chosen": said("2+3?", "5"), "rejected": said("2+3?", "6"), "prompt": None},
    ],
    ids=["texts", "messages", "both repeat the prompt", "no prompt"],
)
def test_the_prompt_is_given_or_what_both_begin_with(row: dict[str, Any]):
    pair = parse_pair(row, {}, PLACE)
    assert (pair.chosen.messages, pair.rejected.messages) == (said("2+3?", "5"), said("2+3?", "6"))
    assert pair.shared_content == said("2+3?")
    assert pair.chosen.is_trained == pair.rejected.is_trained == [False, True]


def test_turns_that_are_equal_belong_to_the_prompt_up_to_the_last_answer_before_they_differ():
    chosen, rejected = said("a", "b", "c", "d"), said("a", "b", "C", "e")
    pair = parse_pair({"chosen": chosen, "rejected": rejected}, {}, PLACE)
    assert pair.shared_content == said("a")  # an answer that leads to different replies is trained
    pair = parse_pair({"chosen": chosen, "rejected": said("a", "b", "c", "e")}, {}, PLACE)
    assert pair.shared_content == said("a", "b", "c")


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "?", "chosen": "a"}, None),
        ({"prompt": "?", "chosen": "a", "rejected": "a"}, None),
        ({"prompt": "?", "chosen": "a", "rejected": said("b")}, "rejected"),
        ({"chosen": "a", "rejected": "b"}, "chosen"),
        ([], None),
    ],
)
def test_rows_that_cannot_be_compared_are_refused_with_their_place(row: Any, key: str | None):
    with pytest.raises(DataError) as refusal:
        parse_pair(row, {}, PLACE)
    assert (refusal.value.key, refusal.value.file, refusal.value.line) == (key, *PLACE)


def test_columns_may_have_other_names_and_tools_reach_both_sides():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"q": "?", "good": "a", "bad": "b", "tools": tools}
    pair = parse_pair(row, {"prompt": "q", "chosen": "good", "rejected": "bad"}, PLACE)
    assert pair.chosen.tools == pair.rejected.tools == tools
    with pytest.raises(DataError) as refusal:
        parse_pair(row, {"prompt": "question"}, PLACE)
    assert refusal.value.key == "columns.prompt"


def test_a_pair_whose_one_side_is_cut_off_has_nothing_to_learn(tmp_path: Path):
    write_tiny_settings(tmp_path)
    renderer = make_renderer(tmp_path, Tokenizer(tmp_path), "qwen3", False, None)
    pair = parse_pair({"prompt": "?", "chosen": "yes", "rejected": "no"}, {}, PLACE)
    chosen, rejected = pair.samples(renderer, 64)
    for sample, sign in ((chosen, 1), (rejected, -1)):
        assert sample.mask.any()
        assert sample.streams["advantages"][sample.mask].tolist() == [sign] * int(sample.mask.sum())
        assert not sample.streams["advantages"][~sample.mask].any()
    start = int(chosen.mask.argmax())
    assert not any(sample.mask.any() for sample in pair.samples(renderer, start))
