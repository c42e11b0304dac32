"""Place the processes of a run on hosts and GPUs. Pure: the same hosts and needs always give the same placement.

One host divides its GPUs between servers and trainer. Of several hosts each either trains or samples, the larger ones
train unless hosts are meant for it; hosts without GPUs can train and sample only if no host has one. The rest is idle:
spare hosts. A server does not span hosts. Environment workers are not placed: they are children of the orchestrator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from headrace.config.base import ConfigError
from headrace.launch.hosts.base import Host, HostRole
from headrace.transport.endpoint import PAST_SERVER

PARALLEL = "inference.vllm tensor_parallel_size * data_parallel_size"
"""The keys that make a server take several GPUs."""

Role = Literal["inference", "trainer", "orchestrator"]
ORDER: tuple[HostRole, ...] = ("trainer", "", "inference", "spare")
"""The order in which hosts are taken by what they are meant for: first to train, then to sample."""
Sharing = Literal["alternate", "overlap"]
"""How trainer and servers use one GPU: in turns, or at the same time."""


@dataclass(frozen=True)
class Needs:
    """What a run asks for; None: chosen from the hosts."""

    trainer_processes: int | None = None
    """Ranks on all hosts together."""
    inference_gpus: int | None = None
    inference_servers: int | None = None
    gpus_per_server: int = 1
    trainer_nodes: int | None = None
    inference_nodes: int | None = None
    gpus_per_node: int | None = None
    """GPUs that are used of each host; hosts with fewer neither train nor sample."""
    spare_nodes: int = 0
    has_servers: bool = True
    has_orchestrator: bool = True
    has_past_server: bool = False
    """One of the servers has the run's past policy, and does not sample."""
    port: int = 0
    """Server number n listens on port + n; 0: on any free port."""

    @property
    def least_servers(self) -> int:
        return 1 + self.has_past_server

    @property
    def nodes(self) -> int:
        """The number of hosts that train, sample or are spare, at least. One host can train and sample."""
        if not self.has_servers:
            return (self.trainer_nodes or 1) + self.spare_nodes
        trainer, inference = self.trainer_nodes, self.inference_nodes
        shares_host = None in (trainer, inference) and (trainer or 1) == (inference or 1) == 1
        return (1 if shares_host else (trainer or 1) + (inference or 1)) + self.spare_nodes


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    name: str
    role: Role
    host: str
    gpus: tuple[str, ...] = ()
    ranks: int = 1
    """Trainer ranks on this host."""
    node_rank: int = 0
    """The position of this host among those of the trainer."""
    port: int = 0
    """The port of a server; 0: any free one."""

    @property
    def number(self) -> int:
        """The number of a server or of a member of the trainer's group."""
        return int(self.name.partition("-")[2] or 0)


