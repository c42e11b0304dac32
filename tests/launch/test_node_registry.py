"""Leases, commands and reachability of hosts, in simulated time."""

import pytest

from headrace.launch.node_messages import Dial, Join, ProcessState, Report, Signal, Start, Stop
from headrace.launch.node_registry import LeaseLost, NameInUse, NodeRegistry

LEASE_S = 20.0


def facts(nonce: str, replaces: str = "") -> Join:
    return Join(
        nonce=nonce,
        address=f"address of {nonce}",
        check_port=7,
        gpus=("0", "1"),
        cores=4,
        python="/usr/bin/python3",
        versions={},
        clock=0.0,
        replaces=replaces,
    )


def registry_with(*names: str) -> NodeRegistry:
    registry = NodeRegistry(LEASE_S)
    for name in names:
        registry.join(name, facts(name), 0.0)
    return registry


def dial_all(registry: NodeRegistry, now: float = 0.0, failing: frozenset[tuple[str, str]] = frozenset()) -> None:
    """Report the result of all dial commands."""
    for node in list(registry.living()):
        dialed = {
            command.nonce: "closed" if (node.name, command.name) in failing else ""
            for _, command in node.commands
            if isinstance(command, Dial)
        }
        registry.report(node.name, Report(node.facts.nonce, done=node.last_command, dialed=dialed), now)


def usable(registry: NodeRegistry) -> list[str]:
    return [node.name for node in registry.usable()]


def test_a_lease_is_lost_after_its_duration_without_a_report_and_never_comes_back():
    registry = registry_with("a")
    registry.report("a", Report("a"), 15.0)
    assert registry.expire(15.0 + LEASE_S) == []
    assert [node.name for node in registry.expire(15.1 + LEASE_S)] == ["a"]
    assert registry.expire(16.0 + LEASE_S) == [] and registry.get("a") is None
    with pytest.raises(LeaseLost):
        registry.report("a", Report("a"), 17.0 + LEASE_S)


def test_a_late_report_does_not_renew_a_lease_that_was_not_yet_seen_as_lost():
    registry = registry_with("a")
    with pytest.raises(LeaseLost):
        registry.report("a", Report("a"), LEASE_S + 1)


def test_a_host_that_joins_again_is_a_new_host_and_its_processes_are_gone():
    registry = registry_with("a", "b")
    old = registry.get("a")
    assert old is not None
    old.send(Start(1, "trainer", ["true"], {}, "log"))
    new = registry.join("a", facts("a2", replaces="a"), 5.0)
    assert old.is_gone and new.processes == {}
    assert [node.name for node in registry.living()] == ["b", "a"]  # later ones come last
    with pytest.raises(LeaseLost):
        registry.report("a", Report("a"), 5.0)


def test_a_second_host_of_the_same_name_is_refused_until_the_lease_of_the_first_expires():
    registry = registry_with("a")
    with pytest.raises(NameInUse):
        registry.join("a", facts("other"), 10.0)
    assert registry.join("a", facts("other"), LEASE_S + 1).facts.nonce == "other"


def test_a_repeated_join_returns_the_same_host():
    registry = registry_with("a")
    assert registry.join("a", facts("a"), 1.0) is registry.get("a")


def test_commands_are_sent_in_order_until_they_are_reported_as_done():
    registry = registry_with("a")
    node = registry.get("a")
    assert node is not None
    for command in (first := Start(1, "x", ["true"], {}, "log"), second := Signal(1, 15), third := Stop()):
        node.send(command)
    assert list(registry.report("a", Report("a", done=1), 1.0).commands) == [(2, second), (3, third)]
    assert list(registry.report("a", Report("a", done=0), 1.0).commands) == [(2, second), (3, third)]
    assert list(registry.report("a", Report("a", done=3), 1.0).commands) == []
    assert first.process in node.processes


def test_states_of_processes_that_were_not_started_by_this_driver_are_ignored():
    registry = registry_with("a")
    node = registry.get("a")
    assert node is not None
    node.send(Start(4, "x", ["true"], {}, "log"))
    registry.report("a", Report("a", processes={4: ProcessState(10, 0, 5), 9: ProcessState(11)}), 1.0)
    assert node.processes == {4: ProcessState(10, 0, 5)}


def test_every_host_dials_every_other_one():
    registry = registry_with("a", "b", "c")
    dials = {(n.name, c.name) for n in registry.living() for _, c in n.commands if isinstance(c, Dial)}
    assert dials == {(x, y) for x in "abc" for y in "abc" if x != y}
    assert usable(registry) == ["a"] and len(registry.pending()) == 6
    dial_all(registry)
    assert usable(registry) == ["a", "b", "c"] and registry.pending() == registry.unreachable() == []


def test_a_pair_that_cannot_connect_is_named_with_both_hosts_address_and_port():
    registry = registry_with("a", "b", "c")
    dial_all(registry, failing=frozenset({("b", "c")}))
    [problem] = registry.unreachable()
    assert all(part in problem for part in ("host b", "host c", "address of b", "address of c:7", "closed"))
    assert usable(registry) == ["a", "b"]


def test_a_later_host_is_listed_once_it_was_checked():
    registry = registry_with("a", "b")
    dial_all(registry)
    registry.join("c", facts("c"), 1.0)
    assert usable(registry) == ["a", "b"]
    dial_all(registry)
    assert usable(registry) == ["a", "b", "c"]


def test_a_leaving_host_gets_no_processes_and_is_gone_with_its_last_report():
    registry = registry_with("a", "b")
    dial_all(registry)
    registry.report("a", Report("a", leaving=True), 1.0)
    assert usable(registry) == ["b"] and registry.get("a") is not None
    registry.report("a", Report("a", leaving=True, left=True), 2.0)
    assert registry.get("a") is None


def test_a_free_port_is_not_given_twice():
    registry = registry_with("a")
    node = registry.report("a", Report("a", free_ports=[1, 2]), 0.0)
    node.used_ports.add(node.free_ports.pop())
    assert registry.report("a", Report("a", free_ports=[1, 2]), 0.0).free_ports == [1]


def test_hosts_are_ordered_by_name_and_number():
    registry = registry_with("n10", "n2", "m1")
    registry.sort()
    assert [node.name for node in registry.living()] == ["m1", "n2", "n10"]
