"""A Ray cluster as the hosts of a run: one bundle of a placement group per host, one actor per process.

In each bundle a keeper actor holds the GPUs of its host; which process uses which of them is decided by the placement
of the run, not by Ray. The actor of a process owns it as the launcher owns a process on its own machine: the process
stops when its actor ends. The driver polls all actors: a host that does not answer for `LEASE_S` is lost, and an actor
that is not polled for as long kills its process.

Ray moves the bundle of a lost host to a free one, which is then listed. Of Headrace, only this module, `ray_actors`
and `ray_cluster` import Ray.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.config.launch import LaunchConfig, RayConfig
from headrace.launch.driver import Driver, Refused
from headrace.launch.errors import BadRequest, LaunchError
from headrace.launch.hosts.base import Host, HostProcess, ProcessSpec
from headrace.launch.hosts.nodes import open_driver
from headrace.launch.hosts.ray_actors import HOLD_S, POLL_S, HostKeeper, ProcessOwner
from headrace.launch.hosts.ray_cluster import connect, describe_shortage, import_ray, living_nodes, make_bundles
from headrace.launch.node import CANNOT_START
from headrace.launch.node_messages import LEASE_S, Join, ProcessState, Start
from headrace.launch.node_registry import natural_order
from headrace.launch.placement import Needs
from headrace.launch.process import GRACE_S
from headrace.transport.run_dir import RunDir

ADMIT_S = 2.0
"""Between two looks for hosts that have come since."""
PLACE_TIMEOUT_S = 15.0
"""For hosts that the cluster has; an autoscaling cluster may take as long as it needs to add them."""
ANSWER_TIMEOUT_S = 60.0
"""For the answer of an actor that Ray has to start first."""
NOTICE_S = 30.0
NODE_LABEL = "ray.io/node-id"
NODES_KEYS = "launch.trainer_nodes + launch.inference_nodes + launch.spare_nodes"


class RayHost:
    """A host of the run: a bundle on a node, and its keeper. `call`: the poll that is to be answered.

    `bundle`: the id of its placement group and its index there. Bundles on the same node have GPUs of their own.
    """

    def __init__(self, name: str, node: str, bundle: tuple[Any, int], keeper: Any, facts: Join) -> None:
        self.name, self.node, self.bundle, self.keeper, self.facts = name, node, bundle, keeper, facts
        self.is_lost = False
        self.answered_at = time.monotonic()
        self.poll()

    def poll(self) -> None:
        self.call = self.keeper.poll.remote()

    def receive(self, answer: None) -> None:
        self.answered_at = time.monotonic()
        self.poll()

    def lose(self, error: Exception) -> None:
        """Take an error instead of an answer: the node or the keeper has died."""
        self.is_lost = True

    @property
    def host(self) -> Host:
        return Host(self.name, self.facts.address, tuple(self.facts.gpus), self.facts.cores)


class RayProcess(HostProcess):
    """A process on a host of a Ray cluster. `host`: None if it is lost by now."""

    is_here = False

    def __init__(self, spec: ProcessSpec, log: Path, host: RayHost | None, owner: Any = None) -> None:
        super().__init__(spec, log)
        self._host, self._owner = host, owner
        self._ended_with: int | None = None
        self._owner_is_dead = self._was_killed_after_end = False
        if host is not None:
            self.poll()

    @property
    def exit_status(self) -> int | None:
        if self._ended_with is None and (self._host is None or self._host.is_lost):
            self.host_is_lost, self._ended_with = True, -signal.SIGKILL
        return self._ended_with

    def poll(self) -> None:
        self.call = self._owner.poll.remote()

    def receive(self, answer: ProcessState | None) -> None:
        """Take the state of the process; None: its actor has died, but not its host."""
        if answer is None:
            self._ended_with = -signal.SIGKILL
            return
        self.pid, self.peak_bytes, self._ended_with = answer.pid, answer.peak_bytes, answer.exit_status
        self.memory = answer.memory
        self.poll()

    def lose(self, error: Exception) -> None:
        """Take an error instead of an answer: the actor has died, alone or with its host, as its keeper knows."""
        assert self._host is not None
        if self._owner_is_dead:
            self._host.is_lost = True
        elif getattr(error, "actor_init_failed", False):
            self._ended_with = CANNOT_START
            with open(self.log, "a") as output:
                output.write(f"cannot be started: {error}\n")
        else:
            self._owner_is_dead = True
            self.call = self._host.keeper.kill_session.remote(self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        if self.running:
            self._owner.send_signal.remote(int(number))

    def kill(self) -> None:
        if self._owner is not None and not self._was_killed_after_end:
            self._was_killed_after_end = not self.running
            self._owner.kill.remote()


def open_hosts(launch: LaunchConfig, run: RunDir, needs: Needs) -> RayHosts:
    """Return the hosts of a run on the Ray cluster of its run file. Raises an error if Ray is not installed."""
    import_ray()
    nodes = max(1, needs.nodes)
    return RayHosts(open_driver(launch, run), launch.ray, needed=nodes, gpus_per_node=launch.gpus_per_node)


class RayHosts:
    """Implements `Hosts`. Closes the driver with itself.

    `needed`: the number of hosts; `gpus_per_node`: GPUs of each, None: all of them.
    """

    def __init__(self, driver: Driver, config: RayConfig, *, needed: int, gpus_per_node: int | None = None) -> None:
        self.driver, self._config, self._needed, self._gpus_per_node = driver, config, needed, gpus_per_node
        self.autoscaler = self if config.autoscaling else None
        self._groups: list[Any] = []
        """The hosts that the run needs, then groups of one host each that were added."""
        self._known: set[str] = set()
        """Nodes that the cluster had when the run started, or that were taken since."""
        self._names: Counter[str] = Counter()
        self._hosts: list[RayHost] = []
        """The living ones."""
        self._processes: list[RayProcess] = []
        self._lock = threading.Lock()
        """Guards groups, names, hosts and processes."""
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._has_connected = False

    def wait_until_ready(self) -> Sequence[Host]:
        self._has_connected = connect(self._config.address, self._config.runtime_env)
        self._place()
        for error in self._admit().values():
            raise error
        for work in (self._keep_polling, self._keep_admitting):
            self._threads.append(threading.Thread(target=work, name=work.__name__, daemon=True))
            self._threads[-1].start()
        return self.list()

    def _place(self) -> None:
        """Reserve the hosts. Raises `LaunchError` if the cluster does not have them."""
        from ray.util import placement_group

        started, said = time.monotonic(), -NOTICE_S
        nodes = living_nodes()
        self._known.update(node["NodeID"] for node in nodes)
        bundles = make_bundles([node["Resources"] for node in nodes], self._needed, self._gpus_per_node)
        self._groups.append(placement_group(bundles, strategy="STRICT_SPREAD"))
        while not self._groups[0].wait(1):
            waited = time.monotonic() - started
            problem = describe_shortage(bundles, living_nodes(), import_ray().available_resources())
            if not self._config.autoscaling and waited > PLACE_TIMEOUT_S:
                fix = "Lower it, set launch.gpus_per_node to GPUs that are free, or add hosts to the cluster."
                raise BadRequest(problem, key=NODES_KEYS, value=self._needed, fix=fix)
            if self._config.autoscaling and waited - said > NOTICE_S:
                said = waited
                self.driver.notify(f"waiting for the Ray cluster to add hosts: {problem}. `ray status` has its view")

    def _admit(self) -> dict[tuple[Any, int], LaunchError]:
        """Add the nodes of placed bundles to the hosts, by name. Return why those that do not fit are left out."""
        from ray.util import placement_group_table

        nodes = {node["NodeID"]: node for node in living_nodes()}
        with self._lock:
            hosts, groups = {host.bundle for host in self._hosts}, list(self._groups)
        placed = [
            (nodes[node], group, index)
            for group in groups
            for index, node in placement_group_table(group)["bundles_to_node_id"].items()
            if node in nodes and (group.id, index) not in hosts
        ]
        placed.sort(key=lambda bundle: natural_order(bundle[0]["NodeManagerHostname"]))
        names, errors = [], {}
        for node, _, _ in placed:  # names that no host of the run has had yet
            name = node["NodeManagerHostname"]
            self._names[name] += 1
            names.append(name if self._names[name] == 1 else f"{name}-{self._names[name]}")
        with ThreadPoolExecutor(max(1, len(placed))) as pool:
            checks = [pool.submit(self._check, name, *bundle) for name, bundle in zip(names, placed, strict=True)]
        for check, (_, group, index) in zip(checks, placed, strict=True):
            try:
                self._dial(host := check.result())
                with self._lock:
                    self._hosts.append(host)
            except LaunchError as error:
                errors[group.id, index] = error
        return errors

    def _check(self, name: str, node: Mapping[str, Any], group: Any, index: int) -> RayHost:
        """Start the keeper of a bundle, and have it describe its host. Raises `LaunchError`."""
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        gpus = group.bundle_specs[index].get("GPU", 0)
        actor = ray.remote(HostKeeper).options(num_cpus=0, num_gpus=gpus, max_concurrency=8, scheduling_strategy=where)
        try:
            keeper = actor.remote()
            described = keeper.describe.remote(self.driver.facts(), urlsplit(self.driver.url).hostname)
            facts = ray.get(described, timeout=ANSWER_TIMEOUT_S)
            for warning in self.driver.check(name, facts):
                self.driver.notify(warning)
        except Refused as error:
            raise LaunchError(str(error)) from error
        except ray.exceptions.RayError as error:
            raise LaunchError(f"host {name}: Headrace does not start in a process of Ray there: {error}") from error
        return RayHost(name, node["NodeID"], (group.id, index), keeper, facts)

    def _dial(self, host: RayHost) -> None:
        """Check that a host and the others reach each other. Raises `LaunchError`."""
        with self._lock:
            pairs = [pair for other in self._hosts for pair in ((host, other), (other, host))]
        ray = import_ray()
        try:
            answers = ray.get([a.keeper.dial.remote(b.facts) for a, b in pairs], timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"host {host.name}: it or another host was lost when it joined: {error}") from error
        for (a, b), problem in zip(pairs, answers, strict=True):
            if problem:
                where = f"{b.facts.address}:{b.facts.check_port}"
                raise LaunchError(f"host {a.name} ({a.facts.address}) cannot reach host {b.name} at {where}: {problem}")

    def _keep_admitting(self) -> None:
        """Reserve nodes that join the cluster, and admit the nodes of placed bundles, until `close`."""
        from ray.util import placement_group

        left_out: dict[tuple[Any, int], LaunchError] = {}
        while not self._is_closed.wait(ADMIT_S):
            # An autoscaling cluster adds nodes on demand, perhaps for others.
            for node in () if self._config.autoscaling else living_nodes():
                if node["NodeID"] not in self._known:
                    self._known.add(node["NodeID"])
                    bundles = make_bundles([node["Resources"]], 1, self._gpus_per_node)
                    on_node = [{NODE_LABEL: node["NodeID"]}]
                    self._groups.append(placement_group(bundles, bundle_label_selector=on_node))
            before, left_out = left_out, self._admit()
            for bundle in left_out.keys() - before.keys():
                self.driver.notify(f"{left_out[bundle]}; the host is left out")

    def request(self, servers: int, gpus: int) -> None:
        """Have the cluster add hosts like the largest of the run, each a group of its own, to be released alone."""
        from ray.util import placement_group, placement_group_table, remove_placement_group

        largest = self._groups[0].bundle_specs[0]
        per_host = max(1, int(largest.get("GPU", 0)) // max(1, gpus))
        with self._lock:
            coming = sum(len(group.bundle_specs) for group in self._groups) - len(self._hosts)
            missing = math.ceil(servers / per_host) - coming
            for group in self._groups[:0:-1]:
                if missing < 0 and placement_group_table(group)["state"] != "CREATED":
                    self._groups.remove(group)
                    remove_placement_group(group)
                    missing += 1
            self._groups += [placement_group([largest]) for _ in range(missing)]

    def release(self, hosts: Sequence[str]) -> None:
        from ray.util import remove_placement_group

        with self._lock:
            added = {group.id: group for group in self._groups[1:]}
            for host in [host for host in self._hosts if host.name in hosts and host.bundle[0] in added]:
                self._hosts.remove(host)
                self._groups.remove(added[host.bundle[0]])
                remove_placement_group(added[host.bundle[0]])  # ends its keeper, too
                self.driver.notify(f"host {host.name} is idle and was given back to the Ray cluster")

    def _keep_polling(self) -> None:
        """Poll hosts and processes until `close`."""
        ray = import_ray()
        while not self._is_closed.is_set():
            with self._lock:
                self._processes = [process for process in self._processes if process.running]
                polling: list[RayHost | RayProcess] = [*self._processes, *self._hosts]
            polled = {each.call: each for each in polling}
            answered = ray.wait(list(polled), timeout=HOLD_S)[0] if polled else []
            for call in answered:
                try:
                    polled[call].receive(ray.get(call))
                except ray.exceptions.ActorUnavailableError:  # a connection was lost: until the lease ends
                    polled[call].poll()
                except ray.exceptions.RayError as error:
                    polled[call].lose(error)
            self._drop_lost_hosts()
            if not answered:
                self._is_closed.wait(POLL_S)

    def _drop_lost_hosts(self) -> None:
        now = time.monotonic()
        with self._lock:
            for host in list(self._hosts):
                host.is_lost |= now - host.answered_at > LEASE_S
                if host.is_lost:
                    self._hosts.remove(host)
                    import_ray().kill(host.keeper)  # if it lives: its GPUs are free for the next one
                    self.driver.notify(f"host {host.name} is lost: {now - host.answered_at:.0f} s without an answer")

    def list(self) -> Sequence[Host]:
        with self._lock:
            return [host.host for host in self._hosts if not host.is_lost]

    def start(self, spec: ProcessSpec, log: Path) -> RayProcess:
        ray = import_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            host = next((host for host in self._hosts if spec.host in ("", host.name) and not host.is_lost), None)
            if host is None:
                return RayProcess(spec, log, None)
            where = NodeAffinitySchedulingStrategy(host.node, soft=False)
            actor = ray.remote(ProcessOwner).options(
                num_cpus=0, num_gpus=0, max_concurrency=4, scheduling_strategy=where
            )
            argv = [host.facts.python if word == sys.executable else word for word in spec.argv]
            command = Start(1, spec.name, argv, {**self.driver.env, **spec.env}, str(log.resolve()))
            self._processes.append(RayProcess(spec, log, host, actor.remote(command, os.getcwd())))
            return self._processes[-1]

    def free_port(self, host: str) -> int:
        ray = import_ray()
        with self._lock:
            keeper = next((each.keeper for each in self._hosts if each.name == host), None)
        try:
            assert keeper is not None
            return int(ray.get(keeper.free_port.remote(), timeout=LEASE_S))
        except (AssertionError, ray.exceptions.RayError) as error:
            raise LaunchError(f"host {host}: it is lost, or does not answer") from error

    def close(self) -> None:
        """Stop the processes that still run, release the hosts, and close the driver."""
        for process in (running := list(self._processes)):
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in running:
            process.wait(deadline - time.monotonic())
        self._is_closed.set()
        for thread in self._threads:
            thread.join()
        if self._has_connected:
            import_ray().shutdown()  # ends the actors, which end what still runs
        self.driver.close()
