"""Runs on a Ray cluster of namespaced hosts, each of them a host of its own for Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.transport.run_dir import RunDir
from tests.cluster import demo
from tests.cluster.hosts import REPOSITORY, HostSet, missing_for_hosts, wait_for
from tests.cluster.ray_cluster import GPUS, HEAD, PYTHON, AutoscalingCluster, RayCluster, missing_for_ray
from tests.faults.independent_check import check_journal

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
DETECTION_S = 30.0
ON_RAY = {"launch__on": "ray", "launch__trainer_nodes": 2, "launch__inference_nodes": 2, "launch__gpus_per_node": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head on host 1 and nodes on hosts 2 to 5; host 6 is not in the cluster at first."""
    if reason := missing_for_hosts() or missing_for_ray():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ray")
    with (
        HostSet(6, folder / "hosts", [tmp_path_factory.getbasetemp()]) as hosts,
        RayCluster(hosts, folder / "cluster", nodes=4) as cluster,
    ):
        yield cluster


class Lines:
    """The lines of JSON that a program on the head prints, one at a time."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program, self._seen = program, list[str]()

    def next(self, key: str) -> dict[str, object]:
        """Return the next line, which must have a key."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            self._seen.append(line)
            if line.startswith("{"):  # Ray prints, too
                facts = json.loads(line)
                assert key in facts, self._seen
                return facts
        raise AssertionError(f"the program has ended: {''.join(self._seen)}")


@pytest.fixture
def run_file(tmp_path: Path, started_model: Path) -> Path:
    """The run file of the demo, with a model that exists."""
    return demo.write_run_file(tmp_path / "rl.toml", started_model)


def test_a_submitted_job_makes_the_same_batches_as_a_local_run(cluster: RayCluster, run_file: Path, tmp_path: Path):
    local, run = tmp_path / "local", tmp_path / "run"
    demo.headrace(*demo.arguments(run_file, local, launch__trainer_processes=2, launch__inference_servers=2))
    head = cluster.hosts[HEAD]
    submit = [PYTHON, "-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{head.address}:8265", "--"]
    output = head.run(*submit, PYTHON, "-m", "headrace", *demo.arguments(run_file, run, **ON_RAY), timeout=240)
    assert "succeeded" in output
    assert hosts_in(output).keys() == {"inference", "inference-1", "trainer", "trainer-1", "orchestrator"}
    assert len({hosts_in(output)[name] for name in ("inference", "inference-1", "trainer", "trainer-1")}) == 4
    assert demo.batch_digests(run) == demo.batch_digests(local)
    assert len(demo.batch_digests(run)) == demo.OPTIONS["max_steps"]
    demo.headrace("audit", run)


