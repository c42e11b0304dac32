"""Sweeps of real runs: interrupted, killed, gone on with, evaluated, and with a run that fails."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest

from headrace.tools.sweep.record import read_record, state_of
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, is_alive, processes_of, start, wait_until, write_run_file

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SWEEP = """
run: rl.toml
output_dir: {output}
grid: {{trainer.optim.lr: [1e-4, 1e-3]}}
seeds: [0, 1]
parallel: 2
overrides: {{max_steps: 12}}
eval: {{env: reverse-text, num_examples: 3, max_tokens: 8}}
"""


def states(output: Path) -> dict[str, str]:
    return {run.name: state_of(run, output) for run in read_record(output).planned}


def living(output: Path) -> set[int]:
    """The processes of all runs."""
    runs = [output / run.name for run in read_record(output).planned]
    return {pid for run in runs for pid in processes_of(run).values()}


def has_trained(output: Path, name: str) -> bool:
    metrics = RunDir(output / name).metrics
    return metrics.exists() and "loss" in metrics.read_text()


def test_an_interrupted_and_a_killed_sweep_go_on_and_what_is_finished_is_not_run_again(
    tmp_path: Path, tiny_model: Path
):
    write_run_file(tmp_path, tiny_model)
    output, file = tmp_path / "out", tmp_path / "sweep.yaml"
    file.write_text(SWEEP.format(output=output))
    process = start("sweep", file)
    wait_until(lambda: has_trained(output, "lr=0.0001,seed=0"), "the first run")
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 143, said
    assert "the same command goes on" in said
    assert not living(output)
    assert states(output)["lr=0.0001,seed=0"] == "unfinished"
    assert (output / "report.html").is_file()

    process = start("sweep", file)
    wait_until(lambda: "finished" in states(output).values(), "a run's end", timeout=300)
    wait_until(lambda: any(has_trained(output, name) for name in states(output) if "lr=0.001," in name), "the next one")
    before = living(output)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    wait_until(lambda: not any(map(is_alive, before)), "the end of what it had started")
    done = [name for name, state in states(output).items() if state == "finished"]
    sizes = {name: (output / name / "metrics.jsonl").stat().st_size for name in done}

    code, said = headrace("sweep", file, timeout=600)
    assert code == 0, said
    assert set(states(output).values()) == {"finished"}
    for name, size in sizes.items():
        assert f"{name}: continued" not in said
        assert (output / name / "metrics.jsonl").stat().st_size == size
    rows = list(csv.DictReader((output / "results.csv").read_text().splitlines()))
    assert [(row["state"], row["steps"]) for row in rows] == [("finished", "12")] * 4
    assert all(row["eval/avg@1"] for row in rows)
    page = (output / "report.html").read_text()
    assert " against length" in page  # accuracy, or mean reward if rewards are partial
    assert not living(output)

    code, said = headrace("sweep", file, timeout=600)
    assert code == 0
    assert "0 of 4 runs are left" in said


def test_a_run_that_fails_is_continued_once_and_the_others_go_on(tmp_path: Path, tiny_model: Path):
    write_run_file(tmp_path, tiny_model)
    output, file = tmp_path / "out", tmp_path / "sweep.yaml"
    file.write_text(
        f"run: rl.toml\noutput_dir: {output}\noverrides: {{max_steps: 2}}\nlist:\n"
        "  - {name: bad, orchestrator.train.env.0.id: 'tests.end_to_end.environments:Broken'}\n"
        "  - {name: good}\n"
    )
    code, said = headrace("sweep", file, timeout=600)
    assert code == 1, said
    assert "bad: ended with exit status 1; it is continued once" in said
    assert "bad: failed: ended with exit status 1; the end of" in said
    assert states(output) == {"bad": "failed", "good": "finished"}
    assert "1 failed, 1 finished" in (output / "report.md").read_text()
