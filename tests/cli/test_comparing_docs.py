"""What docs/how-to/comparing.md shows is what `headrace compare` and `headrace config` do."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import main, parse
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.observe.runs import write_episodes, write_run

REPOSITORY = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```\w+\n(.*?)^```$", (REPOSITORY / "docs" / "how-to/comparing.md").read_text(), re.DOTALL | re.MULTILINE
)
COMMANDS = [
    shlex.split(line.split(" #")[0])[1:]
    for text in BLOCKS
    for line in text.splitlines()
    if line.startswith("headrace ")
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The four runs of the page, in the working directory."""
    ends = {("slow", 1e-4, 0): 0.2, ("slow", 1e-4, 1): 0.4, ("fast", 1e-3, 0): 0.8, ("fast", 1e-3, 1): 0.9}
    for (name, lr, seed), end in ends.items():
        keys = {"trainer.optim.lr": lr, "seed": seed}
        write_run(tmp_path / f"outputs/{name}-{seed}", [0.0, 0.1, *[end] * 5], {0: 0.1, 7: end}, keys=keys)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(beginning: str) -> str:
    (found,) = [text for text in BLOCKS if text.startswith(beginning)]
    return found


def test_the_page_shows_every_command_as_it_is_understood():
    assert {parse(command).command for command in COMMANDS} == {"compare", "config", "eval"}


def test_the_comparison_is_the_one_of_the_page(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(COMMANDS[0]) == 0
    assert capsys.readouterr().out == block("What differs")


def test_every_comparison_of_the_page_runs(runs: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("slow-0", "fast-0"):
        right = {f"task-{n}": [name == "fast-0" or n % 2 == 0] for n in range(8)}
        write_episodes(runs / "outputs/eval/pair", name, runs / "outputs" / name, right)
    for command in [command for command in COMMANDS if command[0] == "compare"]:
        assert main(command) == 0
    printed = capsys.readouterr().out
    assert "accuracy: +0.500" in printed
    assert "wrote comparison/comparison.md" in printed
    assert (runs / "comparison" / "reward-all-mean.svg").is_file()
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    assert [run["name"] for run in json.loads(line)["runs"]] == ["slow-0", "fast-0"]


def test_the_key_is_explained_as_on_the_page(runs: Path, capsys: pytest.CaptureFixture[str]):
    (command,) = [command for command in COMMANDS if "trainer.optim.lr" in command]
    assert main(command) == 0
    assert capsys.readouterr().out == block("trainer.optim.lr")


def test_a_section_lists_its_types_and_its_keys(capsys: pytest.CaptureFixture[str]):
    (command,) = [command for command in COMMANDS if command[-1] == "trainer.optim"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "\n    sgd    " in printed
    assert re.search(r"\n    ns_steps  .*\[5\]\n", printed)


def test_a_file_is_printed_as_it_is_resolved_and_so_is_a_run(runs: Path, capsys: pytest.CaptureFixture[str]):
    for target, lr in (("examples/reverse-text/rl.toml", 3e-4), ("outputs/fast-0", 1e-3)):
        assert main(["config", target]) == 0
        tree = tomllib.loads(capsys.readouterr().out)
        assert tree["trainer"]["optim"]["lr"] == lr
        validate(RunConfig, tree, "printed")


def test_keys_of_supervised_training_are_known_with_and_without_its_file(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["config", "--explain", "data.pack"]) == 0
    assert main(["config", "--explain", "optim.lr", "examples/reverse-text/sft.toml"]) == 0
    assert "value    0.00" in capsys.readouterr().out


def test_values_are_those_of_every_environment_of_a_file(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--explain", "orchestrator.train.env.id", "outputs/slow-0"]) == 0
    assert '"reverse-text" in orchestrator.train.env.0.id' in capsys.readouterr().out


def test_invalid_arguments_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config"]) == 2
    assert main(["config", "--explain", "trainer.optim.learning_rate"]) == 2
    assert main(["compare", "outputs/slow-0", "outputs/gone"]) == 2
    printed = capsys.readouterr().err
    assert "headrace: FILE: " in printed
    assert "Did you mean trainer.optim.lr?" in printed
    assert "gone is left out: no such directory." in printed
