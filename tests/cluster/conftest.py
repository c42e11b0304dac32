"""Hosts and schedulers for the tests of clusters. What is missing on this machine skips the tests with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.transport.run_dir import RunDir
from tests.cluster import demo
from tests.cluster.hosts import HostSet, missing_for_hosts
from tests.cluster.slurm import SlurmCluster, missing_for_slurm


@pytest.fixture(scope="session")
def started_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with which the demo begins, after a part of its supervised training."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    demo.headrace("sft", demo.EXAMPLE / "sft.toml", "--max_steps", demo.SFT_STEPS, "--output_dir", folder)
    return RunDir(folder).final_model


@pytest.fixture
def hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSet]:
    """Five hosts that see the temporary files of this session, and this checkout."""
    if reason := missing_for_hosts():
        pytest.skip(reason)
    with HostSet(5, tmp_path / "hosts", [tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture
def slurm(hosts: HostSet, tmp_path: Path) -> Iterator[SlurmCluster]:
    if reason := missing_for_slurm():
        pytest.skip(reason)
    with SlurmCluster(hosts, tmp_path / "slurm") as cluster:
        yield cluster
