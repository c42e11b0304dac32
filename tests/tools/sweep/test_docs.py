"""What docs/how-to/sweeps.md shows is what runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from headrace.cli.main import main

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "how-to/sweeps.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = [text for language, text in BLOCKS if language == "yaml"]
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for language, text in BLOCKS
    for line in text.splitlines()
    if language == "bash" and line.startswith("headrace ")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("rl.toml", "sft.toml"):
        shutil.copy(REPOSITORY / "examples" / "reverse-text" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


def test_the_dry_run_is_the_one_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "sweep.yaml").write_text(FILES[0])
    assert main([*COMMANDS[0], "--parallel", "1"]) == 0
    (shown,) = [text for language, text in BLOCKS if language == "text" and "6 runs in" in text]
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("number", "runs"), [(0, 6), (1, 9), (2, 20), (3, 3)])
def test_every_file_of_the_page_makes_its_runs(
    number: int, runs: int, folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "sweep.yaml").write_text(FILES[number])
    assert main(["sweep", "sweep.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"{runs} runs in outputs/")
    assert len(FILES) == 4


def test_every_link_leads_to_a_page():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE):
        assert (REPOSITORY / "docs" / "how-to" / target).is_file(), target
