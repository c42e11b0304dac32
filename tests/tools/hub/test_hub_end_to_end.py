"""A real run goes up, vanishes, comes down in another place, and goes on there."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import headrace, write_run_file
from tests.tools.hub.stand_in import Hub


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_is_continued_and_evaluated_where_it_was_pulled_to(
    hub: Hub, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    run_file = write_run_file(tmp_path, base)
    run_file.write_text(run_file.read_text().replace("interval = 2\n", "interval = 1\npermanent_interval = 2\n", 1))
    done(headrace("rl", run_file))
    done(headrace("push", tmp_path / "run", "team/run", "--permanent", "--resume-state"))
    done(headrace("push", tmp_path / "run/checkpoints/step-00000002", "team/model"))
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(base)

    elsewhere = RunDir(tmp_path / "elsewhere")
    done(headrace("pull", "team/run", elsewhere.root))
    done(headrace("summary", elsewhere.root))
    longer = [word for key in ("", "trainer.", "orchestrator.") for word in (f"--{key}max_steps", "4")]
    done(headrace("rl", elsewhere.config, "--resume", *longer))
    steps = [r["step"] for r in read_metrics(elsewhere.metrics) if r["process"] == "trainer" and "loss" in r]
    assert steps == [1, 2, 3, 4]
    states = Journal(elsewhere.journal).count_states()
    assert states.get("drawn", 0) == 0 and states["trained"] > 0

    letters = ["--env", "tests.end_to_end.environments:Letters", "--num-examples", "3", "--max-tokens", "4"]
    out = tmp_path / "eval"
    done(headrace("eval", elsewhere.root, "--checkpoints", "permanent", *letters, "--output", out, timeout=400))
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == ["step-2", "step-4"]
    curves = {path.name for path in out.glob("curve-*.svg")}
    assert curves in ({"curve-accuracy.svg"}, {"curve-reward.svg"})  # reward if rewards are partial
    done(headrace("pull", "team/model", tmp_path / "model"))
    done(headrace("eval", tmp_path / "model", *letters, "--output", tmp_path / "eval-model"))
    pulled, own = ((tmp_path / name / "completions.jsonl") for name in ("eval-model/model", "eval/step-2"))
    assert sorted(pulled.read_text().splitlines()) == sorted(own.read_text().splitlines())  # greedy: the same words


def done(ended: tuple[int, str]) -> None:
    code, output = ended
    assert code == 0, output
