"""Runs on SLURM that are disturbed: each finishes, and no draw is lost or doubled."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cluster.hosts import REPOSITORY, HostSet
from tests.cluster.runs import HEADRACE, SlurmRun
from tests.cluster.slurm import SlurmCluster
from tests.end_to_end.chaos import MOMENTS
from tests.end_to_end.runs import write_run_file

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

MAX_STEPS = 20
TIMEOUT_S = 600
DETECTION_S = 30
FOUR_HOSTS = ("--launch.trainer_nodes", 2, "--launch.inference_nodes", 2)
THREE_HOSTS = ("--launch.trainer_nodes", 1, "--launch.inference_nodes", 2)
SLOW_RENAMES = {"PYTHONPATH": str(REPOSITORY / "tests" / "end_to_end" / "slow_renames")}
Submit = Callable[..., SlurmRun]


@pytest.fixture
def submit(slurm: SlurmCluster, hosts: HostSet, tmp_path: Path, tiny_model: Path) -> Submit:
    """Submits a run of `MAX_STEPS` steps, none of which is shorter than an episode of the slow environment."""
    file = write_run_file(tmp_path, tiny_model)
    file.write_text(
        file.read_text().replace("tests.end_to_end.environments:Letters", "tests.cluster.environments:SlowLetters")
    )

    def submit(*options: object, max_steps: int = MAX_STEPS, env: Mapping[str, str] | None = None) -> SlurmRun:
        steps = ("--max_steps", max_steps, "--trainer.ckpt.interval", 4, "--orchestrator.eval.interval", 100)
        slowly = ("--trainer.optim.lr", 1e-6)  # groups of a policy that has learned it all are filtered out
        return SlurmRun(slurm, hosts, tmp_path / "run", file, *steps, *slowly, *options, env=env)

    return submit


def test_a_job_at_its_time_limit_is_queued_again_and_continues(slurm: SlurmCluster, submit: Submit):
    run = submit(*FOUR_HOSTS, "--launch.slurm.time", 60, "--launch.slurm.signal_before", 120)
    run.wait_for_step(3)
    slurm.run("scontrol", "update", f"JobId={run.job}", f"TimeLimit={minutes_of(run) + 2}")
    run.wait_until(lambda: run.state() == "PENDING", "the job to be queued again", timeout=180)
    step = run.step()
    assert 3 <= step < MAX_STEPS
    slurm.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    run.wait_for_restart()
    run.check_finished(MAX_STEPS, TIMEOUT_S)
    assert "restart 1" in run.log()
    # The last step before the signal was saved, so no step was repeated.
    assert run.run.latest_checkpoint_step() == MAX_STEPS
    assert run.trained_steps() == list(range(1, MAX_STEPS + 1))


def test_a_time_limit_before_the_first_step_is_a_requeue(slurm: SlurmCluster, submit: Submit):
    run = submit(*FOUR_HOSTS, "--launch.slurm.time", 2, "--launch.slurm.signal_before", 119, max_steps=4)
    run.wait_until(lambda: run.info()["Restarts"] == "1", "the job to be queued again", timeout=180)
    assert run.step() == 0
    slurm.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    run.wait_for_restart()
    run.check_finished(4, TIMEOUT_S)


def minutes_of(run: SlurmRun) -> int:
    """Return how many minutes the job has been running."""
    clock = run.info()["RunTime"].rpartition("-")[2]
    hours, minutes, _ = map(int, clock.split(":"))
    return hours * 60 + minutes


def test_a_cancelled_job_stops_in_order_and_can_be_resumed(slurm: SlurmCluster, submit: Submit, hosts: HostSet):
    run = submit(*FOUR_HOSTS)
    run.wait_for_step(3)
    slurm.run("scancel", run.job)
    assert run.wait_for_end() == "CANCELLED"
    assert "stopped at step" in run.log()
    run.wait_for_quiet_hosts()
    again = submit(*FOUR_HOSTS, "--resume")
    again.check_finished(MAX_STEPS, TIMEOUT_S)


@pytest.mark.parametrize(
    ("process", "moment"),
    [
        ("inference-1", ""),
        ("trainer-1", "in the middle of a checkpoint"),
        ("inference-1", "in the middle of publishing weights"),
    ],
)
def test_a_lost_host_costs_no_draw(submit: Submit, process: str, moment: str):
    run = submit(*FOUR_HOSTS, env=SLOW_RENAMES if moment else None)
    run.wait_for_step(3)
    if moment:
        _, directory, pattern, _ = MOMENTS[moment]
        run.wait_until(lambda: any(directory(run.run).glob(pattern)), moment, poll_s=0.005)
    run.host_of(process).kill()
    run.check_finished(MAX_STEPS, TIMEOUT_S)
    assert run.info()["Restarts"] == "0"


def test_a_lost_host_is_detected_by_its_lease_long_before_slurm_notices(submit: Submit, slurm: SlurmCluster):
    slurm.set_node_timeout(600)
    run = submit(*FOUR_HOSTS)
    run.wait_for_step(3)
    host = run.host_of("trainer-1")
    host.kill()
    run.wait_until(lambda: f"host {host.name} is lost" in run.log(), "the loss to be detected", DETECTION_S)
    run.wait_for_step(MAX_STEPS, TIMEOUT_S)
    slurm.set_node_timeout(15)  # else the job is completing until SLURM gives its host up
    run.check_finished(MAX_STEPS, TIMEOUT_S)
    assert run.info()["Restarts"] == "0"


def test_the_loss_of_the_batch_host_is_a_requeue(submit: Submit, slurm: SlurmCluster, hosts: HostSet):
    """It also has the orchestrator and the first rank."""
    run = submit(*FOUR_HOSTS)
    run.wait_for_step(5)
    host = run.host_of("orchestrator")
    assert host.name == run.info()["BatchHost"]
    hosts.restart(host.number)
    time.sleep(20)  # SLURM finds out that the node was away, by its timeout
    slurm.start_node(host.number)
    run.wait_for_restart()
    run.check_finished(MAX_STEPS, TIMEOUT_S)


@pytest.mark.parametrize("seconds", [20, 120])
@pytest.mark.parametrize("process", ["inference-1", "trainer-1"])
def test_a_cut_link_costs_no_draw(submit: Submit, process: str, seconds: int):
    run = submit(*FOUR_HOSTS)
    run.wait_for_step(3)
    host = run.host_of(process)
    host.cut_link()
    time.sleep(seconds)
    host.join_link()
    run.check_finished(MAX_STEPS, TIMEOUT_S)


def test_an_orchestrator_that_was_stopped_and_revived_is_fenced_off(
    submit: Submit, slurm: SlurmCluster, hosts: HostSet
):
    run = submit(*THREE_HOSTS)
    run.wait_for_step(5)
    host = run.host_of("orchestrator")
    assert host.name == run.info()["BatchHost"]
    host.send_signal(signal.SIGSTOP)  # the whole host, with SLURM's daemon: the job is queued again without it
    run.wait_for_restart()
    step = run.step()
    run.wait_until(lambda: run.step() > step + 1, "steps of the new orchestrator")
    assert host.send_signal(signal.SIGCONT, containing="headrace")  # not the daemon, which would kill them
    run.check_finished(MAX_STEPS, TIMEOUT_S)


def test_servers_are_added_and_drained_during_a_run(submit: Submit, slurm: SlurmCluster):
    steps = 3 * MAX_STEPS  # servers take a while to start
    hosts = ("--launch.trainer_nodes", 1, "--launch.inference_nodes", 1, "--launch.spare_nodes", 2)
    run = submit(*hosts, max_steps=steps)
    for servers in (3, 1):
        step = run.step()
        run.wait_for_step(step + 2)
        slurm.run(*HEADRACE, "scale", run.run.root, "--inference", servers)
        run.wait_until(lambda servers=servers: run.servers() == servers, f"{servers} servers")
    run.check_finished(steps, TIMEOUT_S)
