"""Which hosts and GPUs trainer, servers and orchestrator get."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.config.base import ConfigError
from headrace.launch.hosts.base import Host, HostRole
from headrace.launch.placement import PARALLEL, Needs, Placement, place
from headrace.launch.processes import gpu_env
from headrace.launch.replacement import place_again, scale
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
        ({"gpus": 4, "trainer": 3, "inference": 2}, "launch.trainer_processes", 3),
        ({"gpus": 4, "trainer": 1, "inference": 4}, "launch.inference_gpus", 4),
        ({"gpus": 4, "inference": 6}, "launch.inference_gpus", 6),
        ({"gpus": 2, "trainer": 2}, "launch.trainer_processes", 2),
        ({"gpus": 4, "inference": 3, "servers": 2}, "launch.inference_servers", 2),
        ({"gpus": 1, "each": 2}, PARALLEL, None),
        ({"gpus": 8, "inference": 3, "each": 2}, "launch.inference_gpus", 3),
        ({"gpus": 8, "inference": 4, "servers": 4, "each": 2}, "launch.inference_servers", 4),
        ({"gpus": 4, "each": 4}, PARALLEL, 4),
        ({"gpus": 4, "trainer": 3, "each": 2}, "launch.trainer_processes", 3),
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


def table(placement: Placement) -> dict[str, tuple[str, int]]:
    """The host of each process, with its GPUs, or its ranks where there are none."""
    return {place.name: (place.host, len(place.gpus) or place.ranks) for place in placement.places}


@pytest.mark.parametrize(
    ("gpus", "needs", "expected"),
    [
        ((8, 8), {}, {"inference": ("b", 1), "trainer": ("a", 8)}),
        ((0, 0), {}, {"inference": ("b", 1), "trainer": ("a", 1)}),
        ((4, 4, 4), {"trainer_nodes": 2, "gpus_per_server": 4}, {"trainer": ("a", 4), "trainer-1": ("b", 4)}),
        ((2, 4, 4), {"trainer_nodes": 2}, {"trainer": ("b", 4), "trainer-1": ("c", 4), "inference-1": ("a", 1)}),
        ((4, 4, 4), {"trainer_processes": 6}, {"trainer": ("a", 3), "trainer-1": ("b", 3), "inference": ("c", 1)}),
        ((4, 8), {"gpus_per_server": 8}, {"trainer": ("a", 4), "inference": ("b", 8)}),
        ((4, 4, 0), {"trainer_nodes": 1}, {"trainer": ("a", 4), "inference": ("b", 1), "orchestrator": ("c", 1)}),
        ((4, 4, 4), {"spare_nodes": 2}, {"trainer": ("a", 2), "inference-1": ("a", 1), "orchestrator": ("b", 1)}),
        ((0, 0, 0, 0), {"trainer_nodes": 2, "inference_nodes": 2}, {"trainer-1": ("b", 1), "inference-1": ("d", 1)}),
        ((0, 0, 0), {"trainer_processes": 4, "trainer_nodes": 2}, {"trainer": ("a", 2), "trainer-1": ("b", 2)}),
        ((8, 8), {"gpus_per_node": 2}, {"trainer": ("a", 2), "inference-1": ("b", 1)}),
        ((4, 4), {"has_servers": False}, {"trainer": ("a", 4), "trainer-1": ("b", 4)}),
        ((4, 4), {"has_servers": False, "trainer_processes": 3}, {"trainer": ("a", 3)}),
        ((1, 1), {}, {"trainer": ("a", 1), "inference": ("b", 1)}),
    ],
)
def test_hosts_train_or_sample(gpus: tuple[int, ...], needs: dict[str, int], expected: dict[str, tuple[str, int]]):
    placement = place(hosts_of(*gpus), Needs(**needs))
    assert {name: table(placement).get(name) for name in expected} == expected
    assert [member.node_rank for member in placement.trainer] == list(range(len(placement.trainer)))


def test_the_orchestrator_goes_where_no_rank_and_no_server_is_else_where_most_cores_are_free():
    small, large, idle = hosts_of(4, 4, 4)
    large, needs = replace(large, cores=64), Needs(trainer_nodes=1, inference_nodes=1)
    busy = place([small, large], needs).orchestrator
    free = place([small, large, idle], needs).orchestrator
    assert (busy and busy.host, free and free.host) == ("b", "c")


def test_servers_have_consecutive_ports_over_all_hosts_and_threads_follow_the_cores_of_each_host():
    hosts = [replace(host, cores=cores) for host, cores in zip(hosts_of(2, 2), (32, 16), strict=True)]
    placement = place([*hosts, Host("c", cores=4)], Needs(port=8000))
    assert [server.port for server in placement.servers] == [8000, 8001]
    assert {place.name: placement.threads(place) for place in placement.places} == {
        "inference": 8,
        "inference-1": 8,
        "trainer": 16,
        "orchestrator": 1,
    }
    assert placement.idle == {}


@pytest.mark.parametrize(
    ("gpus", "needs", "key", "value", "nearest"),
    [
        ((4, 4), {"trainer_nodes": 2, "inference_nodes": 1}, "launch.trainer_nodes", 2, 1),
        ((4, 4), {"trainer_nodes": 1, "inference_nodes": 2}, "launch.inference_nodes", 2, 1),
        ((4, 4), {"trainer_nodes": 1, "inference_nodes": 1, "spare_nodes": 3}, "launch.spare_nodes", 3, 0),
        ((4, 4, 0), {"trainer_nodes": 2, "inference_nodes": 1}, "launch.trainer_nodes", 2, 1),
        ((8, 4), {"trainer_nodes": 1, "inference_nodes": 1, "gpus_per_node": 8}, "launch.gpus_per_node", 8, 4),
        ((4, 4), {"trainer_nodes": 1, "trainer_processes": 6}, "launch.trainer_processes", 6, 4),
        ((4, 4, 4), {"trainer_nodes": 2, "trainer_processes": 1}, "launch.trainer_processes", 1, 2),
        ((4, 4), {"inference_nodes": 1, "inference_gpus": 5}, "launch.inference_gpus", 5, 4),
        ((4, 4), {"inference_nodes": 1, "inference_servers": 5}, "launch.inference_servers", 5, 4),
        ((4, 4, 4), {"inference_nodes": 2, "inference_servers": 1}, "launch.inference_nodes", 2, 1),
        ((4, 4), {"gpus_per_server": 8}, PARALLEL, 8, 4),
        ((0, 0), {"inference_gpus": 1}, "launch.inference_gpus", 1, None),
    ],
)
def test_what_does_not_fit_on_hosts_is_refused_with_the_nearest_fit(
    gpus: tuple[int, ...], needs: dict[str, int], key: str, value: int, nearest: int | None
):
    with refused(ConfigError, key=key, value=value) as error:
        place(hosts_of(*gpus), Needs(**needs))
    assert [int(number) for number in re.findall(r"it to (\d+)", error.value.fix or "")] == (
        [] if nearest is None else [nearest]
    )


def test_a_spare_host_replaces_a_lost_one_of_the_trainer_and_nothing_else_moves():
    hosts, needs = hosts_of(4, 4, 4, 4, 4), Needs(trainer_nodes=2, inference_nodes=2, spare_nodes=1)
    before = place(hosts, needs)
    after = place_again(before, [hosts[0], *hosts[2:]], needs)
    assert [(member.host, member.ranks, member.node_rank) for member in after.trainer] == [("a", 4, 0), ("e", 4, 1)]
    assert (after.servers, after.orchestrator) == (before.servers, before.orchestrator)


def test_without_a_spare_host_the_trainer_goes_on_with_fewer_ranks_or_on_cpus_with_as_many():
    needs = Needs(trainer_nodes=2, inference_nodes=1)
    for gpus, ranks in ((4, 4), (0, 2)):
        hosts = hosts_of(gpus, gpus, gpus)
        after = place_again(place(hosts, needs), hosts[1:], needs)
        assert [(member.host, member.ranks) for member in after.trainer] == [("b", ranks)]


def test_servers_of_a_lost_host_take_idle_gpus_and_those_left_out_come_back_with_it():
    hosts, needs = hosts_of(4, 4, 4), Needs(trainer_processes=2, trainer_nodes=1, inference_nodes=2)
    before = place(hosts, needs)
    after = place_again(before, hosts[:2], needs)
    assert [server.name for server in after.left_out] == ["inference-6", "inference-7"]
    assert {server.name: server.host for server in after.servers if server.number > 3} == {
        "inference-4": "a",
        "inference-5": "a",
    }
    again = place_again(after, hosts, needs)
    assert (len(again.servers), again.left_out) == (8, ())


def test_a_run_without_room_for_its_trainer_or_for_any_server_is_refused():
    hosts, needs = hosts_of(4, 4), Needs()
    for left in hosts:
        with refused(ConfigError, key="launch.spare_nodes"):
            place_again(place(hosts, needs), [left], needs)


@pytest.mark.parametrize(
    ("gpus", "asked", "servers"), [(0, {}, 2), (0, {"inference_servers": 3}, 3), (1, {}, 2), (8, {}, 4)]
)
def test_one_of_the_servers_has_the_past_policy(gpus: int, asked: dict[str, int], servers: int):
    hosts, needs = hosts_of(gpus), Needs(has_past_server=True, **asked)
    names = [server.name for server in place(hosts, needs).servers]
    assert names == ["inference", "past-1", "inference-2", "inference-3"][:servers]
    with refused(ConfigError, key="--inference", value=1):
        scale(place(hosts, needs), hosts, needs, 1)
    with refused(ConfigError, key="launch.inference_servers", value=1):
        place(hosts_of(0), Needs(has_past_server=True, inference_servers=1))


def test_servers_are_added_on_idle_gpus_and_the_last_ones_removed():
    hosts, needs = hosts_of(4, 4), Needs(inference_gpus=1, trainer_processes=2, port=8000)
    one = place(hosts, needs)
    three = scale(one, hosts, needs, 3)
    assert [(server.name, server.port) for server in three.servers] == [
        ("inference", 8000),
        ("inference-1", 8001),
        ("inference-2", 8002),
    ]
    assert set(one.places) <= set(three.places)
    assert scale(three, hosts, needs, 1) == one
    with refused(ConfigError, key="--inference", value=9) as error:
        scale(one, hosts, needs, 9)
    assert "6" in (error.value.fix or "")
    with refused(ConfigError, key="--inference", value=0):
        scale(one, hosts, needs, 0)


some_hosts = st.builds(
    lambda gpus, cores: [replace(host, cores=number) for host, number in zip(hosts_of(*gpus), cores, strict=False)],
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.lists(st.integers(1, 64), min_size=6, max_size=6),
)
few = st.none() | st.integers(1, 9)
some_needs = st.builds(
    Needs,
    trainer_processes=few,
    inference_gpus=few,
    inference_servers=few,
    gpus_per_server=st.sampled_from([1, 2, 4]),
    trainer_nodes=few,
    inference_nodes=few,
    gpus_per_node=few,
    spare_nodes=st.sampled_from([0, 0, 1]),
    has_servers=st.booleans(),
    port=st.sampled_from([0, 8000]),
)


SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]  # of a busy machine, and of numbers that do not fit together
examples = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=SLOW)


def place_if_it_fits(hosts: list[Host], needs: Needs) -> Placement:
    try:
        return place(hosts, needs)
    except ConfigError:
        assume(False)
        raise


def assert_whole(placement: Placement, hosts: list[Host], needs: Needs) -> None:
    """Every process is on a host that exists, on GPUs of its own unless all share the only one of a host."""
    gpus_of = {host.name: host.gpus for host in hosts}
    for process in placement.places:
        assert set(process.gpus) <= set(gpus_of[process.host])
    used = [(process.host, gpu) for process in placement.places for gpu in process.gpus]
    assert len(set(used)) == len(used) or (placement.shares_gpu and len(set(used)) == 1)
    names = [process.name for process in placement.places]
    assert len(set(names)) == len(names)
    assert [member.node_rank for member in placement.trainer] == list(range(len(placement.trainer)))
    assert placement.trainer[0].name == "trainer" and placement.orchestrator is not None
    for member in placement.trainer:
        assert len(member.gpus) == (member.ranks if placement.trains_on_gpus else 0)
    on_gpus = any(gpus_of.values())
    assert all(len(server.gpus) == on_gpus * needs.gpus_per_server for server in placement.servers)
    assert bool(placement.servers) == needs.has_servers


@examples
@given(some_hosts, some_needs)
def test_a_placement_gives_what_was_asked_for_and_no_gpu_twice(hosts: list[Host], needs: Needs):
    placement = place_if_it_fits(hosts, needs)
    assert_whole(placement, hosts, needs)
    assert placement == place(list(hosts), needs)
    training, sampling = ({process.host for process in group} for group in (placement.trainer, placement.servers))
    assert placement.ranks == (needs.trainer_processes or placement.ranks)
    assert len(training) == (needs.trainer_nodes or len(training))
    if needs.has_servers:
        assert len(placement.servers) == (needs.inference_servers or len(placement.servers))
        assert len(sampling) == (needs.inference_nodes or len(sampling))
        assert sum(len(server.gpus) for server in placement.servers) in (0, 1, needs.inference_gpus) or (
            needs.inference_gpus is None
        )
    assert len(hosts) - len(training | sampling) >= needs.spare_nodes
    if len(training | sampling) > 1:
        assert not training & sampling
    assert all(placement.threads(process) >= 1 for process in placement.places)


@examples
@given(some_hosts, some_needs, st.data())
def test_what_lives_on_living_hosts_stays(hosts: list[Host], needs: Needs, data: st.DataObject):
    before = place_if_it_fits(hosts, needs)
    names = data.draw(st.sets(st.sampled_from([host.name for host in hosts]), min_size=1))
    living = [host for host in hosts if host.name in names]
    try:
        after = place_again(before, living, needs)
    except ConfigError:
        assert len(living) < len(hosts)
        return
    assert_whole(after, living, needs)
    assert after == place_again(before, living, needs)
    kept = [process for process in before.places if process.host in names]
    assert {process for process in kept if process.role != "trainer"} <= set(after.places)
    if {member.host for member in before.trainer} <= names:
        assert after.trainer == before.trainer
    assert after.ranks <= before.ranks
    assert sorted(server.name for server in (*after.servers, *after.left_out)) == sorted(
        server.name for server in before.servers
    )
    assert place_again(after, living, needs) == after


@examples
@given(some_hosts, some_needs, st.integers(1, 9))
def test_scaling_moves_no_process(hosts: list[Host], needs: Needs, servers: int):
    before = place_if_it_fits(hosts, replace(needs, has_servers=True))
    try:
        after = scale(before, hosts, needs, servers)
    except ConfigError:
        assert servers > len(before.servers)
        return
    assert_whole(after, hosts, replace(needs, has_servers=True))
    assert len(after.servers) == servers
    shorter, longer = sorted((before, after), key=lambda placement: len(placement.places))
    assert set(shorter.places) <= set(longer.places)
