"""Every file, folder, class and decorator that docs/explanation/architecture.md names exists."""

import re
from pathlib import Path

import pytest

from tests.test_architecture import LAYERS

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "headrace"
PAGE = (REPOSITORY / "docs/explanation/architecture.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(title: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


ADDITIONS = rows_of("Where do I add X")
STEPS = rows_of("One step, from prompt to weights")


@pytest.mark.parametrize("row", ADDITIONS, ids=lambda row: row[0])
def test_a_place_to_add_something_exists_and_has_its_decorator(row: list[str]):
    code = in_code(" ".join(row))
    paths = [name for name in code if name.startswith("src/")]
    assert paths
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    places = [REPOSITORY / path for path in paths]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.glob("*.py")))]
    for decorator in (name for name in code if name.startswith("@")):
        assert any(decorator in file.read_text() for file in files), decorator


@pytest.mark.parametrize("row", STEPS, ids=lambda row: row[0])
def test_a_step_names_files_and_the_classes_in_them(row: list[str]):
    _, _, names, files = row
    paths = [SOURCE / file for file in in_code(files)]
    assert paths
    assert [str(path) for path in paths if not path.exists()] == []
    text = "".join(path.read_text() for path in paths if path.is_file())
    for name in in_code(names):
        owner, _, method = name.partition(".")
        assert f"class {owner}" in text, name
        assert not method or f"def {method}(" in text, name


def test_every_package_of_the_table_exists():
    assert [row[0] for row in rows_of("Layers") if not (SOURCE / row[0].strip("`")).is_dir()] == []


def test_the_picture_has_the_layers_that_imports_are_checked_against():
    picture = section("Layers").split("```text\n")[1].partition("```")[0].strip("\n").splitlines()
    shown = [set(re.findall(r"\w+", line[:40].replace(".py", ""))) for line in picture]
    *packages, last = shown
    assert packages == [set(row) for row in LAYERS[: len(packages)]]
    assert last == {name for row in LAYERS[len(packages) :] for name in row}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))))
def test_every_module_that_the_page_names_exists(path: str):
    assert any((root / path).is_file() for root in (REPOSITORY, SOURCE))
