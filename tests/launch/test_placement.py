"""Which hosts and GPUs trainer, servers and orchestrator get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config.base import ConfigError
from headrace.launch.hosts.base import Host, HostRole
from headrace.launch.placement import PARALLEL, Needs, place
from headrace.launch.processes import gpu_env
from headrace.machine import VISIBLE_GPUS_VAR, visible_gpus
from tests.refusals import refused

Gpus = tuple[str, ...]


def hosts_of(*gpus: int, cores: int = 8) -> list[Host]:
    """Hosts a, b, c, ... with so many GPUs each."""
    return [
        Host(name, f"10.0.0.{index}", tuple(map(str, range(number))), cores)
        for index, (name, number) in enumerate(zip("abcdefgh", gpus, strict=False), 1)
    ]


def placed(
    gpus: int, trainer: int | None = None, inference: int | None = None, servers: int | None = None, each: int = 1
) -> tuple[int, Gpus, list[Gpus]]:
    """Place on one host; return the ranks, their GPUs, and those of each server."""
    placement = place(
        hosts_of(gpus),
        Needs(trainer_processes=trainer, inference_gpus=inference, inference_servers=servers, gpus_per_server=each),
    )
    (member,) = placement.trainer
    return member.ranks, member.gpus, [server.gpus for server in placement.servers]


def test_without_gpus_the_numbers_of_processes_alone_count():
    assert placed(0) == (1, (), [()])
    assert placed(0, trainer=2, servers=3) == (2, (), [(), (), ()])


def test_one_gpu_is_shared():
    assert placed(1) == (1, ("0",), [("0",)])


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_several_gpus_are_divided_in_two_halves_that_do_not_overlap(gpus: int):
    ranks, trainer, servers = placed(gpus)
    assert ranks == len(trainer) == len(servers) == gpus // 2
    used = [*trainer, *(name for share in servers for name in share)]
    assert sorted(used) == [str(number) for number in range(gpus)]


def test_what_is_asked_for_is_given_and_the_rest_goes_to_the_other():
    assert placed(8, trainer=6) == (6, ("2", "3", "4", "5", "6", "7"), [("0",), ("1",)])
    assert placed(4, inference=3, servers=3)[2] == [("0",), ("1",), ("2",)]
    assert placed(8, trainer=2, inference=2) == (2, ("2", "3"), [("0",), ("1",)])


def test_a_server_of_several_gpus_gets_neighbours_and_no_part_of_a_server_is_placed():
    assert placed(8, each=2)[2] == [("0", "1"), ("2", "3")]
    assert placed(8, each=4) == (4, ("4", "5", "6", "7"), [("0", "1", "2", "3")])
    assert placed(6, each=2) == (4, ("2", "3", "4", "5"), [("0", "1")])
    assert placed(3, each=2) == (1, ("2",), [("0", "1")])
    assert placed(8, trainer=3, each=2) == (3, ("4", "5", "6"), [("0", "1"), ("2", "3")])
    assert placed(0, servers=2, each=4) == (1, (), [(), ()])


@pytest.mark.parametrize(
    ("asked", "key", "value"),
    [
        ({"gpus": 0, "inference": 1}, "launch.inference_gpus", 1),
        ({"gpus": 1, "trainer": 2}, "launch", None),
        ({"gpus": 4, "trainer": 3, "inference": 2}, "launch", None),
        ({"gpus": 2, "trainer": 2}, "launch", None),
        ({"gpus": 4, "inference": 3, "servers": 2}, "launch.inference_servers", 2),
        ({"gpus": 1, "each": 2}, PARALLEL, None),
        ({"gpus": 8, "inference": 3, "each": 2}, "launch.inference_gpus", 3),
        ({"gpus": 8, "inference": 4, "servers": 4, "each": 2}, "launch.inference_servers", 4),
        ({"gpus": 4, "each": 4}, "launch", None),
        ({"gpus": 4, "trainer": 3, "each": 2}, "launch", None),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, int], key: str, value: int | None):
    with refused(ConfigError, key=key, value=value):
        placed(**asked)


@pytest.mark.parametrize(("gpus", "ranks", "expected"), [(0, None, 1), (0, 3, 3), (3, None, 3), (3, 2, 2)])
def test_a_trainer_that_is_alone_takes_every_gpu_or_the_given_number(gpus: int, ranks: int | None, expected: int):
    placement = place(hosts_of(gpus), Needs(trainer_processes=ranks, has_servers=False, has_orchestrator=False))
    (member,) = placement.places
    assert (member.ranks, member.gpus) == (expected, ("0", "1", "2")[: min(gpus, expected)])
    with refused(ConfigError, key="launch.trainer_processes", value=4):
        place(hosts_of(3), Needs(trainer_processes=4, has_servers=False, has_orchestrator=False))


def test_a_process_sees_only_its_gpus_and_the_launcher_only_those_it_may_use(monkeypatch: pytest.MonkeyPatch):
    assert gpu_env(["2", "3"]) == {VISIBLE_GPUS_VAR: "2,3"}
    assert gpu_env(()) == {}
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "4,GPU-abc")
    assert visible_gpus() == ["4", "GPU-abc"]
    monkeypatch.setenv(VISIBLE_GPUS_VAR, "")
    assert visible_gpus() == []


def test_hosts_do_what_they_are_meant_for():
    roles: dict[str, HostRole] = {"a": "spare", "b": "inference", "c": "trainer", "d": "orchestrator"}
    hosts = [replace(host, role=roles[host.name]) for host in hosts_of(8, 4, 2, 0)]
    placement = place(hosts, Needs(trainer_nodes=1, inference_nodes=1, spare_nodes=1))
    assert {server.host for server in placement.servers} == {"b"}
    assert [member.host for member in placement.trainer] == ["c"]
    assert placement.orchestrator is not None and placement.orchestrator.host == "d"


def test_a_host_for_the_orchestrator_neither_trains_nor_samples():
    hosts = [replace(host, role="orchestrator" if host.name == "a" else "") for host in hosts_of(0, 0)]
    placement = place(hosts, Needs())
    assert {place.name: place.host for place in placement.places} == {
        "inference": "b",
        "trainer": "b",
        "orchestrator": "a",
    }
