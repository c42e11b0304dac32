"""Real node agents and a driver over loopback: processes, losses of hosts, their return, misuse."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

import headrace
from headrace.cli.main import main
from headrace.config.launch import LaunchConfig
from headrace.errors import BadInput
from headrace.launch.addresses import find_free_ports
from headrace.launch.driver_client import DriverClient, RefusedByDriver, find_driver
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.nodes import NodeHosts, open_hosts
from headrace.launch.node import NodeAgent
from headrace.launch.node_messages import Announcement, News
from headrace.launch.placement import Needs
from headrace.transport.run_dir import RunDir
from tests.launch.launching import is_alive
from tests.launch.node_world import LIMIT_S, NodeWorld, wait_for


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeWorld]:
    """Two hosts that stay."""
    with closing(NodeWorld(tmp_path_factory.mktemp("run"), needed=2)) as world:
        world.join("b"), world.join("a")
        assert [host.name for host in world.hosts.wait_until_ready()] == ["a", "b"]
        yield world
        process = world.start_and_wait("a")
        world.hosts.close()
        assert not process.running and not is_alive(process.pid)
        assert [world.agents[name].wait(LIMIT_S) for name in "ab"] == [0, 0]


def test_probes_see_whether_a_host_has_joined_and_that_for_the_orchestrator_is_not_enough_for_a_run(tmp_path: Path):
    with closing(NodeWorld(tmp_path / "run", needed=1)) as world:
        state = tmp_path / "state"
        world.join("driver", None, "--role", "orchestrator", "--state", str(state))
        wait_for(lambda: state.exists() and state.read_text() == "joined")
        assert httpx.get(f"{world.driver.url}/health").json() == {"hosts": 1}  # without a key
        before = state.stat().st_mtime_ns
        wait_for(lambda: state.stat().st_mtime_ns > before)
        world.join("a", None, "--role", "trainer")
        roles = [(host.name, host.role) for host in world.hosts.wait_until_ready()]
        assert roles == [("a", "trainer"), ("driver", "orchestrator")]


def test_the_launcher_listens_at_its_port_until_the_hosts_are_closed(tmp_path: Path):
    launch = LaunchConfig(on="nodes", driver_port=find_free_ports(1)[0], join_timeout=0.1)
    health = f"http://127.0.0.1:{launch.driver_port}/health"
    with closing(open_hosts(launch, RunDir(tmp_path), Needs())) as hosts:
        assert httpx.get(health).json() == {"hosts": 0}
        with pytest.raises(LaunchError):
            hosts.wait_until_ready()
    with pytest.raises(httpx.ConnectError):
        httpx.get(health)


def test_missing_hosts_are_reported_early_and_an_agent_gives_up_when_the_driver_is_gone(tmp_path: Path):
    with closing(NodeWorld(tmp_path / "run", needed=3, timeout_s=3.0, rejoin_s=0.1)) as world:
        agent = world.join("a")
        wait_for(lambda: world.hosts.list())
        with pytest.raises(LaunchError, match="1 of 3 hosts have joined: a"):
            world.hosts.wait_until_ready()
        [early] = [notice for notice in world.notices if "1 of 3 hosts have joined: a" in notice]
        assert "launch.join_timeout" in early and f"headrace node {world.root}" in early
        world.driver.close()
        assert agent.wait(LIMIT_S) == 1  # after its lease and `rejoin_s`


def test_a_host_with_too_few_gpus_is_an_error_before_the_others_have_joined(tmp_path: Path):
    needs = Needs(trainer_nodes=1, inference_nodes=2, gpus_per_node=8)
    with closing(NodeWorld(tmp_path / "run", needed=3)) as world:
        world.join("small", {"CUDA_VISIBLE_DEVICES": ""})
        with pytest.raises(BadInput) as refused:
            NodeHosts(world.driver, needed=3, needs=needs, timeout_s=LIMIT_S).wait_until_ready()
        assert refused.value.key == "launch.inference_nodes" and "small has 0" in refused.value.fact
        assert [host.name for host in world.hosts.list()] == ["small"]


def test_a_host_with_another_version_of_the_package_is_named(tmp_path: Path):
    other = tmp_path / "site-packages"
    shutil.copytree(Path(headrace.__file__).parent, other / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "headrace-0.0.1.dist-info").mkdir()
    (other / "headrace-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: headrace\nVersion: 0.0.1\n"
    )
    with closing(NodeWorld(tmp_path / "run", needed=1)) as world:
        agent = world.join("old", {"PYTHONPATH": str(other)})
        with pytest.raises(LaunchError, match=r"host old has headrace 0\.0\.1"):
            world.hosts.wait_until_ready()
        assert agent.wait(LIMIT_S) == 1


def test_hosts_describe_themselves(world: NodeWorld):
    for host in world.hosts.list():
        assert (host.address, host.cores) == ("127.0.0.1", len(os.sched_getaffinity(0)))


def test_a_process_runs_on_its_host_with_its_environment_and_reports_its_end(world: NodeWorld):
    code = "import os, sys; print(os.environ['MINE'], bool(os.environ['HEADRACE_DRIVER_KEY'])); sys.exit(5)"
    process = world.start("b", "ends", [sys.executable, "-c", code], MINE="here")
    assert process.wait(LIMIT_S) and process.exit_status == 5
    assert process.last_lines() == ["here True"]
    assert process.pid > 0 and process.peak_bytes > 0 and not process.host_is_lost


def test_a_process_is_terminated_and_its_children_are_killed(world: NodeWorld):
    both = world.start("a", "parent", ["sh", "-c", "sleep 600 & echo $!; wait"])
    wait_for(lambda: both.running and both.last_lines())
    child = int(both.last_lines()[0])
    both.terminate()
    assert both.wait(LIMIT_S) and both.exit_status == -signal.SIGTERM
    assert is_alive(child)
    both.kill()
    wait_for(lambda: not is_alive(child))


def test_a_command_that_does_not_exist_ends_with_127_and_says_so_in_its_log(world: NodeWorld):
    process = world.start("a", "missing", ["/no/such/command"])
    assert process.wait(LIMIT_S) and process.exit_status == 127
    assert "/no/such/command" in process.last_lines()[0]


def test_free_ports_of_a_host_are_different(world: NodeWorld):
    assert len({world.hosts.free_port("a") for _ in range(4)}) == 4


def test_a_process_on_an_unknown_host_is_lost_at_once(world: NodeWorld):
    process = world.start("nowhere")
    assert process.host_is_lost is False and process.exit_status == -signal.SIGKILL and process.host_is_lost


def test_announcements_go_from_one_process_to_all(world: NodeWorld):
    client = DriverClient(find_driver(world.root))
    number = client.post("/announcements", Announcement("weights/v-1"), News, LIMIT_S).seq
    assert client.get(f"/announcements?after={number - 1}", News, LIMIT_S).entries == [(number, "weights/v-1", False)]
    with pytest.raises(RefusedByDriver):
        client.post("/announcements", Announcement("../x"), News, LIMIT_S)


def test_scale_calls_the_supervisor_and_prints_what_happens(world: NodeWorld, capsys: pytest.CaptureFixture[str]):
    (world.root / "config.toml").touch()
    assert main(["scale", str(world.root), "--inference", "3"]) == 1  # nothing can be scaled
    asked = []

    def on_scale(servers: int) -> str:
        asked.append(servers)
        if servers > 9:
            raise BadInput("too many", key="--inference", value=servers)
        return f"starting {servers} servers"

    world.driver.on_scale = on_scale
    assert main(["scale", str(world.root), "--inference", "3"]) == 0
    assert capsys.readouterr().out == "starting 3 servers\n" and asked == [3]
    assert main(["scale", str(world.root), "--inference", "10"]) == 1
    assert "--inference = 10" in capsys.readouterr().err


def test_a_host_of_the_same_name_is_refused(world: NodeWorld):
    with closing(NodeAgent(world.root, "a", wait_s=0.0)) as agent, pytest.raises(LaunchError, match="--name = a"):
        agent.run()
    assert len(world.hosts.list()) == 2


def test_hosts_are_lost_leave_and_come_back(tmp_path: Path):
    with closing(NodeWorld(tmp_path / "run", needed=3)) as world:
        for name in ("killed", "stopped", "leaves"):
            world.join(name)
        world.hosts.wait_until_ready()
        on_killed, on_stopped, on_leaving = (world.start_and_wait(n, n) for n in ("killed", "stopped", "leaves"))

        world.agents["leaves"].terminate()  # the host is to be given back
        assert on_leaving.wait(LIMIT_S) and on_leaving.host_is_lost and not is_alive(on_leaving.pid)
        assert world.agents["leaves"].wait(LIMIT_S) == 128 + signal.SIGTERM

        world.agents["killed"].kill()
        world.agents["stopped"].send_signal(signal.SIGSTOP)  # as if its network were cut
        for process in (on_killed, on_stopped):
            assert process.wait(LIMIT_S) and process.host_is_lost and process.exit_status == -signal.SIGKILL
            assert "lost with its host" in process.how_it_ended() and process.was_killed
        wait_for(lambda: not is_alive(on_killed.pid))  # by the lifeline
        assert is_alive(on_stopped.pid) and world.hosts.list() == []

        world.agents["stopped"].send_signal(signal.SIGCONT)  # it finds its lease lost, and joins again
        wait_for(lambda: [host.name for host in world.hosts.list()] == ["stopped"])
        assert not is_alive(on_stopped.pid) and not on_stopped.running
        world.join("killed")
        wait_for(lambda: [host.name for host in world.hosts.list()] == ["stopped", "killed"])

        again = world.start_and_wait("killed", "again")
        world.driver.close()  # as if it had been killed
        wait_for(lambda: not is_alive(again.pid))
        for name in ("stopped", "killed"):
            assert world.agents[name].poll() is None  # it waits for a driver to come back
            world.agents[name].terminate()
            assert world.agents[name].wait(LIMIT_S) == 128 + signal.SIGTERM
