"""What docs/how-to/hub.md shows is what the commands do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.main import main, parse
from headrace.rollout.types import Rollout
from headrace.transport.rollout_files import write_rollouts
from tests.tools.hub.conftest import write_model
from tests.tools.hub.stand_in import Hub

DOCS = (Path(__file__).parents[3] / "docs" / "how-to/hub.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in DOCS.splitlines() if line.startswith("headrace ")]


def test_every_command_of_the_page_runs(hub: Hub, run: Path, tmp_path: Path):
    """In the order of the page; a checkpoint takes a real model, and is pushed in `test_hub_end_to_end.py`."""
    run.rename(run.with_name("run"))
    write_model(tmp_path / "models/base")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/problems.jsonl").write_text("{}\n")
    (tmp_path / "outputs/lambda").mkdir()
    (tmp_path / "outputs/lambda/sweep.json").write_text("{}")
    write_rollouts(tmp_path / "outputs/run/rollouts", 1, [Rollout()], [])
    for command in COMMANDS:
        if command[1:2] == ["team/run"]:  # elsewhere, as on a machine without the run
            (tmp_path / "outputs/run").rename(tmp_path / "outputs/mine")
        if "step-00000400" not in command[1]:
            assert main(command) == 0, command
    assert (tmp_path / "outputs/run/journal.sqlite").is_file()
    assert (tmp_path / "data/problems/problems.jsonl").is_file()
    assert (tmp_path / "outputs/lambda-again/sweep.json").is_file()


@pytest.mark.parametrize("command", ["push", "pull"])
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--private"}
    assert options <= set(re.findall(r"--[a-z-]+", DOCS))
