"""Runs on a Ray cluster of namespaced hosts, each of them a host of its own for Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import REPOSITORY, HostSet, missing_for_hosts
from tests.cluster.ray_cluster import GPUS, HEAD, PYTHON, RayCluster, missing_for_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
DETECTION_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head on host 1 and nodes on hosts 2 to 4; host 5 is not in the cluster."""
    if reason := missing_for_hosts() or missing_for_ray():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ray")
    with (
        HostSet(5, folder / "hosts", [tmp_path_factory.getbasetemp()]) as hosts,
        RayCluster(hosts, folder / "cluster", nodes=3) as cluster,
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


def test_processes_live_on_hosts_that_come_and_go(cluster: RayCluster, tmp_path: Path):
    hosts = cluster.hosts
    program = hosts[HEAD].popen(PYTHON, "-m", "tests.cluster.ray_scenario", tmp_path / "run", cluster.address)
    lines = Lines(program)
    refused = lines.next("refused")
    assert refused["refused"] == 9 and "host2" in str(refused["fact"]) and f"{GPUS} GPUs" in str(refused["fact"])
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
    hosts[second].kill()
    killed_at = time.monotonic()
    lost = lines.next("status")
    assert time.monotonic() - killed_at < DETECTION_S
    assert lost == {"status": -signal.SIGKILL, "host_is_lost": True, "hosts": [f"host{first}"]}
    spare = f"host{({2, 3, 4} - {first, second}).pop()}"
    assert lines.next("replaced")["replaced"] == [f"host{first}", spare]
    cluster.add_node(5)
    assert lines.next("later")["later"] == [f"host{first}", spare, "host5"]
    assert lines.next("closed")["closed"] in (-signal.SIGTERM, -signal.SIGKILL)
    assert program.wait(30) == 0
    hosts.restart(second)
    cluster.add_node(second)
