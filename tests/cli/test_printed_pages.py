"""Help texts and a dry run, as their snapshots have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS, main, parse
from headrace.launch import resources
from headrace.launch.resource_plan import Machine
from tests.snapshots import SnapshotPage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def help_page() -> Iterator[SnapshotPage]:
    page = SnapshotPage("help")
    yield page
    page.close()


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help(
    words: list[str],
    help_page: SnapshotPage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse([*words, "--help"])
    help_page.check(" ".join(["headrace", *words, "--help"]), capsys.readouterr().out)


def test_help_page_has_no_other_commands(help_page: SnapshotPage) -> None:
    assert help_page.titles == {"headrace --help", *(f"headrace {name} --help" for name in COMMANDS)}


def test_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(resources, "measure", lambda _: Machine(None, 16 << 30, 0, 12 << 30, 100 << 30))
    monkeypatch.setattr("headrace.launch.hosts.local.usable_cores", lambda: 8)
    monkeypatch.setattr("headrace.launch.processes.usable_cores", lambda: 8)
    monkeypatch.setattr("socket.gethostname", lambda: "desk")
    command = ["rl", "examples/reverse-text/rl.toml", "--dry-run"]
    assert main(command) == 0
    page = SnapshotPage("dry_run")
    page.check(f"headrace {' '.join(command)}", capsys.readouterr().out, {f"{ROOT}/": ""})
    nodes = "--launch.on slurm --launch.trainer_nodes 2 --launch.inference_nodes 2 --launch.spare_nodes 1"
    command += [*nodes.split(), "--launch.gpus_per_node", "4", "--launch.trainer_processes", "6"]
    assert main(command) == 0
    comments = [line for line in capsys.readouterr().out.splitlines(keepends=True) if line.startswith("#")]
    page.check(f"headrace {' '.join(command)} (its comments)", "".join(comments), {f"{ROOT}/": ""})
    page.close()
