"""The hosts that have joined a run: their leases, their processes and the commands for them.

Pure: methods take the time (monotonic, of the driver). A host that joins again has a new nonce and is a new host; the
processes of the old one are lost.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.launch.hosts.base import Host
from headrace.launch.node_messages import LEASE_S, Command, Dial, Join, ProcessState, Report, Start


class NameInUse(Exception):
    """Another node agent with the same name holds a lease."""


class LeaseLost(Exception):
    """The report of a host that is considered lost."""


@dataclass(eq=False)
class Node:
    """One join of one host."""

    name: str
    facts: Join
    renewed_at: float
    commands: deque[tuple[int, Command]] = field(default_factory=deque)
    """Not yet reported as done."""
    last_command: int = 0
    processes: dict[int, ProcessState] = field(default_factory=dict)
    dialed: dict[str, str] = field(default_factory=dict)
    free_ports: list[int] = field(default_factory=list)
    used_ports: set[int] = field(default_factory=set)
    is_leaving: bool = False
    is_gone: bool = False
    """Its lease has expired, it has left, or its agent has joined again."""

    @property
    def host(self) -> Host:
        facts = self.facts
        return Host(self.name, facts.address, tuple(facts.gpus), facts.cores, facts.role)

    def send(self, command: Command) -> None:
        self.last_command += 1
        self.commands.append((self.last_command, command))
        if isinstance(command, Start):
            self.processes[command.process] = ProcessState()


class NodeRegistry:
    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._nodes: dict[str, Node] = {}
        """By name, in the order in which they are listed."""
        self._no_loss_until = -math.inf
        """No lease expires before."""

    def join(self, name: str, facts: Join, now: float) -> Node:
        """Add a host, and have it and all others dial each other. Raises `NameInUse`."""
        self.expire(now)
        if (old := self._nodes.get(name)) is not None:
            if old.facts.nonce == facts.nonce and not old.is_gone:  # the answer was lost
                return old
            if not old.is_gone and old.facts.nonce != facts.replaces:
                raise NameInUse
            old.is_gone = True
            del self._nodes[name]  # so that it comes last
        node = Node(name, facts, now)
        for other in self.living():
            node.send(_dial(other))
            other.send(_dial(node))
        self._nodes[name] = node
        return node

    def report(self, name: str, report: Report, now: float) -> Node:
        """Renew a lease. Raises `LeaseLost` if it has expired."""
        self.expire(now)
        node = self._nodes.get(name)
        if node is None or node.facts.nonce != report.nonce or node.is_gone:
            raise LeaseLost
        node.renewed_at = now
        node.is_leaving |= report.leaving
        node.is_gone = report.left
        node.processes.update({number: state for number, state in report.processes.items() if number in node.processes})
        node.dialed.update(report.dialed)
        node.free_ports = [port for port in report.free_ports if port not in node.used_ports]
        while node.commands and node.commands[0][0] <= report.done:
            node.commands.popleft()
        return node

    def expire(self, now: float) -> list[Node]:
        """Return the hosts that are lost since the last call, because they did not renew their lease."""
        if now <= self._no_loss_until:  # it is called for every process of the run
            return []
        lost = [node for node in self.living() if now - node.renewed_at > self.lease_s]
        for node in lost:
            node.is_gone = True
        self._no_loss_until = min((node.renewed_at for node in self.living()), default=now) + self.lease_s
        return lost

    def living(self) -> Iterator[Node]:
        """Yield the hosts with a lease, also those that are leaving, in the order of their joins."""
        return (node for node in list(self._nodes.values()) if not node.is_gone)

    def get(self, name: str) -> Node | None:
        """Return a host with a lease."""
        node = self._nodes.get(name)
        return None if node is None or node.is_gone else node

    def sort(self) -> None:
        """Order the hosts by name; later ones come last."""
        self._nodes = dict(sorted(self._nodes.items(), key=lambda item: natural_order(item[0])))

    def usable(self) -> list[Node]:
        """Return the hosts that may get processes: all others reach them, and they reach all others.

        A host that cannot reach one that came before it is left out.
        """
        chosen: list[Node] = []
        for node in self.living():
            pairs = [pair for other in chosen for pair in ((node, other), (other, node))]
            if not node.is_leaving and all(a.dialed.get(b.facts.nonce) == "" for a, b in pairs):
                chosen.append(node)
        return chosen

    def unreachable(self) -> list[str]:
        """Return a sentence for each pair of hosts of which one does not reach the other."""
        living = list(self.living())
        return [
            f"host {a.name} ({a.facts.address}) cannot reach host {b.name} at {b.facts.address}:{b.facts.check_port}: "
            f"{a.dialed[b.facts.nonce]}"
            for a in living
            for b in living
            if a.dialed.get(b.facts.nonce)
        ]

    def pending(self) -> list[str]:
        """Return the pairs of hosts that have not been checked yet."""
        living = list(self.living())
        pairs = ((a, b) for a in living for b in living if a is not b)
        return [f"{a.name} to {b.name}" for a, b in pairs if b.facts.nonce not in a.dialed]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `n2` comes before `n10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def _dial(node: Node) -> Dial:
    return Dial(node.name, node.facts.nonce, node.facts.address, node.facts.check_port)
