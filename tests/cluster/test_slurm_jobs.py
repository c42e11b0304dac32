"""Runs as SLURM jobs: submitted, refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.transport.run_dir import RunDir
from tests.cluster.demo import batch_digests
from tests.cluster.hosts import HostSet, wait_for
from tests.cluster.slurm import SlurmCluster
from tests.end_to_end.runs import write_run_file

pytestmark = pytest.mark.cluster

HEADRACE = (sys.executable, "-m", "headrace")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--launch.slurm.partition", "fast"], "invalid partition specified: fast"),
        (["--launch.gpus_per_node", 5], "Requested node configuration is not available"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_and_changes_nothing(
    slurm: SlurmCluster, tmp_path: Path, tiny_model: Path, options: list[object], message: str
):
    file = write_run_file(tmp_path, tiny_model)
    output = slurm.run(*HEADRACE, "rl", file, "--launch.on", "slurm", *options, check=False)
    assert message in output
    assert not (tmp_path / "run").exists()
    assert slurm.run("squeue", "--noheader") == ""


def test_a_run_that_needs_more_hosts_than_its_allocation_is_refused(
    slurm: SlurmCluster, tmp_path: Path, tiny_model: Path
):
    file = write_run_file(tmp_path, tiny_model)
    run = ["rl", file, "--launch.on", "slurm", "--launch.trainer_nodes", 2, "--launch.inference_nodes", 2]
    output = slurm.run("salloc", "--nodes=2", *HEADRACE, *run, check=False)
    assert "needs 4 hosts" in output


@pytest.mark.full
def test_a_run_inside_of_an_allocation_runs_there(slurm: SlurmCluster, tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    run = ["rl", file, "--launch.on", "slurm", "--launch.trainer_nodes", 1, "--launch.inference_nodes", 1]
    output = slurm.run("salloc", "--nodes=2", *HEADRACE, *run, "--inference.port", 0, timeout=280)
    assert "on 2 hosts" in output and RunDir(tmp_path / "run").latest_checkpoint_step() == 3
    assert slurm.run("squeue", "--noheader") == ""


@pytest.mark.full
def test_a_host_of_the_job_that_does_not_share_the_folder_is_named(
    slurm: SlurmCluster, hosts: HostSet, tmp_path: Path, tiny_model: Path
):
    folder = tmp_path / "shared"
    folder.mkdir()
    file = write_run_file(tmp_path, tiny_model, folder / "run")
    hosts[5].run("mount", "-t", "tmpfs", "other", folder)
    run = ["rl", file, "--launch.on", "slurm", "--launch.trainer_nodes", 2, "--launch.inference_nodes", 2]
    output = slurm.run("salloc", "--nodes=4", *HEADRACE, *run, check=False)
    assert "host5" in output.partition("on 4 hosts")[2]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_sweep_is_a_job_array_whose_tasks_are_its_runs(slurm: SlurmCluster, tmp_path: Path, tiny_model: Path):
    write_run_file(tmp_path, tiny_model)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"run: rl.toml\noutput_dir: {tmp_path / 'sweep'}\ngrid: {{seed: [1, 2]}}\n")
    words = (
        "sweep",
        sweep,
        "--launch.on",
        "slurm",
        "--overrides.max_steps",
        2,
        "--overrides.orchestrator.eval.interval",
        9,
    )
    output = slurm.run(*HEADRACE, *words)
    job = output.partition("submitted job ")[2].split()[0]
    wait_for(lambda: slurm.run("squeue", "--noheader", f"--jobs={job}", check=False) == "", "both tasks", timeout=240)
    runs = [RunDir(path.parent) for path in sorted((tmp_path / "sweep").glob("*/config.toml"))]
    assert [run.latest_checkpoint_step() for run in runs] == [2, 2]
    assert len({batch_of(run) for run in runs}) == 2  # of two seeds
    assert "finished" in slurm.run(*HEADRACE, *words, "--report")


def batch_of(run: RunDir) -> str:
    """Return the digest of the first batch of a run."""
    return batch_digests(run.root)["batches/step-00000001.safetensors"]
