r"""One block of thoughts, then `\boxed{...}`."""

import pytest

from headrace.environments.arguments import BadArgument
from headrace.environments.strict_format import StrictFormat
from tests.refusals import refused

STRICT = StrictFormat()


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>\n2 + 2 = 4\n</think>\n\n\\boxed{4}", "2 + 2 = 4", "4"),
        ("  <think></think>\\boxed{\\frac{1}{2}}\n", "", r"\frac{1}{2}"),
        ("<think>{ is a brace</think> \\boxed{\\{1, 2\\}}", "{ is a brace", r"\{1, 2\}"),
    ],
)
def test_the_format_gives_thoughts_and_answer(text: str, thinking: str, answer: str):
    assert STRICT.parse(text) == (thinking, answer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        r"\boxed{4}",  # no thoughts
        r"<think>hm \boxed{4}",  # never closed
        r"hm</think>\boxed{4}",  # never opened
        r"Sure. <think>hm</think>\boxed{4}",  # words before
        r"<think>hm</think>The answer is \boxed{4}",  # words between
        r"<think>hm</think>\boxed{4}.",  # words after
        r"<think>hm</think>\boxed{4} \boxed{5}",  # two answers
        r"<think>hm</think>\boxed{4}\boxed{5}",
        r"<think>a</think><think>b</think>\boxed{4}",  # two blocks
        r"<think>a<think>b</think></think>\boxed{4}",
        r"<think>hm</think>\boxed{}",
        r"<think>hm</think>\boxed{  }",
        r"<think>hm</think>\boxed{4",
        r"<think>hm</think>\boxed{{4}",
        r"<think>hm</think>\boxed{4}}",
        r"<redacted_thinking>hm</redacted_thinking>\boxed{4}",
    ],
)
def test_anything_else_is_not_the_format(text: str):
    assert STRICT.parse(text) is None


@pytest.mark.parametrize("opening", ["<think>", "<redacted_thinking>"])
def test_what_is_asked_for_and_written_is_what_is_accepted(opening: str):
    strict = StrictFormat(opening, opening.replace("<", "</"))
    assert strict.parse(strict.write("one and one", r"\sqrt{2}")) == ("one and one", r"\sqrt{2}")
    assert opening in strict.instructions


@pytest.mark.parametrize(
    "bait", ["<think>", "<think></think>\\boxed{", "{", "}", "\\", "\\boxed{" * 9, "\ud800", "\x00"]
)
def test_ten_megabytes_are_read_in_one_pass(bait: str):
    assert STRICT.parse("<think>x</think>\\boxed{" + bait * (10**7 // len(bait))) is None


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("||", "||"), ("", "x"), ("x", ""), ("think", "/think"), ("end-think", "think"), (" <think>", "</think>"), (1, 2)],
)
def test_tags_with_which_nothing_would_be_accepted_are_refused(opening: str, closing: str):
    with refused(BadArgument, key="closing", value=closing):
        StrictFormat(opening, closing)
