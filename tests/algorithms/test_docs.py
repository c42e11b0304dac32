"""What docs/reference/algorithms.md shows is what runs."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from headrace.algorithms.base import MakeContext
from headrace.cli.main import main
from headrace.config.algorithms import ALGORITHMS
from headrace.config.base import Tree
from headrace.config.orchestrator import OrchestratorConfig
from headrace.runfile.reading import load, validate
from headrace.runfile.reference import with_algorithms_table
from headrace.runfile.run import RunConfig
from headrace.tools.check_algorithm.fixtures import SEQ_LEN, FakeModel, algorithm_config
from headrace.tools.check_algorithm.invariants import check_algorithm
from tests.algorithms.groups import advantages, make_group
from tests.algorithms.teachers import Teacher, rollout_of, set_up, survivors
from tests.algorithms.test_rae import group_of

REPOSITORY = Path(__file__).parents[2]
DOCS = (REPOSITORY / "docs" / "reference/algorithms.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)
RLOO, TAUGHT, STANDARD = [text for language, text in BLOCKS if language == "python"]
SECTIONS = [text for language, text in BLOCKS if language == "toml"]
(CAPTURE,) = [text for _, text in BLOCKS if text.startswith("$ headrace check-algorithm")]


def cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    table = re.search(r"^\|.*?\n\n", DOCS.partition(heading)[2], re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = table.group().strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def test_the_example_is_the_file_that_ships():
    assert (REPOSITORY / "examples/custom-algorithm/algorithm.py").read_text() == RLOO


@pytest.mark.parametrize("row", cells("## Examples and results"), ids=lambda row: row[1])
def test_every_example_loads_and_has_the_algorithm_that_the_page_says(row: list[str]):
    command, description = row
    files = [REPOSITORY / file for file in command.strip("`").split()[2:]]
    config, _ = load(RunConfig, files)
    chosen = {config.orchestrator.algo_of(env).type for env in config.orchestrator.train.env}
    assert chosen and all(name in description for name in chosen)


@pytest.mark.parametrize("picture", re.findall(r"!\[.*?\]\((.*?)\)", DOCS))
def test_every_picture_is_there(picture: str):
    assert (REPOSITORY / "docs" / "reference" / picture).is_file()


def test_the_capture_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command, _, shown = CAPTURE.partition("\n")
    (tmp_path / "standard.py").write_text(STANDARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delitem(sys.modules, "standard", raising=False)
    with pytest.warns(RuntimeWarning, match="invalid value"):
        assert main(command.removeprefix("$ headrace ").split()) == 1
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


async def test_the_example_with_a_teacher_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "taught.py").write_text(TAUGHT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "taught", raising=False)
    [section] = [tomllib.loads(text)["orchestrator"]["algo"] for text in SECTIONS if "taught:" in text]
    report = await check_algorithm(algorithm_config(section, "docs"))
    kinds = {check.check: check.verdict.kind for check in report.checks}
    assert (report.passed, kinds["failing model"]) == (True, "holds")
    teacher = Teacher(lambda token_ids, temperature: np.arange(len(token_ids)) * -0.75)
    algorithm = await set_up(algorithm_config(section, "docs").make(MakeContext(SEQ_LEN, lambda _: teacher)))
    [survivor] = survivors([rollout_of([5, 6])])  # the policy's logprobs are -1
    await algorithm.score_batch([survivor])
    assert survivor.samples[0].streams["advantages"].tolist() == [0, 0.25, -0.5]


@pytest.mark.parametrize("text", SECTIONS, ids=lambda text: text.splitlines()[1])
def test_every_section_is_a_valid_one(text: str):
    tree: Tree = {"seq_len": 64, **tomllib.loads(text)["orchestrator"]}
    validate(OrchestratorConfig, tree, "docs")


def test_every_type_is_listed():
    assert with_algorithms_table(DOCS) == DOCS, "run `make docs`"
    assert [row[0].strip("`") for row in cells("## Built-in algorithms")] == ALGORITHMS.names


@pytest.mark.parametrize("row", cells("## Length penalties"), ids=lambda row: row[0])
async def test_the_worked_examples_come_to_these_numbers(row: list[str]):
    settings, rewards, tokens, credit = row
    section = {"type": "grpo", **tomllib.loads(settings.strip("`"))}
    config, _ = validate(OrchestratorConfig, {"seq_len": SEQ_LEN, "algo": section}, "docs")
    algorithm = config.algo.make(MakeContext(1000, lambda _: FakeModel()))
    group = make_group(numbers(rewards), [int(length) for length in numbers(tokens)])
    await algorithm.score_group(group)
    assert advantages(group) == pytest.approx(numbers(credit), abs=1e-5)


@pytest.mark.parametrize("row", cells("## Several agents"), ids=lambda row: row[0])
async def test_the_worked_examples_of_several_agents_come_to_these_numbers(row: list[str]):
    settings, agents, rewards, credit = row
    section = tomllib.loads(f"algo = {{ {settings.strip('`')} }}")["algo"]
    config, _ = validate(OrchestratorConfig, {"seq_len": SEQ_LEN, "algo": section}, "docs")
    algorithm = config.algo.make(MakeContext(SEQ_LEN, lambda _: FakeModel()))
    episodes = [n for n, episode in enumerate(agents.split(";")) for _ in episode.split(",")]
    names = agents.replace(";", ",").replace(" ", "").split(",")
    group = group_of(*zip(names, numbers(rewards.replace(";", ",")), strict=True), episodes=episodes)
    await algorithm.score_group(group)
    assert advantages(group) == pytest.approx(numbers(credit.replace(";", ",")), abs=1e-6)


def test_what_is_logged_is_what_algorithms_count():
    source = "".join(file.read_text() for file in (REPOSITORY / "src/headrace/algorithms").rglob("*.py"))
    counted = set(re.findall(r'tally\.(?:count|mean|largest)\("(\w+)"', source))
    listed = {name for row in cells("## What is logged") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == counted