@dataclass(frozen=True)
class Placement:
    """The processes of a run in the order of their start: servers, trainer, orchestrator."""

    hosts: tuple[Host, ...]
    places: tuple[Place, ...]
    left_out: tuple[Place, ...] = ()
    """Servers without a host that has room: theirs was lost, or they were added and wait for one."""

    @property
    def servers(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.role == "inference")

    @property
    def trainer(self) -> tuple[Place, ...]:
        """The members of the trainer's group, one per host, in the order of their node ranks."""
        return tuple(place for place in self.places if place.role == "trainer")

    @property
    def orchestrator(self) -> Place | None:
        return next((place for place in self.places if place.role == "orchestrator"), None)

    @property
    def ranks(self) -> int:
        return sum(member.ranks for member in self.trainer)

    @property
    def trains_on_gpus(self) -> bool:
        return any(member.gpus for member in self.trainer)

    @property
    def shares_gpu(self) -> bool:
        """Whether a server samples on a GPU of the trainer."""
        trained = {(member.host, gpu) for member in self.trainer for gpu in member.gpus}
        return any((server.host, gpu) in trained for server in self.servers for gpu in server.gpus)

    def sharing(self, wanted: Sharing | None, *, trainer_waits: bool) -> Sharing | None:
        """Return how one rank and the servers share their device, or None. Alternation needs a trainer that waits."""
        if self.shares_gpu:
            return wanted or ("alternate" if trainer_waits else "overlap")
        computing = [*self.trainer, *self.servers]
        on_cpus = self.servers and not self.trains_on_gpus and self.ranks == 1
        together = len({place.host for place in computing}) == 1
        return wanted if on_cpus and together and wanted == "alternate" else None

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def on(self, host: str) -> list[Place]:
        return [place for place in self.places if place.host == host]

    @property
    def idle(self) -> dict[str, tuple[str, ...]]:
        """The GPUs without a process, by host; a host without any process is listed even if it has no GPU."""
        idle = {host.name: free_gpus(host, self.places) for host in self.hosts}
        return {name: gpus for name, gpus in idle.items() if gpus or not self.on(name)}

    def threads(self, place: Place, configured: int | None = None) -> int:
        """Return the CPU threads of a server, or of each rank.

        A host's cores are divided: one half for the trainer and one for the servers, or all cores for one of them if
        no other process of the run is there. OpenMP's threads wait for each other, so that one busy core would stall
        all of them.
        """
        if place.role == "orchestrator":
            return 1
        processes = self.on(place.host)
        cores = self.host(place.host).cores
        cores = cores if all(other.role == place.role for other in processes) else max(1, cores // 2)
        return configured or max(1, cores // sum(other.ranks for other in processes if other.role == place.role))


def place(hosts: Sequence[Host], needs: Needs) -> Placement:
    """Place a run. Unset numbers are chosen so that trainer and servers get half of the GPUs, or of the hosts, each."""
    usable = usable_hosts(hosts, needs)
    if len(usable) < max(1, needs.nodes):
        raise _too_few_hosts(hosts, len(usable), needs)
    trainer_first = sorted(usable, key=lambda host: (ORDER.index(host.role), -len(host.gpus)))
    active = trainer_first[: len(usable) - needs.spare_nodes]
    if len(active) > 1:
        placed = _place_on_several(active, needs)
    elif needs.has_servers:
        placed = _place_on_one(active[0], needs)
    else:
        placed = _place_trainer_on_one(active[0], needs)
    placement = Placement(tuple(hosts), tuple(placed))
    if needs.has_servers and len(placement.servers) < needs.least_servers:
        fact = "one server samples, and one has the run's past policy, for a teacher or a kl.reference"
        fix = f"Raise it to {needs.least_servers} or more, with as many GPUs for inference if there are any."
        raise ConfigError(fact, key="launch.inference_servers", value=len(placement.servers), fix=fix)
    return with_orchestrator(placement) if needs.has_orchestrator else placement


def usable_hosts(hosts: Sequence[Host], needs: Needs) -> list[Host]:
    """Return the hosts that can train and sample, with the GPUs that they may use for it."""
    hosts = [host for host in hosts if host.role != "orchestrator"]
    if (wanted := needs.gpus_per_node) is not None:
        return [replace(host, gpus=host.gpus[:wanted]) for host in hosts if len(host.gpus) >= wanted]
    return [host for host in hosts if host.gpus] or list(hosts)


def _too_few_hosts(hosts: Sequence[Host], usable: int, needs: Needs) -> ConfigError:
    """Return an error with the number that can be lowered so that the hosts are enough."""
    excess, numbers = max(1, needs.nodes) - usable, "a host is needed"
    if needs.nodes > 1:
        parts = {"trainer": needs.trainer_nodes or 1, "inference": needs.inference_nodes, "spare": needs.spare_nodes}
        named = ", ".join(f"{number} {name}" for name, number in parts.items() if number)
        numbers = f"{needs.nodes} hosts are needed ({named})"
    have = f"{usable} of {len(hosts)} can train and sample" if usable < len(hosts) else f"{usable} take part"
    if (wanted := needs.gpus_per_node) is not None:
        sizes = sorted((len(host.gpus) for host in hosts), reverse=True)
        if small := ", ".join(f"{host.name} has {len(host.gpus)}" for host in hosts if len(host.gpus) < wanted):
            have = f"{usable} of {len(hosts)} have {wanted} GPUs: {small}"
        if len(sizes) >= needs.nodes and (fitting := sizes[needs.nodes - 1]):
            fix = f"Lower it to {fitting}, or use other hosts."
            return ConfigError(f"{numbers}, but {have}", key="launch.gpus_per_node", value=wanted, fix=fix)
    for key, least in (("spare_nodes", 0), ("trainer_nodes", 1), ("inference_nodes", 1)):
        value = getattr(needs, key)
        if value is not None and value - excess >= least:
            fix = f"Lower it to {value - excess}, or add {excess} hosts."
            return ConfigError(f"{numbers}, but {have}", key=f"launch.{key}", value=value, fix=fix)
    return ConfigError(
        f"{numbers}, but {have}", key="launch", fix=f"Add {excess} hosts, with GPUs if others have some."
    )


def _place_trainer_on_one(host: Host, needs: Needs) -> list[Place]:
    """Place a trainer without servers: one rank per GPU unless configured."""
    gpus, ranks = host.gpus, needs.trainer_processes
    if gpus and ranks is not None and ranks > len(gpus):
        fact = f"each needs a GPU, but {len(gpus)} are visible"
        fix = f"Lower it to {len(gpus)}, or leave it out."
        raise ConfigError(fact, key="launch.trainer_processes", value=ranks, fix=fix)
    ranks = ranks or max(1, len(gpus))
    return [Place("trainer", "trainer", host.name, gpus[:ranks], ranks)]


def _place_on_one(host: Host, needs: Needs) -> list[Place]:
    """Divide the GPUs of one host between servers and trainer; all processes share a single GPU."""
    gpus, each, training = host.gpus, needs.gpus_per_server, needs.trainer_processes
    if not gpus:
        _refuse_gpus(needs)
        servers = _servers([host] * (needs.inference_servers or needs.least_servers), 0, needs)
        return [*servers, Place("trainer", "trainer", host.name, (), training or 1)]
    if len(gpus) == 1:
        if each > 1:
            raise ConfigError(f"a server takes {each} GPUs, but one is visible", key=PARALLEL, fix="Lower it to 1.")
        if (training or 1) > 1 or (needs.inference_gpus or 1) > 1:
            fix = "Set trainer_processes and inference_gpus to 1, or leave them out."
            raise ConfigError("one GPU is visible, which trainer and inference share", key="launch", fix=fix)
        shared = _servers([host] * (needs.inference_servers or needs.least_servers), 0, needs)
        return [*(replace(server, gpus=gpus) for server in shared), Place("trainer", "trainer", host.name, gpus)]
    if needs.inference_gpus:
        sampling = needs.inference_gpus
    elif training is not None:  # what the trainer leaves, in whole servers
        sampling = (len(gpus) - training) // each * each
    else:
        sampling = max(1, len(gpus) // 2 // each) * each
    training = training or len(gpus) - sampling
    if sampling < 1 or training < 1 or sampling + training > len(gpus):
        raise _too_few_gpus(len(gpus), needs)
    _refuse_other_servers(needs, sampling)
    servers = _servers([host] * (sampling // each), each, needs)
    return [*servers, Place("trainer", "trainer", host.name, gpus[sampling : sampling + training], training)]


def _too_few_gpus(visible: int, needs: Needs) -> ConfigError:
    """Return an error with the number that can be lowered so that the GPUs of one host are enough."""
    each, training, sampling = needs.gpus_per_server, needs.trainer_processes, needs.inference_gpus
    if each >= visible:
        fact = f"a server takes {each} GPUs and the trainer one, but {visible} are visible"
        return ConfigError(fact, key=PARALLEL, value=each, fix=f"Lower it to {visible - 1}.")
    left = visible - (sampling or each)
    if training is None or left < 1:
        fact, fix = (
            f"{visible} GPUs are visible, and the trainer takes one",
            f"Lower it to {(visible - 1) // each * each}.",
        )
        return ConfigError(fact, key="launch.inference_gpus", value=sampling, fix=fix)
    fact = f"each needs a GPU, but {visible} are visible, and inference takes {sampling or each}"
    return ConfigError(fact, key="launch.trainer_processes", value=training, fix=f"Lower it to {left}.")


def _refuse_gpus(needs: Needs) -> None:
    if needs.inference_gpus:
        fact = "no GPU is visible"
        raise ConfigError(fact, key="launch.inference_gpus", value=needs.inference_gpus, fix="Leave it out.")


def _refuse_other_servers(needs: Needs, sampling: int) -> None:
    """Raise `ConfigError` if the GPUs for inference are not those of whole servers, or of another number of them."""
    each, servers = needs.gpus_per_server, needs.inference_servers
    if sampling % each:
        fact = f"a server takes {each} GPUs ({PARALLEL})"
        raise ConfigError(fact, key="launch.inference_gpus", value=sampling, fix=f"Set it to a multiple of {each}.")
    if servers not in (None, sampling // each):
        fact = f"{sampling} inference_gpus make {sampling // each} servers of {each} GPUs each"
        raise ConfigError(fact, key="launch.inference_servers", value=servers, fix="Leave it out.")


def _place_on_several(hosts: Sequence[Host], needs: Needs) -> list[Place]:
    """Place servers and trainer on hosts of their own. `hosts`: those that train if they can come first."""
    training, sampling = _divide(hosts, needs)
    orders = [(hosts[:training], hosts[training : training + sampling])]
    if sampling:  # a server may need one of the largest hosts
        orders.append((hosts[sampling : sampling + training], hosts[:sampling]))
    errors = []
    for trainer, inference in orders:
        try:
            return [*_place_servers(inference, needs), *_place_trainer(trainer, needs)]
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _divide(hosts: Sequence[Host], needs: Needs) -> tuple[int, int]:
    """Return the numbers of hosts that train and that sample. A host without GPUs counts as one with one GPU."""
    sizes = [len(host.gpus) or 1 for host in hosts]
    training, sampling = needs.trainer_nodes, needs.inference_nodes

    def fewest(sizes: Sequence[int], wanted: int, most: int) -> int:
        return min(next((number for number, room in enumerate(accumulate(sizes), 1) if room >= wanted), most), most)

    if not needs.has_servers:
        return training or fewest(sizes, needs.trainer_processes or sum(sizes), len(hosts)), 0
    if training is None and needs.trainer_processes is not None:
        training = fewest(sizes, needs.trainer_processes, len(hosts) - (sampling or 1))
    wanted = needs.inference_gpus or (needs.inference_servers or 0) * needs.gpus_per_server
    if sampling is None and wanted:
        sampling = fewest(sizes[::-1], wanted, len(hosts) - (training or 1))
    if sampling is None:
        sampling = len(hosts) - training if training else len(hosts) // 2
    return training or len(hosts) - sampling, sampling


def _place_trainer(hosts: Sequence[Host], needs: Needs) -> list[Place]:
    gpus = sum(len(host.gpus) for host in hosts)
    ranks = needs.trainer_processes or gpus or len(hosts)
    if ranks < len(hosts):
        fact, fix = f"{len(hosts)} trainer_nodes take a rank each at least", f"Raise it to {len(hosts)}."
        raise ConfigError(fact, key="launch.trainer_processes", value=ranks, fix=fix)
    if gpus and ranks > gpus:
        fact = f"each needs a GPU, and {len(hosts)} trainer_nodes have {gpus}"
        fix = f"Lower it to {gpus}, or raise launch.trainer_nodes."
        raise ConfigError(fact, key="launch.trainer_processes", value=ranks, fix=fix)
    return members_on([(host.name, host.gpus) for host in hosts], ranks)


def _place_servers(hosts: Sequence[Host], needs: Needs) -> list[Place]:
    if not hosts:
        return []
    each = needs.gpus_per_server if (most := max(len(host.gpus) for host in hosts)) else 0
    if each:
        rooms = [len(host.gpus) // each for host in hosts]
        if not any(rooms):
            fact = f"a server does not span hosts, and the largest one for inference has {most} GPUs"
            raise ConfigError(fact, key=PARALLEL, value=each, fix=f"Lower it to {most}.")
        if needs.inference_gpus is not None:
            _refuse_other_servers(needs, needs.inference_gpus)
        servers = needs.inference_servers or (needs.inference_gpus or 0) // each or sum(rooms)
    else:
        _refuse_gpus(needs)
        servers = needs.inference_servers or max(len(hosts), needs.least_servers)
        rooms = [servers] * len(hosts)
    if servers > sum(rooms):
        key, unit = ("inference_servers", 1) if needs.inference_servers else ("inference_gpus", each)
        fact = f"{len(hosts)} inference_nodes have room for {sum(rooms)} servers of {each} GPUs each"
        fix = f"Lower it to {sum(rooms) * unit}, or raise launch.inference_nodes."
        raise ConfigError(fact, key=f"launch.{key}", value=servers * unit, fix=fix)
    counts = _spread(servers, rooms)
    if not all(counts) and needs.inference_nodes is not None:
        used = sum(number > 0 for number in counts)
        fact = f"{servers} servers of {max(1, each)} GPUs each run on {used} hosts"
        fix = f"Lower it to {used}, or start more servers."
        raise ConfigError(fact, key="launch.inference_nodes", value=needs.inference_nodes, fix=fix)
    return _servers([host for host, number in zip(hosts, counts, strict=True) for _ in range(number)], each, needs)


def _servers(hosts: Sequence[Host], each: int, needs: Needs) -> list[Place]:
    """Return one server for each entry of `hosts`, on the next `each` GPUs of that host."""
    servers: list[Place] = []
    for number, host in enumerate(hosts):
        gpus = free_gpus(host, servers)[:each]
        port = needs.port and needs.port + number
        name = PAST_SERVER if needs.has_past_server and number == 1 else server_name(number)
        servers.append(Place(name, "inference", host.name, gpus, port=port))
    return servers


def server_name(number: int) -> str:
    return f"inference-{number}" if number else "inference"


def members_on(hosts: Sequence[tuple[str, tuple[str, ...]]], ranks: int) -> list[Place]:
    """Divide ranks evenly over hosts, given with their free GPUs; hosts without any rank are left out."""
    counts = _spread(ranks, [len(gpus) or ranks for _, gpus in hosts])
    used = [(name, gpus, number) for (name, gpus), number in zip(hosts, counts, strict=True) if number]
    return [
        Place(f"trainer-{rank}" if rank else "trainer", "trainer", name, gpus[:number], number, rank)
        for rank, (name, gpus, number) in enumerate(used)
    ]


def _spread(total: int, rooms: Sequence[int]) -> list[int]:
    """Divide a number as evenly as the rooms allow, the first ones first."""
    counts = [0] * len(rooms)
    for _ in range(total):
        free = [index for index, room in enumerate(rooms) if counts[index] < room]
        counts[min(free, key=lambda index: counts[index])] += 1
    return counts


def free_gpus(host: Host, places: Sequence[Place]) -> tuple[str, ...]:
    used = {gpu for place in places if place.host == host.name for gpu in place.gpus}
    return tuple(gpu for gpu in host.gpus if gpu not in used)


def with_orchestrator(placement: Placement) -> Placement:
    """Add the orchestrator: to a host meant for it, or without ranks and servers, else to that with most free cores."""

    def rank(host: Host) -> tuple[bool, bool, int]:
        processes = sum(place.ranks for place in placement.on(host.name))
        return host.role != "orchestrator", processes > 0, processes - host.cores

    host = min(placement.hosts, key=rank)
    return replace(placement, places=(*placement.places, Place("orchestrator", "orchestrator", host.name)))
