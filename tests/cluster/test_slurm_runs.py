"""The demo, shortened, over the hosts of a SLURM cluster: a host is lost, and the run is that of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from headrace.rollout.batch import encode_batch
from headrace.transport.run_dir import RunDir
from tests.cluster.hosts import HostSet
from tests.cluster.runs import SlurmRun
from tests.cluster.slurm import SlurmCluster
from tests.end_to_end.chaos import Evidence
from tests.end_to_end.runs import REPOSITORY, headrace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DEMO = REPOSITORY / "examples" / "reverse-text" / "rl.toml"
MAX_STEPS = 6
SHORTER = (
    *("--max_steps", MAX_STEPS, "--orchestrator.batch_size", 64, "--orchestrator.eval.interval", 3),
    *("--orchestrator.eval.num_examples", 16, "--trainer.ckpt.interval", 2),
)
REPRODUCIBLE = ("--orchestrator.max_async_level", 0, "--launch.trainer_processes", 2, "--launch.inference_servers", 2)
NODES = ("--launch.trainer_nodes", 2, "--launch.inference_nodes", 2)


def test_the_demo_on_four_hosts_loses_one_and_has_the_batches_of_one_machine(
    slurm: SlurmCluster, hosts: HostSet, tmp_path: Path, started_model: Path
):
    options = (*SHORTER, *REPRODUCIBLE, "--model.name", started_model)
    local, spread = RunDir(tmp_path / "local"), RunDir(tmp_path / "spread")
    with Evidence(spread, tmp_path / "spread-batches") as on_hosts:
        run = SlurmRun(slurm, hosts, spread.root, DEMO, *options, *NODES)
        run.wait_for_step(3)
        run.host_of("trainer-1").kill()
        assert run.check_finished(MAX_STEPS) >= MAX_STEPS * 64 // 8
    with Evidence(local, tmp_path / "local-batches") as on_one:
        code, output = headrace("rl", DEMO, "--output_dir", local.root, "--inference.port", 0, *options, timeout=300)
        assert code == 0, output
    batches = contents(on_one)
    assert list(batches) == list(range(1, MAX_STEPS + 1))
    assert contents(on_hosts) == batches


def contents(evidence: Evidence) -> dict[int, bytes]:
    """Return the batches by step, without the incarnation: a trainer that was restarted has another one."""
    return {step: encode_batch(structs.replace(batch, incarnation=0)) for step, batch in evidence.batches().items()}
