"""docs/reference/config.md has every key, as the classes have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.runfile.explain import keys
from headrace.runfile.reference import FILES, ROOT, anchor, reference

PAGE = Path(__file__).parents[2] / "docs" / "reference/config.md"


def sections() -> dict[str, str]:
    """What stands under each heading, by where a link to it leads."""
    _, *parts = re.split(r"^### (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return {anchor(heading): text for heading, text in zip(parts[::2], parts[1::2], strict=True)}


def links(section: str) -> dict[str, str | None]:
    """The keys in a section's table, each with where it leads, if anywhere."""
    rows = re.findall(r"^\| (?:\[`(\w+)`\]\(#([\w-]+)\)|`(\w+)`) \|", section, re.MULTILINE)
    return {linked or plain: target or None for linked, target, plain in rows}


def test_the_page_is_what_make_docs_writes():
    assert PAGE.read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, _, root in FILES])
def test_every_key_is_found_by_following_the_links_from_the_top_of_its_file(command: str, root: type[BaseModel]):
    known = sections()
    for key in keys(root):
        place: str | None = anchor(f"{command}: {ROOT}")
        for part in key.split("."):
            assert place in known, key
            text = known[place]
            place = place if part == "type" and "By `type`" in text else links(text)[part]


def test_no_two_sections_of_the_page_share_a_heading():
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(headings) == len(set(map(anchor, headings)))
