"""Whole runs of three real processes: to the end, interrupted, resumed, and with something broken."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace as api
from headrace.cli.main import main
from headrace.observe.metrics import read_metrics
from headrace.rollout.version import Version
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RolloutKind, RunDir
from tests.end_to_end.runs import finish, headrace, is_alive, processes_of, start, wait_until, write_run_file
from tests.observe.metrics_page import undocumented

pytestmark = pytest.mark.timeout(400)


def steps_of(run: RunDir, process: str, key: str) -> list[int]:
    return [record["step"] for record in read_metrics(run.metrics) if record["process"] == process and key in record]


def metrics_of(run: RunDir, process: str) -> set[str]:
    return {name for record in read_metrics(run.metrics) if record["process"] == process for name in record}


def drift_of(run: RunDir) -> dict[str, float]:
    """The largest of each part of the mismatch between trainer and engine."""
    parts: dict[str, float] = {}
    for record in read_metrics(run.metrics):
        for name, value in record.items():
            if name.startswith("drift/") and name.count("/") == 1:
                part = name.removeprefix("drift/")
                parts[part] = max(value, parts.get(part, 0.0))
    return parts


def wait_for_new_work(run: RunDir) -> None:
    """Until a batch has been trained that was not even shipped before: every process has done its part."""
    shipped = max(steps_of(run, "orchestrator", "reward/all/mean"), default=0)
    wait_until(lambda: max(steps_of(run, "trainer", "loss"), default=0) > shipped, f"step {shipped + 1}")


def draws_trained_once(run: RunDir) -> bool:
    """Every draw is in one state, nothing is left open, and what shipped is covered by the final checkpoint."""
    states = Journal(run.journal).count_states()
    return states.get("drawn", 0) == 0 and states.get("shipped", 0) == 0 and states["trained"] > 0


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunDir:
    """A run of three steps to its end, without asynchrony; its orchestrator is looked at while it goes on."""
    directory = tmp_path_factory.mktemp("whole")
    process = start("rl", write_run_file(directory, tiny_model), "--orchestrator.max_async_level", 0, "--seed", 5)
    run = RunDir(directory / "run")
    wait_until(lambda: "reward" in run.metrics.read_text() if run.metrics.exists() else False, "the first step")
    orchestrator = processes_of(run.root)["orchestrator"]
    if sys.platform == "linux":
        assert "libtorch" not in Path(f"/proc/{orchestrator}/maps").read_text()
        resident = next(
            line for line in Path(f"/proc/{orchestrator}/status").read_text().splitlines() if "VmHWM" in line
        )
        assert int(resident.split()[1]) < 300 * 1024
    code, output = finish(process)
    assert code == 0, output
    return run


def test_a_run_trains_evaluates_and_leaves_a_model_that_transformers_loads(
    whole_run: RunDir, capsys: pytest.CaptureFixture[str]
):
    run = whole_run
    assert steps_of(run, "trainer", "loss") == [1, 2, 3]
    assert steps_of(run, "orchestrator", "reward/all/mean") == [1, 2, 3]
    assert {0, 3} <= set(steps_of(run, "orchestrator", "eval/letters/avg@1"))
    assert draws_trained_once(run)
    # Monitors do not tell processes apart.
    assert metrics_of(run, "trainer") & metrics_of(run, "orchestrator") == {"step", "time", "process"}
    assert undocumented(read_metrics(run.metrics)) == []
    assert {"engine", "staleness", "decode"} <= drift_of(run).keys()
    assert drift_of(run)["engine"] < 1e-9  # the same weights in float32, two implementations

    assert main(["summary", str(run.root), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    numbers = {"steps", "reward_start", "reward_end", "seconds", "rollouts"}
    assert numbers | {"tokens_sampled", "tokens_trained", "dropped"} <= summary.keys()
    assert summary["steps"] == 3
    assert summary["rollouts"] >= 48
    for path in (run.summary, run.plot, run.config, run.logs / "trainer.log", run.rollouts / "step-00000003.parquet"):
        assert path.is_file(), path
    AutoModelForCausalLM.from_pretrained(run.final_model)
    AutoTokenizer.from_pretrained(run.final_model)


def test_at_level_0_the_same_seed_gives_the_same_rollouts_and_the_same_model_to_the_last_bit(
    whole_run: RunDir, tmp_path: Path, tiny_model: Path
):
    """The second run is started from Python."""
    steps = []
    settings = {"orchestrator.max_async_level": 0, "seed": 5}
    on_event = lambda event: steps.append(event.step) if event.kind == "step" else None  # noqa: E731
    again = api.run(write_run_file(tmp_path, tiny_model), settings, on_event=on_event)
    assert again.state == "finished"
    assert steps == [1, 2, 3]
    first, second = ((run.final_model / "model.safetensors").read_bytes() for run in (whole_run, again.files))
    columns = ["task_key", "reward", "advantage_mean", "messages"]
    tables = [
        [pq.read_table(path).select(columns) for path in RolloutKind.TRAIN.files(run.rollouts).values()]
        for run in (whole_run, again.files)
    ]
    assert tables[0] == tables[1]
    assert first == second


@pytest.mark.full
def test_a_finished_run_resumed_with_more_steps_continues_where_it_ended(tmp_path: Path, tiny_model: Path):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    assert headrace("rl", file, "--max_steps", 2)[0] == 0
    code, output = headrace("rl", file, "--max_steps", 4, "--resume")
    assert code == 0, output
    assert steps_of(run, "trainer", "loss") == [1, 2, 3, 4]
    assert draws_trained_once(run)


@pytest.mark.full
def test_without_restarts_a_killed_trainer_ends_the_run_by_name_and_a_resume_loses_nothing(
    tmp_path: Path, tiny_model: Path
):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    process = start("rl", file, "--max_steps", 4, "--trainer.ckpt.interval", 100, "--launch.max_restarts", 0)
    wait_until(lambda: "loss" in run.metrics.read_text() if run.metrics.exists() else False, "the first training step")
    os.kill(processes_of(run.root)["trainer"], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1
    assert "trainer" in output
    assert "SIGKILL" in output
    assert not processes_of(run.root)
    code, output = headrace("rl", file, "--max_steps", 4, "--trainer.ckpt.interval", 100, "--resume")
    assert code == 0, output
    assert steps_of(run, "trainer", "loss")[-4:] == [1, 2, 3, 4]  # no checkpoint yet: the batches were trained again
    assert sorted(set(steps_of(run, "orchestrator", "reward/all/mean"))) == [1, 2, 3, 4]
    assert draws_trained_once(run)


@pytest.mark.full  # the kills of test_chaos are among the fast ones
def test_processes_killed_one_after_another_are_started_again_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, tiny_model: Path
):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    process = start("rl", file, "--max_steps", 20)
    for name in ("trainer", "orchestrator", "inference"):
        wait_for_new_work(run)
        os.kill(processes_of(run.root)[name], signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    for name in ("trainer", "orchestrator", "inference"):
        assert output.count(f"{name} was ended by SIGKILL; restarting it (1 of 3)") == 1
    assert sorted(set(steps_of(run, "trainer", "loss"))) == list(range(1, 21))
    shipped = steps_of(run, "orchestrator", "reward/all/mean")
    assert shipped == sorted(set(shipped))  # none twice
    assert Journal(run.journal).last_step() == 20
    assert draws_trained_once(run)
    assert run.weights.latest() == Version(1, 20)  # the trainer was restarted once
    assert run.final_model.is_dir()
    assert not processes_of(run.root)


@pytest.mark.full  # tests/api/test_run.py stops one among the fast ones
@pytest.mark.parametrize("moment", ["while models load", "between steps", "while the last step is saved"])
def test_sigterm_ends_everything_in_order_and_says_how_to_go_on(moment: str, tmp_path: Path, tiny_model: Path):
    file, run = write_run_file(tmp_path, tiny_model), RunDir(tmp_path / "run")
    process = start("rl", file, *(("--max_steps", 1000) if moment == "between steps" else ()))
    if moment == "while models load":
        wait_until(lambda: len(processes_of(run.root)) == 3, "three processes")
    elif moment == "between steps":
        wait_until(lambda: run.metrics.exists() and "loss" in run.metrics.read_text(), "the first training step")
    else:
        wait_until(lambda: run.weights.path(Version(0, 3)).exists(), "the last weights")
    children = processes_of(run.root)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, 60)
    assert code in ((143,) if moment != "while the last step is saved" else (0, 143)), output
    assert "Traceback" not in output
    if code:
        assert "--resume" in output
    assert not [name for name, pid in children.items() if is_alive(pid)]
    if moment != "between steps":
        code, output = headrace("rl", file, "--resume")
        assert code == 0, output
        assert draws_trained_once(run)


@pytest.mark.full  # test_mixture has one among the fast ones
def test_an_environment_that_always_raises_ends_the_run_with_its_error(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    broken = "tests.end_to_end.environments:Broken"
    code, output = headrace(
        "rl", file, "--orchestrator.train.env.0.id", broken, "--orchestrator.eval.eval_base_model", "false"
    )
    assert code == 1
    assert "orchestrator" in output
    assert "KeyError: 'no such column: question'" in output
    assert not processes_of(tmp_path / "run")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_the_run_with_one_clear_sentence(tmp_path: Path, tiny_model: Path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", small], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a file system")
    try:
        process = start("rl", write_run_file(tmp_path, tiny_model, output=small / "run"), "--max_steps", 1000)
        wait_for_new_work(RunDir(small / "run"))
        fill(small)  # a disk that is too small from the start is refused before
        code, output = finish(process)
        assert code == 1
        assert "no space left on device" in output
        assert not processes_of(small / "run")
    finally:
        subprocess.run(["umount", small], check=True)


def fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
