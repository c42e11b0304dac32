"""Runs that an earlier version wrote are read, rescored, audited and resumed as by that version."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from tests.end_to_end.runs import headrace

RECORDED = Path(__file__).parents[1] / "data" / "recorded-runs"
KINDS = ["rl", "hackable", "sft"]


def copy_recorded_runs(copy: Path) -> Path:
    """Copy the recorded runs, and make their paths those of the copy."""
    shutil.copytree(RECORDED, copy)
    for file in [*copy.rglob("config.toml"), *copy.rglob("code_folders.json"), copy / "expected.json"]:
        file.write_text(file.read_text().replace("@HERE@", str(copy)))
    return copy


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = copy_recorded_runs(tmp_path / "recorded")
    monkeypatch.syspath_prepend(str(copy))
    return copy


def agrees(recorded: Any, now: Any) -> bool:
    """Whether all that was recorded is still there, numbers up to rounding; there may be more by now."""
    if isinstance(recorded, dict):
        return isinstance(now, dict) and all(key in now and agrees(value, now[key]) for key, value in recorded.items())
    if isinstance(recorded, list):
        return len(recorded) == len(now) and all(agrees(*pair) for pair in zip(recorded, now, strict=True))
    if isinstance(recorded, float) and isinstance(now, float):
        return math.isclose(recorded, now, rel_tol=1e-9) or (math.isnan(recorded) and math.isnan(now))
    return bool(recorded == now)


def printed(capsys: pytest.CaptureFixture[str], *command: object) -> Any:
    assert main([str(word) for word in command]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_run_is_summarized_as_before(here: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    recorded = json.loads((here / "expected.json").read_text())["summary"][kind]
    assert agrees(recorded, printed(capsys, "summary", here / kind, "--json"))


def test_a_recorded_run_is_rescored_as_before(here: Path, capsys: pytest.CaptureFixture[str]):
    recorded = json.loads((here / "expected.json").read_text())["rescore"]
    assert agrees(recorded, printed(capsys, "rescore", here / "rl", "--algo", "max_rl", "--json"))


def test_recorded_runs_are_compared_as_before(here: Path, capsys: pytest.CaptureFixture[str]):
    recorded = json.loads((here / "expected.json").read_text())["compare"]
    now = printed(capsys, "compare", here / "rl", here / "hackable", "--json")
    assert agrees(recorded["runs"], now["runs"])


@pytest.mark.parametrize("kind", ["rl", "hackable"])
def test_a_recorded_run_passes_the_audit(here: Path, kind: str):
    assert main(["audit", str(here / kind)]) == 0


@pytest.mark.full  # tests/api/test_run.py resumes one among the fast ones
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_run_is_resumed_from_its_checkpoint(here: Path, kind: str):
    command = "sft" if kind == "sft" else "rl"
    code, output = headrace(command, here / kind / "config.toml", "--max_steps", 5, "--resume")
    assert code == 0, output
    steps = [json.loads(line).get("step") for line in (here / kind / "metrics.jsonl").read_text().splitlines()]
    assert max(step for step in steps if step is not None) == 5
    assert steps.count(4) >= 1 and (here / kind / "model" / "model.safetensors").is_file()
    if kind != "sft":
        assert main(["audit", str(here / kind)]) == 0