@pytest.fixture
def scenario(cluster: RayCluster, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    module = "tests.cluster.ray_scenario"
    yield cluster.hosts[HEAD].popen(PYTHON, "-m", module, tmp_path / "run", cluster.address, 5)
    cluster.hosts[HEAD].send_signal(signal.SIGKILL, module)  # after a failure it would keep its hosts


def test_processes_live_on_hosts_that_come_and_go(cluster: RayCluster, scenario: subprocess.Popen[str]):
    hosts, lines = cluster.hosts, Lines(scenario)
    refused = lines.next("refused")
    assert refused["refused"] == 9 and "host2" in str(refused["fact"]) and f"{GPUS} GPUs" in str(refused["fact"])
    assert "5 with 2 GPUs" in str(lines.next("notice")["notice"])
    cluster.add_node(6)
    assert lines.next("complete")["complete"] == [f"host{number}" for number in range(2, 7)]
    listed = lines.next("hosts")["hosts"]
    assert all(
        fact[1:] == [hosts[int(fact[0][4:])].address, ["0", "1"], len(os.sched_getaffinity(0))] for fact in listed
    )
    first, second = (int(fact[0].removeprefix("host")) for fact in listed)
    printed = lines.next("printed")
    assert json.loads(printed["printed"][0]) == ["1", True, str(REPOSITORY)] and printed["port"] > 1024
    ends = lines.next("stopped")
    assert (ends["stopped"], ends["absent"], ends["failing"]) == (-signal.SIGTERM, 127, 7) and ends["memory"] > 1 << 20
    assert lines.next("ready")["pid"] > 0
    assert len(hosts[first].send_signal(signal.SIGKILL, "ProcessOwner")) >= 1
    assert lines.next("status") == {"status": -signal.SIGKILL, "host_is_lost": False}
    assert not hosts[first].send_signal(signal.SIGKILL, "time.sleep(1000)"), (
        "the process of the killed actor still runs"
    )
    lines.next("ready")
    cluster.kill(second)
    killed_at = time.monotonic()
    lost = lines.next("status")
    assert time.monotonic() - killed_at < DETECTION_S
    assert lost == {"status": -signal.SIGKILL, "host_is_lost": True, "hosts": [f"host{first}"]}
    first_name, spare = lines.next("replaced")["replaced"]
    assert first_name == f"host{first}" and spare in {f"host{number}" for number in {2, 3, 4, 5, 6} - {first, second}}
    cluster.add_node(second)
    assert lines.next("later")["later"] == [first_name, spare, f"host{second}-2"]
    assert lines.next("closed")["closed"] in (-signal.SIGTERM, -signal.SIGKILL)
    assert scenario.wait(30) == 0


def test_a_run_whose_trainer_loses_a_host_finishes_on_the_spare_one(
    cluster: RayCluster, run_file: Path, tmp_path: Path
):
    cluster.add_node(6)
    run, printed = tmp_path / "run", tmp_path / "printed"
    options = {**ON_RAY, "launch__spare_nodes": 1, "launch__ray__address": cluster.address, "max_steps": 6}
    with open(printed, "wb") as output:
        command = [PYTHON, "-m", "headrace", *demo.arguments(run_file, run, **options)]
        process = cluster.hosts[HEAD].popen(*command, output=output)
    wait_for(lambda: (RunDir(run).latest_checkpoint_step() or 0) >= 2, "two steps", timeout=240)
    lost = hosts_in(printed.read_text())["trainer-1"]
    cluster.kill(int(lost.removeprefix("host")))
    assert process.wait(240) == 0, printed.read_text()
    assert f"host {lost} is lost" in printed.read_text()
    moved = [line for line in printed.read_text().splitlines() if "restarting" in line]
    assert len(moved) == 1 and "trainer-1 on" in moved[0] and f"trainer-1 on {lost}" not in moved[0]
    demo.headrace("audit", run)


@pytest.mark.full
def test_an_autoscaling_cluster_adds_hosts_for_a_run_and_for_its_new_servers_and_gets_them_back(
    run_file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    if reason := missing_for_hosts() or missing_for_ray():
        pytest.skip(reason)
    run, printed = RunDir(tmp_path / "run"), tmp_path / "printed"
    options = {**ON_RAY, "launch__trainer_nodes": 1, "launch__inference_nodes": 1, "launch__ray__autoscaling": True}

    def steps() -> int:
        return run.latest_checkpoint_step() or 0

    def tokens(server: str) -> int:
        path = run.status / f"{server}.json"
        return json.loads(path.read_bytes())["gauges"].get("tokens_sampled", 0) if path.exists() else 0

    with (
        HostSet(1, tmp_path / "hosts", [tmp_path_factory.getbasetemp()]) as hosts,
        AutoscalingCluster(hosts, tmp_path / "cluster", max_nodes=3) as cluster,
        open(printed, "wb") as output,
    ):
        options["launch__ray__address"] = cluster.address
        command = [PYTHON, "-m", "headrace", *demo.arguments(run_file, run.root, **options, max_steps=1000)]
        launcher = hosts[HEAD].popen(*command, output=output)

        def wait(condition: Callable[[], object], what: str) -> None:
            wait_for(lambda: condition() or launcher.poll() is not None, what, timeout=200)
            assert launcher.poll() is None, printed.read_text()

        def scale(servers: int) -> str:
            return hosts[HEAD].run(PYTHON, "-m", "headrace", "scale", run.root, "--inference", servers)

        wait(lambda: steps() >= 1, "a step")
        assert cluster.added_nodes() == 2
        assert "inference-1 waits for a host" in scale(2)
        wait(lambda: tokens("inference-1"), "tokens of the new server")
        assert cluster.added_nodes() == 3
        step, sampled = steps(), tokens("inference-1")
        wait(lambda: steps() > step + 1 and tokens("inference-1") > sampled, "steps with rollouts of the new server")
        assert "draining inference-1" in scale(1)
        wait(lambda: cluster.added_nodes() == 2, "the new node to be removed")
        step = steps()
        wait(lambda: steps() > step, "another step")
        assert hosts[HEAD].send_signal(signal.SIGTERM, "headrace rl")
        assert launcher.wait(60) == 128 + signal.SIGTERM, printed.read_text()
        wait_for(lambda: cluster.added_nodes() == 0, "all nodes to be removed", timeout=60)
    assert "was given back" in printed.read_text() and "is lost" not in printed.read_text()
    last = steps() + 2
    demo.headrace(*demo.arguments(run_file, run.root, max_steps=last), "--resume")
    check_journal(run, last)
    demo.headrace("audit", run.root)


def hosts_in(output: str) -> dict[str, str]:
    """Return the host of each process, from what a launcher has printed."""
    return dict(re.findall(r"([\w-]+) on (host[\w-]+)(?:,|$)", output, re.MULTILINE))
