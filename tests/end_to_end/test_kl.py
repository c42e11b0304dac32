"""Real runs with a KL penalty: large, zero, to the run's own past across a kill, and to a served model."""

import os
import signal
from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, start, wait_until, write_run_file
from tests.end_to_end.test_algorithms import served

RUN_FILE = """
max_steps = 12
seq_len = 64
output_dir = "{output}"
model = {{ init = "tiny" }}
[trainer.optim]
lr = 1e-4
[orchestrator]
batch_size = 32
group_size = 4
algo = {{ type = "grpo", kl = {{ coef = {coef} }} }}
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
thinking_retention = "all"
[orchestrator.train.sampling]
max_tokens = 16
[[orchestrator.train.env]]
id = "reverse-text"
"""


def distances(directory: Path, coef: float) -> list[float]:
    """Return k3 at each step of a run."""
    directory.mkdir()
    (directory / "rl.toml").write_text(RUN_FILE.format(output=directory / "run", coef=coef))
    assert start("rl", directory / "rl.toml").wait(300) == 0
    records = read_metrics(RunDir(directory / "run").metrics)
    return [record["kl/k3"] for record in records if "kl/k3" in record]


@pytest.mark.full
def test_a_large_coefficient_keeps_a_run_at_its_start(tmp_path: Path):
    """At this learning rate: the penalty has no gradient at the start, so the first update is not held back by it."""
    held, free = distances(tmp_path / "held", 100.0), distances(tmp_path / "free", 1e-6)
    assert len(held) == len(free) == 12
    assert max(held) < 0.01
    assert free[-1] > 0.03


ALGO = "--orchestrator.algo.kl."
REPEATABLE = ("--orchestrator.max_async_level", 0, "--seed", 5, "--max_steps", 5, "--trainer.ckpt.interval", 1)


def steps_of(run: RunDir) -> list[int]:
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    return [record["step"] for record in records if record["process"] == "trainer" and "loss" in record]


def final_bytes(run: RunDir) -> bytes:
    return (run.final_model / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_coefficient_of_0_is_a_run_without_the_section_to_the_last_bit(tmp_path: Path, tiny_model: Path):
    runs = [RunDir(tmp_path / name) for name in ("without", "zero", "small")]
    for run, options in zip(runs, ((), (f"{ALGO}coef", 0), (f"{ALGO}coef", 0.1)), strict=True):
        code, output = headrace("rl", write_run_file(tmp_path, tiny_model, run.root), *REPEATABLE, *options)
        assert code == 0, output
    without, zero, small = map(final_bytes, runs)
    assert without == zero != small


@pytest.mark.full
def test_a_killed_run_whose_reference_follows_it_comes_to_the_model_of_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path
):
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    for run in runs:
        file = write_run_file(tmp_path, tiny_model, run.root)
        options = (*REPEATABLE, f"{ALGO}coef", 0.5, f"{ALGO}reference.every", 2)
        process = start("rl", file, *options)
        if run is runs[1]:
            wait_until(lambda run=run: 3 in steps_of(run), "three steps")
            os.kill(process.pid, signal.SIGKILL)
            finish(process)
            process = start("rl", file, *options, "--resume")
        code, output = finish(process)
        assert code == 0, output
        assert headrace("audit", run.root)[0] == 0
    assert final_bytes(runs[0]) == final_bytes(runs[1])


@pytest.mark.full
def test_the_reference_can_be_a_model_that_is_served(tmp_path: Path, tiny_model: Path):
    """The served model is the start: the distance is that of rounding at the first step, and grows."""
    with served(tiny_model) as (_, url):
        reference = (f"{ALGO}reference.name", "teacher", f"{ALGO}reference.base_url", url)
        file = write_run_file(tmp_path, tiny_model)
        code, output = headrace("rl", file, *REPEATABLE, f"{ALGO}coef", 0.1, *reference)
    assert code == 0, output
    records = read_metrics(RunDir(tmp_path / "run").metrics)
    first, *_, last = [record["kl/k3"] for record in records if "kl/k3" in record]
    assert abs(first) < 1e-6 < 1e-4 < last
