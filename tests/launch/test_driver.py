"""What the driver refuses, over real HTTP: each error names the host and the fix."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from headrace.launch.driver_client import DriverClient, RefusedByDriver, find_driver
from headrace.launch.errors import BadRequest, LaunchError
from headrace.launch.node import NodeAgent
from headrace.launch.node_messages import (
    Announcement,
    DriverAddress,
    Join,
    Joined,
    News,
    Orders,
    Report,
    RunFacts,
)
from headrace.machine import own_versions
from headrace.rollout.digest import seal
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR
from headrace.transport.run_dir import RunDir
from headrace.transport.shared_directory import Canary
from tests.launch.node_world import LIMIT_S, NodeWorld
from tests.refusals import refused


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NodeWorld]:
    """A run that waits for two hosts."""
    with closing(NodeWorld(tmp_path / "run", needed=2, timeout_s=0.5)) as world:
        yield world


@pytest.fixture
def client(world: NodeWorld) -> Iterator[DriverClient]:
    with closing(DriverClient(find_driver(world.root))) as client:
        yield client


def join(client: DriverClient, name: str, **changes: object) -> Joined:
    """Join as a host that shares the directory, with other facts."""
    run = client.get("/run", RunFacts, LIMIT_S)
    Canary(Path(run.directory), run.canary).check(name)
    facts = Join(
        nonce=name,
        address="127.0.0.1",
        check_port=1,
        gpus=(),
        cores=1,
        python="python",
        versions=own_versions(),
        clock=time.time(),
    )
    return client.post(f"/nodes/{name}", msgspec.structs.replace(facts, **changes), Joined, LIMIT_S)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": own_versions() | {"torch": "1.13.0"}}, ["torch 1.13.0", own_versions()["torch"]]),
        ({"versions": own_versions() | {"Python": "3.99"}}, ["Python 3.99"]),
        ({"versions": {}}, ["headrace none"]),
        ({"clock": time.time() - 3600}, ["clock", "behind"]),
        ({"clock": time.time() + 3600}, ["clock", "ahead"]),
        ({"problem": "launch.interface = ib0: no such interface"}, ["ib0"]),
    ],
    ids=["torch", "python", "nothing", "late clock", "early clock", "interface"],
)
def test_an_unsuitable_host_is_refused_and_ends_the_start_of_the_run(
    world: NodeWorld, client: DriverClient, changes: dict[str, object], words: list[str]
):
    with pytest.raises(RefusedByDriver) as refusal:
        join(client, "h7", **changes)
    with pytest.raises(LaunchError) as error:
        world.hosts.wait_until_ready()
    for text in (str(refusal.value), str(error.value)):
        assert all(word in text for word in ("host h7", *words))
    assert not refusal.value.again


def test_a_host_that_writes_elsewhere_is_refused(
    world: NodeWorld, client: DriverClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Canary.confirm, "__defaults__", (0.0,))
    with pytest.raises(RefusedByDriver, match="host h7"):
        join(client, "h7", nonce="not the file that was written")


def test_a_host_that_does_not_see_the_files_of_the_driver_is_refused(world: NodeWorld, monkeypatch: pytest.MonkeyPatch):
    (world.root / world.driver.facts().canary).rename(world.root / "elsewhere")
    monkeypatch.setattr(Canary.check, "__defaults__", (0.0,))
    with closing(NodeAgent(world.root, "h7", 0.0)) as agent, pytest.raises(LaunchError) as error:
        agent.run()
    assert "host h7" in str(error.value) and str(world.root) in str(error.value)


def test_a_small_difference_of_clocks_and_a_slow_disk_are_warnings(world: NodeWorld, client: DriverClient):
    assert join(client, "fine").warnings == []
    warnings = join(client, "h7", clock=time.time() - 10, write_s=2.5).warnings
    assert warnings == world.notices and len(warnings) == 2 and all("host h7" in warning for warning in warnings)


def test_a_build_of_torch_for_another_device_is_the_same_version():
    assert "+" not in own_versions()["torch"] and set(own_versions()) == {"headrace", "torch", "transformers", "Python"}


def test_hosts_that_do_not_reach_each_other_are_named(world: NodeWorld, client: DriverClient):
    join(client, "h1"), join(client, "h2")
    for name, other, result in (("h1", "h2", "connection refused"), ("h2", "h1", "")):
        client.post(f"/nodes/{name}/report", Report(name, dialed={other: result}), Orders, LIMIT_S)
    with pytest.raises(LaunchError) as error:
        world.hosts.wait_until_ready()
    assert all(word in str(error.value) for word in ("host h1", "host h2", "127.0.0.1:1", "connection refused"))


def test_too_few_hosts_are_an_error_with_what_the_missing_ones_last_said(world: NodeWorld, client: DriverClient):
    join(client, "h1")
    (world.root / "logs").mkdir()
    (world.root / "logs" / "node-h2.log").write_text("first\ncannot reach the driver\n")
    with pytest.raises(LaunchError) as error:
        world.hosts.wait_until_ready()
    assert all(word in str(error.value) for word in ("1 of 2", "h1", "host h2: cannot reach the driver"))


def test_a_report_after_the_lease_is_answered_with_gone(client: DriverClient):
    with pytest.raises(RefusedByDriver) as error:
        client.post("/nodes/h1/report", Report("never joined"), Orders, LIMIT_S)
    assert error.value.status == 410 and error.value.again


def test_a_wrong_key_is_an_error_of_the_node_and_known_to_the_driver(world: NodeWorld, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DRIVER_VAR, world.driver.url)
    monkeypatch.setenv(KEY_VAR, "wrong")
    with closing(NodeAgent(world.root, "a", LIMIT_S)) as agent, pytest.raises(LaunchError, match="key"):
        agent.run()
    with pytest.raises(LaunchError, match="wrong key") as error:
        world.hosts.wait_until_ready()
    assert "127.0.0.1" in str(error.value)


@pytest.mark.parametrize("url", ["http://no-such-host.invalid:1", "http://127.0.0.1:1"])
def test_a_driver_that_cannot_be_reached_is_named_with_the_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
):
    monkeypatch.setenv(DRIVER_VAR, url)
    monkeypatch.setenv(KEY_VAR, "any")
    with closing(NodeAgent(tmp_path, "a", 0.0)) as agent, pytest.raises(LaunchError) as error:
        agent.run()
    assert url in str(error.value) and socket.gethostname() in str(error.value)
    assert ("does not resolve" in str(error.value)) == ("invalid" in url)


def test_a_driver_without_its_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DRIVER_VAR, "http://127.0.0.1:1")
    monkeypatch.delenv(KEY_VAR, raising=False)
    with refused(key=KEY_VAR):
        find_driver(tmp_path)


def test_requests_without_the_key_and_large_ones_are_not_read(world: NodeWorld, client: DriverClient):
    with pytest.raises(RefusedByDriver) as error:
        DriverClient(DriverAddress(world.driver.url, "wrong")).post("/announcements", Announcement("x"), News, LIMIT_S)
    assert error.value.status == 401 and world.driver.board.read(0, 0.0).seq == 0
    with pytest.raises(RefusedByDriver) as error:
        client.post("/announcements", Announcement("x" * (2 << 20)), News, LIMIT_S)
    assert error.value.status == 413
    assert (world.root / "driver.json").stat().st_mode & 0o777 == 0o600


def test_keys_are_not_shown(world: NodeWorld):
    key = world.driver.env[KEY_VAR]
    assert len(key) > 30 and key not in repr(find_driver(world.root))


def test_a_closed_driver_leaves_neither_its_address_nor_its_files(tmp_path: Path):
    world = NodeWorld(tmp_path / "run", needed=1)
    world.close()
    assert list(world.root.iterdir()) == []


def test_a_later_driver_on_the_same_directory_has_another_key(tmp_path: Path):
    keys = set()
    for _ in range(2):
        with closing(NodeWorld(tmp_path / "run", needed=1)) as world:
            keys.add(world.driver.env[KEY_VAR])
    assert len(keys) == 2


def test_a_damaged_address_is_refused_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(DRIVER_VAR, raising=False)
    path = RunDir(tmp_path).driver
    content = seal(DriverAddress("http://127.0.0.1:1", "key"))
    path.write_bytes(content)
    assert find_driver(tmp_path) == DriverAddress("http://127.0.0.1:1", "key")
    path.write_bytes(content.replace(b"127.0.0.1:1", b"127.0.0.1:3"))
    with refused(BadRequest, file=path):
        find_driver(tmp_path)
