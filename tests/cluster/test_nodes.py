"""Node agents on hosts with networks of their own; the driver is in this process, on the bridge between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.launch.driver import Driver
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.hosts.nodes import NodeHosts, NodeProcess
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR
from headrace.transport.run_dir import RunDir
from tests.cluster.hosts import HostSet, wait_for
from tests.launch.launching import is_alive
from tests.launch.node_world import FOREVER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90, func_only=True)]
misuse = pytest.mark.full

MISUSE_LIMIT_S = 30.0
LEASE_S = 5.0


class Run:
    """A run whose driver all hosts reach."""

    def __init__(self, hosts: HostSet, root: Path, interface: str | None = None) -> None:
        root.mkdir()
        self.root, self.notices, self._hosts, self.address = root, list[str](), hosts, hosts.add_own_address()
        self.driver = Driver(
            RunDir(root), address=self.address, interface=interface, lease_s=LEASE_S, notify=self.notices.append
        )
        self._agents: list[subprocess.Popen[str]] = []

    def join(
        self, *numbers: int, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> list[subprocess.Popen[str]]:
        agents = []
        for number in numbers:
            with open(self.output(number), "ab") as output:
                command = [*prefix, sys.executable, "-m", "headrace", "node", self.root]
                agents.append(self._hosts[number].popen(*command, env=env, output=output))
        self._agents += agents
        return agents

    def output(self, number: int) -> Path:
        """Return the file with the output of the agent on a host."""
        return self.root.with_name(f"agent-{number}.txt")

    def start(self, nodes: NodeHosts, host: str) -> NodeProcess:
        process = nodes.start(ProcessSpec(f"on-{host}", FOREVER, host=host), self.root / "logs" / f"on-{host}.log")
        wait_for(lambda: process.running and process.pid, "the process to start")
        return process

    def failure(self, needed: int) -> str:
        """Return the error of the run, which must come in time."""
        started = time.monotonic()
        with pytest.raises(LaunchError) as error:
            NodeHosts(self.driver, needed=needed).wait_until_ready()
        assert time.monotonic() - started < MISUSE_LIMIT_S + 1
        return str(error.value)

    def close(self) -> None:
        self.driver.close()
        for agent in self._agents:
            agent.kill()  # what it has started on its host ends with the host
            agent.wait()


@pytest.fixture
def run(hosts: HostSet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(hosts, tmp_path / "run", getattr(request, "param", None))
    yield run
    run.close()


@pytest.mark.parametrize("run", [None, "eth0"], indirect=True)
def test_hosts_advertise_the_address_on_their_route_or_of_the_interface(run: Run, hosts: HostSet):
    run.join(1, 2, 3)
    nodes = NodeHosts(run.driver, needed=3)
    assert [(host.name, host.address) for host in nodes.wait_until_ready()] == [
        (host.name, host.address) for host in hosts.hosts[:3]
    ]
    nodes.close()


@misuse
@pytest.mark.parametrize("run", ["lo"], indirect=True)
def test_an_address_that_leads_to_another_host_is_found(run: Run):
    run.join(1, 2)
    assert all(word in run.failure(2) for word in ("host1", "host2", "127.0.0.1:", "launch.interface"))


@misuse
@pytest.mark.parametrize("run", ["ib0"], indirect=True)
def test_an_interface_that_a_host_does_not_have_is_named(run: Run):
    run.join(1)
    assert all(word in run.failure(1) for word in ("host1", "ib0", "eth0"))


@misuse
def test_a_host_that_does_not_share_the_directory_is_named(run: Run, hosts: HostSet):
    hosts[3].run("mount", "-t", "tmpfs", "other", run.root)
    [_, astray] = [*run.join(2), *run.join(3, env=dict(run.driver.env))]
    error = run.failure(2)
    assert "host3" in error and str(run.root) in error and "host2" not in error
    assert astray.wait(MISUSE_LIMIT_S) == 1 and "host3" in run.output(3).read_text()


@misuse
def test_hosts_that_do_not_reach_each_other_are_named(run: Run, hosts: HostSet):
    hosts[2].run("ip", "route", "add", "prohibit", f"{hosts[3].address}/32")  # as a firewall between two racks
    run.join(1, 2, 3)
    error = run.failure(3)
    assert all(word in error for word in ("host2", "host3", hosts[2].address, f"{hosts[3].address}:"))
    assert "host1" not in error


@misuse
def test_a_name_that_does_not_resolve_and_a_closed_port_are_named_by_host(run: Run):
    port = int(run.driver.url.rpartition(":")[2])
    for url, number in ((f"http://login-1:{port}", 4), (f"http://{run.address}:9", 5)):
        run.join(number, env={DRIVER_VAR: url, KEY_VAR: "any"})
    run.join(1)
    error = run.failure(2)
    assert all(word in error for word in ("1 of 2 hosts", "login-1 does not resolve on host host4", "host5"))


@misuse
@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed: make test-cluster installs it")
@pytest.mark.parametrize(("offset", "side"), [("+60s", "ahead"), ("-60s", "behind")])
def test_a_clock_that_is_wrong_is_named(run: Run, offset: str, side: str):
    run.join(2, prefix=("faketime", "-f", offset), env={"DONT_FAKE_MONOTONIC": "1"})
    assert all(word in run.failure(1) for word in ("clock", "host2", side))


def test_a_cut_link_costs_a_host_its_processes_and_it_comes_back(run: Run, hosts: HostSet):
    run.join(1, 2)
    nodes = NodeHosts(run.driver, needed=2)
    nodes.wait_until_ready()
    stays, lost = run.start(nodes, "host1"), run.start(nodes, "host2")
    [outside] = hosts[2].send_signal(signal.SIGURG, containing="time.sleep(600)")  # SIGURG is ignored
    hosts[2].cut_link()
    assert lost.wait(LEASE_S + 5) and lost.host_is_lost and stays.running
    wait_for(lambda: not is_alive(outside), "the agent to kill its process", timeout=LEASE_S + 5)
    assert [host.name for host in nodes.list()] == ["host1"]
    hosts[2].join_link()
    wait_for(lambda: len(nodes.list()) == 2, "the host to come back")
    again = run.start(nodes, "host2")
    assert stays.running and again.running and not lost.running
    nodes.close()


def test_a_host_without_power_is_lost_with_its_lease(run: Run, hosts: HostSet):
    run.join(1, 2)
    nodes = NodeHosts(run.driver, needed=2)
    nodes.wait_until_ready()
    lost = run.start(nodes, "host2")
    hosts[2].kill()
    assert lost.wait(LEASE_S + 5) and lost.host_is_lost
    assert any("host2" in notice for notice in run.notices)
    hosts.restart(2)
    run.join(2)
    wait_for(lambda: [host.name for host in nodes.list()] == ["host1", "host2"], "the host to come back")
    nodes.close()


def test_a_key_is_on_no_command_line(run: Run):
    run.join(1)
    nodes = NodeHosts(run.driver, needed=1)
    nodes.wait_until_ready()
    run.start(nodes, "host1")
    key = run.driver.env[KEY_VAR].encode()
    lines = [Path(f"/proc/{name}/cmdline") for name in os.listdir("/proc") if name.isdigit()]
    assert not any(key in line.read_bytes() for line in lines if line.exists())
    nodes.close()
