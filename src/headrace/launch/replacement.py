"""Change the placement of a run that is running, after the loss of hosts and to add or remove servers. Pure.

`RunPlan` has the processes of the current placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from headrace.config.base import ConfigError
from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.placement import (
    Needs,
    Place,
    Placement,
    free_gpus,
    members_on,
    place,
    server_name,
    usable_hosts,
    with_orchestrator,
)
from headrace.launch.processes import needs_of, processes_of
from headrace.runfile.run import AnyRun
from headrace.transport.endpoint import PAST_SERVER
from headrace.transport.journal_files import HOSTS_VAR
from headrace.transport.run_dir import RunDir


def place_again(placement: Placement, hosts: Sequence[Host], needs: Needs) -> Placement:
    """Place a run on the hosts that are left. What runs on them stays where it is, except for the trainer.

    If one of its hosts is lost, the trainer's group is formed again as a whole: on its other hosts and spare ones, then
    on any idle GPUs, with fewer ranks if there is no room for all. Servers of lost hosts move to idle GPUs; those that
    find none are left out until there is room.
    """
    usable, names = usable_hosts(hosts, needs), {host.name for host in hosts}
    staying = [place for place in placement.places if place.host in names]
    if not set(placement.trainer) <= set(staying):
        staying = [place for place in staying if place.role != "trainer"]
        staying += _form_trainer(placement, usable, staying, needs)
    left_out: list[Place] = []
    lost = [server for server in placement.servers if server.host not in names]
    for server in sorted([*lost, *placement.left_out], key=lambda server: server.number):
        moved = _find_room(server, usable, staying, len(server.gpus))
        (left_out if moved is None else staying).append(moved or server)
    if needs.has_servers and not any(place.role == "inference" and place.name != PAST_SERVER for place in staying):
        fact = f"no host that is left has {needs.gpus_per_server} idle GPUs for a server"
        raise ConfigError(fact, key="launch.spare_nodes", value=needs.spare_nodes, fix="Add a host.")
    again = Placement(tuple(hosts), _in_order(staying), tuple(left_out))
    return with_orchestrator(again) if needs.has_orchestrator and again.orchestrator is None else again


def scale(placement: Placement, hosts: Sequence[Host], needs: Needs, servers: int, may_wait: bool = False) -> Placement:
    """Return the placement with this number of servers: more on idle GPUs, or without those of the highest numbers.

    Servers without room are left out until a host has come, if they may wait for one, else an error.
    """
    kept = sorted(placement.servers, key=lambda server: server.number)[: max(0, servers)]
    if len(kept) < needs.least_servers:
        fact = "a run needs a server" + (", and one of its past policy" if needs.has_past_server else "")
        fix = f"Set it to at least {needs.least_servers}."
        raise ConfigError(fact, key="--inference", value=servers, fix=fix)
    first, staying = kept[0], [place for place in placement.places if place.role != "inference" or place in kept]
    left_out: list[Place] = []
    while len(kept) + len(left_out) < servers:
        number = next(number for number in count() if number not in {server.number for server in (*kept, *left_out)})
        new = replace(first, name=server_name(number), port=first.port and first.port + number - first.number)
        placed = _find_room(new, usable_hosts(hosts, needs), staying, len(first.gpus))
        if placed is None and may_wait:
            left_out.append(new)
            continue
        if placed is None:
            fact = f"a server takes {len(first.gpus)} GPUs, and idle ones are left for {len(kept)} servers in all"
            fix = f"Lower it to {len(kept)}, or add a host."
            raise ConfigError(fact, key="--inference", value=servers, fix=fix)
        kept.append(placed)
        staying.append(placed)
    return Placement(tuple(hosts), _in_order(staying), tuple(left_out))


def _form_trainer(placement: Placement, hosts: Sequence[Host], staying: Sequence[Place], needs: Needs) -> list[Place]:
    """Return the members of a new group: on the group's hosts that are left, spare ones, and any others with room."""
    on_gpus, ranks = placement.trains_on_gpus, needs.trainer_processes or placement.ranks
    before, computing = (
        [member.host for member in placement.trainer],
        {p.host for p in staying if p.role == "inference"},
    )
    with_room = [(host, free_gpus(host, staying)) for host in hosts]
    with_room = [(host, gpus if on_gpus else ()) for host, gpus in with_room if gpus or not on_gpus]
    order = sorted(with_room, key=lambda room: (room[0].name not in before, room[0].name in computing, -len(room[1])))
    chosen: list[tuple[str, tuple[str, ...]]] = []
    for host, gpus in order:
        room = sum(len(free) or ranks for _, free in chosen)
        is_spare = host.name not in computing
        if room < ranks or (is_spare and len(chosen) < len(before)):
            chosen.append((host.name, gpus))
    if not chosen:
        fact = "no host that is left has an idle GPU for the trainer"
        raise ConfigError(fact, key="launch.spare_nodes", value=needs.spare_nodes, fix="Add a host.")
    return members_on(chosen, min(ranks, sum(len(gpus) or ranks for _, gpus in chosen)))


def _find_room(server: Place, hosts: Sequence[Host], staying: Sequence[Place], gpus: int) -> Place | None:
    """Return a server on the host with room that has the fewest processes; None if no host has room."""
    free = [(host.name, free_gpus(host, staying)[:gpus]) for host in hosts]
    fitting = [(name, idle) for name, idle in free if len(idle) == gpus]
    if not fitting:
        return None

    def load(host: str) -> int:
        return sum(place.ranks for place in staying if place.host == host and place.role != "orchestrator")

    name, idle = min(fitting, key=lambda room: load(room[0]))
    return replace(server, host=name, gpus=idle)


def _in_order(places: Sequence[Place]) -> tuple[Place, ...]:
    """Sort processes in the order of their start."""
    roles = ("inference", "trainer", "orchestrator")
    return tuple(sorted(places, key=lambda place: (roles.index(place.role), place.number)))


class RunPlan:
    """Implements `fleet.Plan`. `env`: environment variables of all processes."""

    def __init__(
        self,
        config: AnyRun,
        run: RunDir,
        hosts: Sequence[Host],
        *,
        resume: bool,
        max_running: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._config, self._run, self._env = config, run, env or {}
        self._resume, self._max_running = resume, max_running
        self._needs = needs_of(config)
        self.placement = place(hosts, self._needs)

    def specs(self) -> list[ProcessSpec]:
        specs = processes_of(
            self._config, self._run, self.placement, resume=self._resume, max_running=self._max_running
        )
        env = {**self._env, HOSTS_VAR: str(len(self.placement.hosts))}
        return [replace(spec, env={**env, **spec.env}) for spec in specs]

    def move(self, hosts: Sequence[Host]) -> list[ProcessSpec]:
        self.placement = place_again(self.placement, hosts, self._needs)
        return self.specs()

    def scale(self, hosts: Sequence[Host], servers: int, may_wait: bool) -> list[ProcessSpec]:
        self.placement = scale(self.placement, hosts, self._needs, servers, may_wait)
        return self.specs()

    @property
    def left_out(self) -> Sequence[Place]:
        return self.placement.left_out
