"""`headrace check-algorithm`: accepted algorithms, output, refusals and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.check_algorithm import read_section
from headrace.cli.main import main, parse
from headrace.config.base import ConfigError
from headrace.errors import BadInput
from tests.refusals import refused

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "custom-algorithm"
MINE = """
from headrace.algorithms.base import Algorithm

class Half(Algorithm):
    def __init__(self, share=0.5):
        self.share = share

    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward * self.share / (len(group) - 1))

def half(group, share=0.5):
    return [share * rollout.reward for rollout in group]
"""


@pytest.fixture(autouse=True)
def restore_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the import paths that a run file extends."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A user file with a module name that no other test imports."""
    file = tmp_path / f"mine_{tmp_path.name}.py"
    file.write_text(MINE)
    yield str(file)
    sys.modules.pop(file.stem, None)


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By check: the first line of its result."""
    shown = capsys.readouterr().out
    return {line[:16].strip(): line[16:].strip() for line in shown.splitlines() if line[:1] not in ("", " ")}


def test_a_table_fits_on_80_columns_and_needs_no_torch():
    program = """
import sys
from headrace.cli.main import main
assert main(["check-algorithm", *sys.argv[1:]]) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    command = [sys.executable, "-c", program, "rlcsd", "--algo.num_negative_hints", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"rlcsd, on \d+ groups", lines[0])
    assert lines[-1] == "all checks that apply hold"
    assert [line.split()[-1] for line in lines if line.startswith("worked numbers  holds")] == ["(3)"]


def test_the_example_keeps_its_promises(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file = EXAMPLE / "algorithm.py"
    assert len(file.read_text().splitlines()) < 40
    monkeypatch.delitem(sys.modules, "algorithm", raising=False)
    assert main(["check-algorithm", "algorithm:Rloo", "--config", str(EXAMPLE / "rl.toml")]) == 0  # as a run finds it
    shown = lines_of(capsys)
    assert shown["shift"].startswith("holds")
    assert shown["zero sum"].startswith("holds")
    assert main(["check-algorithm", f"{file}:novelty", "--algo.kwargs.weight", "0.5"]) == 0
    assert main(["check-algorithm", "grpo", "--algo.terms", '[{import_path = "algorithm:novelty"}]']) == 0
    assert lines_of(capsys)["zero sum"].startswith("holds")


def test_a_finding_names_the_line_and_the_exit_code_says_so(mine: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check-algorithm", f"{mine}:Half"]) == 1
    shown = capsys.readouterr().out
    assert "score_group on 'one member': ZeroDivisionError: float division by zero" in " ".join(shown.split())
    assert f"{mine}:10" in "".join(shown.split())  # a long path goes over several lines
    assert shown.splitlines()[-1] == "failed: every group"


def test_a_class_is_a_type_and_a_function_is_custom(mine: str):
    module = Path(mine).stem
    assert read_section(f"{mine}:Half", None, ["--algo.kwargs.share", "1"]) == {
        "type": f"{module}:Half",
        "kwargs": {"share": 1},
    }
    assert read_section(f"{module}:half", None, []) == {"type": "custom", "import_path": f"{module}:half"}
    assert read_section("max_rl", None, []) == {"type": "max_rl"}


def test_a_run_file_or_its_section_alone_configures_it(tmp_path: Path):
    run, section, short = (tmp_path / name for name in ("run.toml", "section.toml", "short.yaml"))
    run.write_text(
        'seq_len = 9\n[orchestrator.algo]\ntype = "grpo"\n[orchestrator.algo.length_penalty]\ntype = "linear"\n'
    )
    section.write_text('normalize = "std"\n')
    short.write_text("orchestrator:\n  algo: echo\n")
    assert read_section("grpo", run, []) == {"type": "grpo", "length_penalty": {"type": "linear"}}
    changed = read_section("grpo", run, ["--algo.length_penalty.coef", "0.5"])
    assert changed["length_penalty"] == {"type": "linear", "coef": 0.5}
    assert read_section("echo", section, []) == {"type": "echo", "normalize": "std"}
    assert read_section("echo", short, []) == {"type": "echo"}
    with refused(ConfigError, file=run, key="type", value="grpo"):
        read_section("echo", run, [])
    with refused(ConfigError, key="--trainer.lr"):
        read_section("grpo", None, ["--trainer.lr", "1"])


def test_an_environment_of_a_run_file_has_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mixed = REPOSITORY / "examples" / "algorithms" / "mixed.toml"
    with refused(ConfigError, file=mixed, key="algo"):
        read_section("opd", mixed, [])
    assert read_section("opd", mixed, [], "long")["teacher"]["name"] == "teacher"
    assert read_section("grpo", mixed, [], "short") == {"type": "grpo"}
    with refused(ConfigError, key="--env", value="lnog"):
        read_section("opd", mixed, [], "lnog")
    both = tmp_path / "both.yaml"
    both.write_text("orchestrator:\n  algo: echo\n  train: {env: [{id: a, advantage: max_rl}, {id: b}]}\n")
    assert read_section("echo", both, []) == read_section("echo", both, [], "b") == {"type": "echo"}
    assert read_section("max_rl", both, [], "a") == {"type": "max_rl"}
    assert main(["check-algorithm", "opd", "--env", "long"]) == 2
    assert '--env = "long": ' in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["opd", "sft"])
def test_a_missing_teacher_is_replaced_by_a_fake(kind: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check-algorithm", kind]) == 0
    assert lines_of(capsys)["worked numbers"].startswith("holds")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grppo"], 'algo.type = "grppo"'),
        (["grpo", "--algo.nrmalize", "std"], "algo.nrmalize: unknown key. Did you mean algo.normalize?"),
        (["custom"], "algo.import_path"),
        (["nowhere.py:Mine"], "nowhere.py: no such file"),
        (["json:JSONDecoder"], 'algorithm = "json:JSONDecoder":'),
        (["grpo", "--config", "nowhere.toml"], "nowhere.toml: no such file"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check-algorithm", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_imported_is_refused_with_the_place(mine: str):
    Path(mine).write_text("import json\njson.nothing()\n")
    with pytest.raises(BadInput, match="no attribute 'nothing'"):
        read_section(f"{mine}:Half", None, [])
    Path(mine).write_text("import json\n1 / 0\n")
    with pytest.raises(BadInput, match=r"ZeroDivisionError: .*mine_.*\.py:2\)"):
        read_section(f"{mine}:Half", None, [])


def test_a_file_without_a_name_is_refused(mine: str):
    with refused(BadInput, file=Path(mine)):
        read_section(mine, None, [])


def test_options_and_algorithm_keys_are_separated():
    arguments = parse(["check-algorithm", "grpo", "--config", "a.toml", "--algo.normalize", "std"])
    assert (arguments.config, arguments.overrides) == (Path("a.toml"), ["--algo.normalize", "std"])
