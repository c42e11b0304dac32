"""Answers between tags."""

import pytest

from headrace.environments.shipped.common import extract_tagged, replies, tag


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<a>42</a>", "42"),
        ("I say <a> 4\n2 </a>.", " 4\n2 "),
        ("<a></a>", ""),
        ("42", None),
        ("<a>42", None),
        ("42</a>", None),
        ("</a>42<a>", None),
        ("<a>1</a><a>2</a>", None),
        ("<a>1<a>2</a>", None),
        ("<a>1</a> <a>2", None),
        ("<b>42</b>", None),
    ],
)
def test_an_answer_is_what_stands_between_the_only_tags(text: str, content: str | None):
    assert extract_tagged(text, "a") == content


def test_what_is_tagged_can_be_read():
    assert extract_tagged(tag("guess", "crane"), "guess") == "crane"


def test_replies_are_what_the_assistant_said():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant"}]
    assert replies(said) == ["b", ""]
