"""The supervisor over several hosts, simulated: lost hosts, groups of a trainer, too few hosts, and other servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import AGAIN, BAD_INPUT
from headrace.launch.errors import InputRefused, LaunchError
from headrace.launch.fleet import MIN_DRAIN_S
from headrace.launch.hosts.base import Host
from headrace.launch.replacement import RunPlan
from headrace.launch.restarts import HOST_NEWS_S, HostWait, Recovery, Restarts
from headrace.launch.supervisor import Supervisor
from headrace.observe.metrics import MetricsLog
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.journal_files import HOSTS_VAR
from headrace.transport.run_dir import RunDir
from tests.launch.simulated_hosts import SimulatedClock, SimulatedHosts, SimulatedProcess
from tests.launch.test_run import run_of

FOUR = {"trainer_nodes": 2, "inference_nodes": 2, "on": "nodes"}


class Lines:
    """A view that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def show(self, *_: object) -> None:
        pass

    close = show

    def count(self, *words: str) -> int:
        return sum(all(word in sentence for word in words) for sentence in self.said)


class World:
    """A run on simulated hosts `h0`, `h1`, ... with two GPUs each."""

    def __init__(self, root: Path, hosts: int, launch: dict[str, Any], **limits: Any) -> None:
        self.run, self.clock, self.lines = RunDir(root), SimulatedClock(), Lines()
        listed = [Host(f"h{number}", f"10.0.0.{number}", ("0", "1"), 8) for number in range(hosts)]
        self.hosts = SimulatedHosts(self.run, listed)
        self.plan = RunPlan(run_of(launch), self.run, listed, resume=False)
        self.supervisor = Supervisor(
            self.plan,
            self.hosts,
            self.run,
            self.lines,
            clock=self.clock,
            **{"start_timeout": 300.0, "stop_timeout": 10.0, "max_restarts": 3, "stall_s": 1e9, **limits},
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            MetricsLog(self.run.metrics, "trainer").log(step, {"loss": 0.5})

    def host_of(self, name: str) -> str:
        return self.hosts.current(name).spec.host

    def starts(self, name: str) -> list[SimulatedProcess]:
        return [process for process in self.hosts.started if process.name == name]


def test_the_members_of_a_trainer_on_two_hosts_meet_at_the_first_and_processes_know_the_number_of_hosts(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    world.clock.at(1.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    members = [world.hosts.current(name) for name in ("trainer", "trainer-1")]
    first, second = (list(member.spec.argv) for member in members)
    address = first[first.index("--rendezvous") + 1]
    assert address.startswith("10.0.0.") and not address.endswith(":0")
    assert second[second.index("--rendezvous") + 1] == address
    assert [argv[argv.index("--node-rank") + 1] for argv in (first, second)] == ["0", "1"]
    assert {process.spec.env[HOSTS_VAR] for process in world.hosts.started} == {"4"}


def test_a_lost_trainer_host_restarts_the_group_on_a_spare_host_while_the_others_stay_up(tmp_path: Path):
    world = World(tmp_path, 5, {**FOUR, "spare_nodes": 1})
    spare = next(name for name in world.plan.placement.idle)
    lost = world.plan.placement.trainer[1].host
    world.clock.at(1.0, lambda: world.train(1, 2, 3, 4))
    world.clock.at(10.0, lambda: world.hosts.lose(lost))
    world.clock.at(50.0, lambda: world.train(3, 4, 5))
    world.clock.at(60.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert {name: len(world.starts(name)) for name in ("trainer", "trainer-1", "inference", "orchestrator")} == {
        "trainer": 2,
        "trainer-1": 2,
        "inference": 1,
        "orchestrator": 1,
    }
    assert world.host_of("trainer-1") == spare
    again = world.starts("trainer")
    assert "--resume" not in again[0].spec.argv and "--resume" in again[1].spec.argv
    assert again[0].spec.argv != again[1].spec.argv  # another port, too
    assert world.lines.count(lost, "(1 of 3)") == 1
    assert world.lines.count("step 5", "40 s", lost, "steps 3 to 4") == 1


def test_without_a_spare_host_the_group_continues_on_those_that_are_left(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    lost = world.plan.placement.trainer[0].host
    world.clock.at(10.0, lambda: world.hosts.lose(lost))
    world.clock.at(60.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    running = [process for process in world.hosts.started if process.exit_status == 0]
    assert {process.name for process in running} == {"trainer", "orchestrator"}
    assert world.host_of("trainer") != lost and "--nodes" not in world.hosts.current("trainer").spec.argv


def test_a_lost_server_host_costs_its_servers_only_and_their_addresses_are_withdrawn(tmp_path: Path):
    world = World(tmp_path, 5, {**FOUR, "spare_nodes": 1})
    lost = world.plan.placement.servers[0].host
    servers = [server.name for server in world.plan.placement.servers if server.host == lost]
    paths = [world.run.endpoints / f"{name}.json" for name in servers]

    def publish() -> None:
        for name, path in zip(servers, paths, strict=True):
            write_endpoint(path, Endpoint("http://10.0.0.1:1", world.hosts.current(name).pid))

    found: list[bool] = []
    world.clock.at(1.0, publish)
    world.clock.at(10.0, lambda: world.hosts.lose(lost))
    world.clock.at(10.5, lambda: found.extend(path.exists() for path in paths))
    world.clock.at(60.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert found == [False] * len(servers)
    assert all(len(world.starts(name)) == 2 and world.host_of(name) != lost for name in servers)
    assert [len(world.starts(name)) for name in ("trainer", "trainer-1", "orchestrator")] == [1, 1, 1]


def test_a_member_that_fails_before_its_peers_host_is_known_to_be_lost_is_a_victim(tmp_path: Path):
    world = World(tmp_path, 5, {**FOUR, "spare_nodes": 1})
    lost = world.plan.placement.trainer[1].host
    world.clock.at(10.0, lambda: world.hosts.end("trainer", 1))
    world.clock.at(10.0 + HOST_NEWS_S - 5, lambda: world.hosts.lose(lost))
    world.clock.at(100.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert len(world.starts("trainer")) == 2


@pytest.mark.parametrize("status", [-9, AGAIN])
def test_a_member_that_crashes_restarts_the_group_once(tmp_path: Path, status: int):
    world = World(tmp_path, 4, FOUR)
    world.clock.at(10.0, lambda: world.hosts.end("trainer-1", status))
    world.clock.at(10.05, lambda: world.hosts.end("trainer", 1))
    world.clock.at(60.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert [len(world.starts(name)) for name in ("trainer", "trainer-1")] == [2, 2]
    assert world.lines.count("(1 of 3)") == 1


def test_a_member_that_fails_while_all_hosts_stay_ends_the_run_after_a_wait(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    world.clock.at(10.0, lambda: world.hosts.end("trainer-1", 1))
    with pytest.raises(LaunchError, match="trainer-1"):
        world.supervisor.run()
    assert 10 + HOST_NEWS_S <= world.clock.now <= 10 + HOST_NEWS_S + 1
    assert not any(process.running for process in world.hosts.started)


def test_input_that_a_member_refuses_ends_the_run_at_once(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    world.clock.at(10.0, lambda: world.hosts.end("trainer", BAD_INPUT))
    with pytest.raises(InputRefused):
        world.supervisor.run()
    assert world.clock.now < 11


def test_with_too_few_hosts_the_run_says_so_and_goes_on_once_one_joins(tmp_path: Path):
    world = World(tmp_path, 2, {"trainer_nodes": 1, "inference_nodes": 1, "on": "nodes"})
    lost = world.plan.placement.trainer[0].host
    world.clock.at(10.0, lambda: world.hosts.lose(lost))
    world.clock.at(110.0, lambda: world.hosts.listed.append(Host("new", "10.0.0.9", ("0", "1"), 8)))
    world.clock.at(120.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert world.host_of("trainer") == "new"
    assert 3 <= world.lines.count("waiting for hosts") <= 5  # 0, 10, 20, 40, 80 s
    assert len(world.starts("inference")) == 1


def test_with_too_few_hosts_for_the_start_timeout_the_run_ends(tmp_path: Path):
    world = World(tmp_path, 2, {"trainer_nodes": 1, "inference_nodes": 1, "on": "nodes"}, start_timeout=100.0)
    lost = world.plan.placement.trainer[0].host
    world.clock.at(10.0, lambda: world.hosts.lose(lost))
    with pytest.raises(LaunchError, match=lost):
        world.supervisor.run()
    assert 110 <= world.clock.now < 111


def test_a_host_that_is_lost_again_and_again_ends_the_run(tmp_path: Path):
    world = World(tmp_path, 2, {"trainer_nodes": 1, "inference_nodes": 1, "on": "nodes"}, max_restarts=2)
    host = world.hosts.listed[1]
    name = world.plan.placement.trainer[0].host
    host = next(host for host in world.hosts.listed if host.name == name)
    for time in (10.0, 30.0, 50.0):
        world.clock.at(time, lambda: world.hosts.lose(name))
        world.clock.at(time + 5, lambda: world.hosts.listed.append(host))
    with pytest.raises(LaunchError, match="2 restarts"):
        world.supervisor.run()


def scaled(world: World, servers: int, results: list[str]) -> None:
    """Request a number of servers from another thread, as the driver does."""

    def request() -> None:
        try:
            results.append(world.supervisor.scale(servers))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=request)
    thread.start()
    world.clock.at(world.clock.now + 0.3, thread.join)


def test_servers_are_added_on_idle_gpus_and_the_newest_are_drained_first(tmp_path: Path):
    world = World(tmp_path, 2, {"inference_gpus": 1, "trainer_processes": 1, "on": "nodes"})
    results: list[str] = []
    seen: list[list[str]] = []
    published: list[bool] = []

    def note() -> None:
        seen.append([p.name for p in world.hosts.started if p.running and p.spec.service])

    world.clock.at(1.0, lambda: scaled(world, 2, results))
    world.clock.at(9.0, note)
    world.clock.at(10.0, lambda: scaled(world, 1, results))
    address = world.run.endpoints / "inference-1.0.json"
    world.clock.at(12.0, lambda: write_endpoint(address, Endpoint("http://h1", 1)))  # with new keys, for example
    world.clock.at(13.0, note)  # clients may not know yet that its address was withdrawn
    world.clock.at(13.0, lambda: published.append(address.exists()))
    world.clock.at(30.0, note)
    world.clock.at(31.0, lambda: scaled(world, 99, results))
    world.clock.at(40.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert seen == [["inference", "inference-1"], ["inference", "inference-1"], ["inference"]]
    assert results[0].startswith("2 inference servers") and results[1].startswith("1 inference servers")
    assert results[2].startswith("ConfigError") and published == [False]
    assert len(world.starts("orchestrator")) == 1


class SimulatedAutoscaler:
    """Adds hosts when the test does, and takes back the one named `new`."""

    def __init__(self, world: World) -> None:
        self._world, self.requests, self.released = world, list[tuple[int, int]](), list[tuple[float, str]]()

    def request(self, servers: int, gpus: int) -> None:
        self.requests.append((servers, gpus))

    def release(self, hosts: Sequence[str]) -> None:
        if "new" in hosts:
            self._world.hosts.lose("new")
            self.released.append((self._world.clock.now, "new"))


def test_servers_without_room_start_on_hosts_that_the_scheduler_adds_and_gets_back(tmp_path: Path):
    world = World(tmp_path, 2, {"trainer_nodes": 1, "inference_nodes": 1, "on": "nodes"})
    world.hosts.autoscaler = autoscaler = SimulatedAutoscaler(world)
    results: list[str] = []
    world.clock.at(1.0, lambda: scaled(world, 4, results))
    world.clock.at(30.0, lambda: world.hosts.listed.append(Host("new", "10.0.0.9", ("0", "1"), 8)))
    world.clock.at(40.0, lambda: scaled(world, 5, results))
    world.clock.at(50.0, lambda: scaled(world, 4, results))
    world.clock.at(60.0, lambda: scaled(world, 3, results))
    world.clock.at(80.0, lambda: scaled(world, 2, results))
    world.clock.at(100.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert autoscaler.requests == [(2, 1), (1, 1), (0, 0), (0, 0), (0, 0)]
    ((released_at, _),) = autoscaler.released
    assert 80.0 + MIN_DRAIN_S < released_at < 80.0 + 2 * MIN_DRAIN_S  # after its last server has left
    assert [world.host_of(f"inference-{number}") for number in (2, 3)] == ["new", "new"]
    assert not world.starts("inference-4") and len(world.starts("inference-3")) == 1
    assert results[0].count("waits for a host") == 2 and "nothing changes" in results[2]


def test_a_failure_in_a_group_awaits_news_of_hosts_once_per_restart():
    restarts = Restarts(most=3)
    assert [restarts.awaits_news("trainer", now) for now in (10.0, 10 + HOST_NEWS_S - 1, 10 + HOST_NEWS_S)] == [
        True,
        True,
        False,
    ]
    restarts.schedule("trainer", 50.0)
    assert restarts.awaits_news("trainer", 90.0)


def test_a_wait_for_hosts_reports_itself_at_growing_intervals_until_it_is_over():
    wait = HostWait(100.0, limit_s=60.0)
    assert [t for t in range(100, 200) if wait.is_due(t) and wait.notice(t, "too few")] == [100, 110, 120, 140, 180]
    assert not wait.is_over(160.0) and wait.is_over(160.1)


@pytest.mark.parametrize(("steps", "repeated"), [([5, 6, 7], "steps 5 to 6"), ([6, 7], "step 6 "), ([7], "no step ")])
def test_a_recovery_reports_its_duration_and_the_steps_that_were_trained_again(steps: list[int], repeated: str):
    recovery = Recovery("the loss", 100.0, step=6)
    reports = [recovery.record(100.0 + 10 * index, step) for index, step in enumerate(steps)]
    assert reports[:-1] == [None] * (len(steps) - 1)
    assert reports[-1] is not None and f"step 7 was trained {10 * len(steps) - 10} s after the loss" in reports[-1]
    assert repeated in reports[-1]


def test_a_server_that_crashes_again_and_again_does_not_end_a_run_with_other_servers(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    for crash in range(10):
        world.clock.at(20.0 * (crash + 1), lambda: world.hosts.end("inference-1", -9))
    world.clock.at(400.0, world.hosts.finish)
    assert world.supervisor.run() == 0
    assert len(world.starts("inference-1")) == 11


def test_a_run_ends_when_all_of_its_servers_crash_again_and_again(tmp_path: Path):
    world = World(tmp_path, 4, FOUR)
    servers = [spec.name for spec in world.plan.specs() if spec.service]
    for crash in range(10):
        world.clock.at(20.0 * (crash + 1), lambda: [world.hosts.end(name, -9) for name in servers])
    with pytest.raises(LaunchError, match="inference"):
        world.supervisor.run()
