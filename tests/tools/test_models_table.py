"""The table of families."""

from pathlib import Path

from headrace.tools.models import FAMILIES, page
from tests.models import families

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    assert (DOCS / "reference" / "models.md").read_text() == page()


def test_every_family_of_the_table_is_tested() -> None:
    assert FAMILIES.keys() == families.FAMILIES.keys()
    assert {name for name, family in FAMILIES.items() if family.experts} == families.EXPERTS.keys()
