"""What docs/how-to/sft.md shows is what `headrace sft` takes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.sft import SftConfig
from headrace.environments.registry import load_environment
from headrace.text.training_examples import parse_row

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/sft.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


FILE, *FRAGMENTS = blocks("toml")


@pytest.mark.parametrize("fragment", ["", *FRAGMENTS])
def test_every_piece_of_a_run_file_is_understood(fragment: str):
    config = SftConfig.model_validate({**tomllib.loads(FILE), **tomllib.loads(fragment)})
    for env in config.eval.env:
        load_environment(env.id, env.args)


@pytest.mark.parametrize("line", blocks("jsonl")[0].splitlines())
def test_of_every_row_the_answer_is_learned(line: str):
    found = parse_row(json.loads(line), {}, ("docs/how-to/sft.md", 1))
    learned = [message["content"] for message, yes in zip(found.messages, found.is_trained, strict=True) if yes]
    assert learned == ["5"]


def test_keys_are_explained_by_the_command_that_the_page_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file := tmp_path / "sft.toml").write_text(FILE)
    key = re.findall(r"headrace config sft.toml --explain ([\w.]+)", PAGE)[0]
    assert main(["config", str(file), "--explain", key]) == 0
    assert "none of which sees another" in " ".join(capsys.readouterr().out.split())
