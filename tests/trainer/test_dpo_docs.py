"""What docs/how-to/dpo.md shows is what `headrace dpo` takes."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from headrace.config.dpo import DpoConfig
from headrace.text.training_examples import parse_pair

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/dpo.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_run_file_is_understood():
    (file,) = blocks("toml")
    config = DpoConfig.model_validate(tomllib.loads(file))
    assert (config.dpo.loss, config.data.batch_size) == ("sigmoid", 32)


@pytest.mark.parametrize("line", blocks("jsonl")[0].splitlines())
def test_every_row_is_the_same_pair(line: str):
    pair = parse_pair(json.loads(line), {}, ("docs/how-to/dpo.md", 1))
    messages = [side.messages[-1]["content"] for side in (pair.chosen, pair.rejected)]
    assert (pair.shared_content, messages) == ([{"role": "user", "content": "2 + 3?"}], ["5", "6"])
