"""The code of docs/how-to/python.md, from top to bottom, with real runs."""

import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from tests.end_to_end.runs import REPOSITORY, write_run_file

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (REPOSITORY / "docs/how-to/python.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_code_of_the_page_runs(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    write_run_file(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # the run's environment is one of the tests
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    run = names["run"]
    assert (run.state, run.path.name, run.audit().problems) == ("finished", "from-python", [])
    assert len(names["completions"]) == 4 and len(names["logprobs"]) == 1


def test_every_public_name_can_be_imported():
    assert all(getattr(headrace, name) is not None for name in headrace.__all__)
