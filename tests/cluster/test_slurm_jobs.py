"""Runs as SLURM jobs: submitted, refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import HostSet
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
