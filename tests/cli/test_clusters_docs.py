"""What docs/how-to/clusters.md shows is what the commands do."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.main import main, parse
from headrace.config.launch import LaunchConfig
from headrace.launch.manifest import DRIVER_PORT
from headrace.launch.node_messages import LEASE_S
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.trainer.tiny import write_tiny_settings
from tests.end_to_end.runs import write_run_file

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/how-to/clusters.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"`(headrace [^`]+)`", PAGE.partition("Every host needs")[0])


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the directory `math`, of a model without weights, which no command here reads."""
    monkeypatch.chdir(REPOSITORY)
    write_tiny_settings(tmp_path / "model")
    return write_run_file(tmp_path, tmp_path / "model", tmp_path / "math")


def toml_with(word: str) -> str:
    (found,) = [text for language, text in BLOCKS if language == "toml" and word in text]
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_table_is_understood(command: str):
    words = shlex.split(command)[1:]
    assert parse(words).command == words[0]


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "toml"])
def test_every_key_exists(text: str, tmp_path: Path):
    tree: dict[str, Any] = {"output_dir": "math", "max_steps": 1, "seq_len": 64, "model": {"name": "any"}}
    tree |= {"orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}, **tomllib.loads(text)}
    tree["launch"].setdefault("on", "nodes")
    validate(RunConfig, tree, "page")


def test_the_batch_script_is_written_and_not_submitted(run_file: Path, tmp_path: Path):
    more = tmp_path / "more.toml"
    more.write_text(toml_with("[launch.slurm]"))
    assert main(["rl", str(run_file), str(more), "--launch.on", "slurm", "--print"]) == 0
    script = (tmp_path / "math/slurm.sh").read_text()
    assert "#SBATCH --partition=gpu\n" in script and "module load cuda" in script


def test_prepare_writes_the_run_directory(run_file: Path, tmp_path: Path):
    assert main(["prepare", str(run_file)]) == 0
    assert (tmp_path / "math/config.toml").is_file()


def test_the_manifest_has_the_objects_of_the_page(run_file: Path, tmp_path: Path):
    more = tmp_path / "more.toml"
    more.write_text(toml_with("[launch.kubernetes]"))
    output = tmp_path / "run.yaml"
    command = ["manifest", str(run_file), str(more), "--model.name", "/runs/model", "--output", str(output)]
    assert main(command) == 0
    text = output.read_text()
    objects = {(document["kind"], document["metadata"]["name"]) for document in yaml.safe_load_all(text)}
    table = PAGE.partition("| object | contents |")[2].partition("\n\n")[0]
    assert objects == set(re.findall(r"^\| (\w+) `([\w-]+)` \|", table, re.MULTILINE))
    assert "{name: math-driver, key: key}" in text and "generic math-driver --from-file=key=" in PAGE


def test_the_times_and_ports_are_those_of_the_code():
    assert f"after {LEASE_S:g} s without an answer" in PAGE
    assert f"up to {LaunchConfig().rejoin_timeout:g} s later" in PAGE
    assert f"{DRIVER_PORT} on Kubernetes" in PAGE
