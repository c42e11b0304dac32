"""The hosts of the tests are what they claim to be: apart from each other, except for the shared folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import HostSet, wait_for
from tests.cluster.slurm import GPUS, SlurmCluster

pytestmark = pytest.mark.cluster

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=2).close()"
LISTEN = "import socket; server = socket.create_server(('', 7000))\nwhile True: server.accept()"


def test_hosts_have_their_own_name_processes_and_temporary_files(hosts: HostSet, tmp_path: Path):
    for host in hosts.hosts:
        host.run("bash", "-c", "hostname > /tmp/mine; hostname > /dev/shm/mine; hostname > $0", tmp_path / host.name)
    assert [hosts[n].run("cat", "/tmp/mine", "/dev/shm/mine") for n in (1, 5)] == ["host1\nhost1", "host5\nhost5"]
    assert hosts[3].run("cat", tmp_path / "host2") == "host2"
    assert hosts[2].run("bash", "-c", f"kill -0 {hosts[1].pid} 2>&1 || echo none").endswith("none")


def test_a_killed_host_ends_its_processes_and_comes_back_empty(hosts: HostSet, tmp_path: Path):
    detached = f"touch /tmp/mine; setsid sleep 1000 & echo > {tmp_path / 'up'}; wait"
    process = hosts[2].popen("bash", "-c", detached)
    wait_for((tmp_path / "up").exists, "the command")
    pids = hosts[2].pids()
    hosts[2].kill()
    assert process.wait(5) != 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    hosts.restart(2)
    assert "mine" not in hosts[2].run("ls", "/tmp")


def test_a_cut_link_separates_a_host_until_it_is_joined(hosts: HostSet):
    hosts[2].popen("python3", "-c", LISTEN)

    def connects() -> bool:
        process = hosts[3].popen("python3", "-c", CONNECT, "host2")
        process.communicate()
        return process.returncode == 0

    wait_for(connects, "host 2 to listen")
    hosts[2].cut_link()
    assert not connects()
    hosts[2].join_link()
    wait_for(connects, "host 2 to be reached again")
    assert hosts[2].send_signal(signal.SIGSTOP, containing="create_server")


def test_slurm_gives_every_node_its_gpus_and_takes_a_restarted_one_back(slurm: SlurmCluster, hosts: HostSet):
    show = (
        "srun",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gres=gpu:2",
        "bash",
        "-c",
        "echo $(hostname) $CUDA_VISIBLE_DEVICES",
    )
    expected = [f"host{number} 0,1" for number in (2, 3, 4, 5)]
    assert sorted(slurm.run(*show).splitlines()) == expected
    slurm.wait_until_idle()
    hosts.restart(2)
    slurm.start_node(2)
    assert sorted(slurm.run(*show).splitlines()) == expected
    assert "Requested node configuration is not available" in slurm.run(
        "srun", "--nodes=1", f"--gres=gpu:{GPUS + 1}", "true", check=False
    )
