"""A cluster on a simulated clock: hosts, links, the processes of a run, and what goes wrong with them.

Real are the supervisor, the orchestrator with its pipeline, dispatcher, engine client and pool, the weight watcher, the
journal and all files of the run directory. Simulated are hosts, network, engines and the trainer's computation.
Failures come from a seed. `World.play` plays a run to its end; `find_violations` checks its journal in two ways.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from headrace.inference.client.pool import RetryState
from headrace.launch.hosts.base import HostRole
from headrace.launch.hosts.nodes import NodeHosts
from headrace.launch.node_messages import LEASE_S
from headrace.launch.replacement import RunPlan
from headrace.launch.supervisor import Supervisor
from headrace.orchestrator import audit
from headrace.orchestrator.pipeline import Pipeline
from headrace.rollout.batch import Batch
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import read_marker
from tests.simulation.network import Link, Network, SimulatedHost, SimulatedHttp
from tests.simulation.processes import REPORT_S, NodeAgent, SimulatedDisk, SimulatedDriver, SimulatedProcess, current
from tests.simulation.servers import Server
from tests.simulation.settings import Counters, Result, Settings
from tests.simulation.virtual_time import START_S, VirtualLoop, virtual_time

ENV = "simulated"
SUPERVISOR_POLL_S = 1.0


class _Silent:
    """A view that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, message: str) -> None:
        self.messages.append(f"{time.monotonic():.0f} {message}")

    def show(self, *args: object) -> None:
        """Show nothing."""

    close = show


class World:
    def __init__(self, settings: Settings, directory: Path, seed: int) -> None:
        self.settings, self.run, self.rng = settings, RunDir(directory), random.Random(seed)
        self.loop = VirtualLoop()
        sites = {"here": Link(), "far": settings.far_link}
        self.network = Network(self.loop, self.rng, sites)
        self.hosts: dict[str, SimulatedHost] = {}
        self.processes: dict[str, SimulatedProcess] = {}
        self.view = _Silent()
        self.errors: list[str] = []
        """Tracebacks of processes that failed."""
        self.retried = 0
        self.kills: Counter[str] = Counter()
        self.batches: dict[int, list[tuple[int, ...]]] = {}
        """By step, the draws of each batch that was trained."""
        self.staleness: dict[int, float] = {}
        self.trained_at: dict[int, float] = {}
        """By step, when it was first trained."""
        self._servers: list[Server] = []
        self._training_s = 0.0
        self._start = self._end = Counters()
        self._uplink_free_at = 0.0
        self._checksums: dict[Path, str] = {}
        self.trained = asyncio.Event()
        """Set when the last step is trained."""
        self._make_hosts()

    def _make_hosts(self) -> None:
        settings = self.settings
        roles: dict[HostRole, int] = {
            "inference": settings.hosts, "trainer": settings.trainer_hosts, "orchestrator": 1, "spare": settings.spares
        }  # fmt: skip
        for role, count in roles.items():
            for number in range(count):
                gpus = tuple(map(str, range(0 if role == "orchestrator" else settings.gpus_per_host)))
                self.hosts[f"{role}-{number}"] = SimulatedHost(f"{role}-{number}", gpus, role)
        serving = self.serving_hosts()
        for host in self.rng.sample(serving, round(settings.slow_share * len(serving))):
            host.slowness = settings.slowness
        for host in serving[: round(settings.far_share * len(serving))]:
            host.site = "far"

    def serving_hosts(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.role == "inference"]

    # -- the run --------------------------------------------------------------------------------------------------

    def play(self) -> Result:
        """Play the run to its end."""
        began = time.perf_counter()
        with virtual_time(self.loop), self._simulated():
            for _, at, kind in sorted(self._failures(), key=lambda failure: failure[1]):
                self.loop.call_at(self.loop.time() + at, self._fail, kind)
            self._start_agents()
            hosts = NodeHosts(self.driver, needed=len(self.hosts) - 1)  # type: ignore[arg-type]
            plan = RunPlan(self._config(), self.run, hosts.wait_until_ready(), resume=False)
            limits = self._config().launch
            Supervisor(
                plan,
                hosts,
                self.run,
                self.view,
                start_timeout=limits.start_timeout,
                stop_timeout=limits.stop_timeout,
                max_restarts=limits.max_restarts,
            ).run()
        return self._result(time.perf_counter() - began)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        world, fail = self, RetryState.fail

        def counted(retries: RetryState, *args: Any) -> None:
            world.retried += 1
            fail(retries, *args)

        def make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(work, loop=loop, **options)
            process = current.get(None)
            if process is not None:
                process.tasks[task] = None
                task.add_done_callback(lambda task: process.tasks.pop(task, None))
            return task

        self.loop.set_task_factory(make_task)
        with ExitStack() as stack:
            for target, stand_in in (
                ("headrace.orchestrator.orchestrator.ThreadPoolExecutor", SimulatedDisk),
                ("headrace.inference.client.engine_client.HttpClient", lambda: SimulatedHttp(self.network)),
                ("headrace.launch.supervisor.POLL_S", SUPERVISOR_POLL_S),
                ("headrace.inference.client.pool.RetryState.fail", counted),
                # Otherwise leases are renewed in a thread, in real time.
                ("headrace.transport.epochs.Epoch._renew_until_released", lambda epoch: None),
            ):
                stack.enter_context(mock.patch(target, stand_in))
            level = logging.root.manager.disable
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, level)
            yield

    def _start_agents(self) -> None:
        from tests.simulation.programs import orchestrate, serve, train

        self.programs = {"serve": serve, "trainer": train, "orchestrator": orchestrate}
        self.driver = SimulatedDriver(self)
        for host in self.hosts.values():
            self.loop.create_task(NodeAgent(self, host).run())

    def _config(self) -> RunConfig:
        settings = self.settings
        launch = {
            "on": "nodes",
            "trainer_nodes": settings.trainer_hosts,
            "inference_nodes": settings.hosts,
            "spare_nodes": settings.spares,
            "max_restarts": settings.max_restarts,
        }
        tree = {
            "output_dir": str(self.run.root),
            "max_steps": settings.max_steps,
            "seq_len": 64,
            "model": {"name": "simulated"},
            "orchestrator": {"train": {"env": [{"id": ENV, "name": ENV}]}},
            "launch": launch,
        }
        return validate(RunConfig, tree, "simulation")[0]

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def _failures(self) -> Iterator[tuple[int, float, str]]:
        settings = self.settings
        expected_s = settings.max_steps * settings.batch_size / settings.ideal_rollouts_per_second()
        first = 2 * settings.server_start_s
        for number in range(settings.kills):
            kind = self.rng.choices(list(settings.kinds), list(settings.kinds.values()))[0]
            yield number, first + (number + self.rng.random()) * expected_s / settings.kills, kind
        if settings.partition_share:
            yield settings.kills, first + expected_s / 2, "partition"

    def _fail(self, kind: str) -> None:
        settings, serving = self.settings, self.serving_hosts()
        self.kills[kind] += 1
        match kind:
            case "server":
                for process in self.rng.sample(live := self._live("serve"), min(1, len(live))):
                    process.end(-signal.SIGKILL)
            case "trainer":
                for process in self.rng.sample(live := self._live("trainer"), min(1, len(live))):
                    process.end(-signal.SIGKILL)
            case "orchestrator":
                for process in self._live("orchestrator"):
                    self._kill_orchestrator(process)
            case "host":
                self._power_off(self.rng.choice([host for host in self.hosts.values() if host.up]))
            case "link":
                self.network.partition([self.rng.choice(serving)], self.rng.uniform(2.0, 2 * LEASE_S))
            case "partition":
                count = round(settings.partition_share * len(serving))
                self.network.partition(self.rng.sample(serving, count), settings.partition_s)

    def _live(self, program: str) -> list[SimulatedProcess]:
        return [p for p in self.processes.values() if p.alive and p.program == program]

    def _kill_orchestrator(self, process: SimulatedProcess) -> None:
        """Kill it now, or in the middle of its next commit."""
        process.dies_in_write = self.rng.choice(["", "before", "after"])
        self.loop.call_later(5.0 if process.dies_in_write else 0.0, process.end, -signal.SIGKILL)

    def _power_off(self, host: SimulatedHost) -> None:
        host.up = False
        for process in self.processes.values():
            if process.host is host:
                process.end(-signal.SIGKILL)
        self.loop.call_later(self.settings.reboot_s, self._boot, host)

    def _boot(self, host: SimulatedHost) -> None:
        host.up = True
        self.network.reset_connections(host)

    # -- what processes use and report ----------------------------------------------------------------------------

    async def load(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.rng.uniform(0.75, 1.25))

    async def fetch_weights(self, host: SimulatedHost) -> None:
        now, size = self.loop.time(), self.settings.weights_bytes
        self._uplink_free_at = max(self._uplink_free_at, now) + size / self.settings.uplink
        await asyncio.sleep(self._uplink_free_at - now)
        await self.network.cross(host, size)

    def checksum(self, weights: Path) -> str:
        if weights not in self._checksums:
            self._checksums[weights] = read_marker(weights).checksum
        return self._checksums[weights]

    def on_server_start(self, server: Server) -> None:
        self._servers.append(server)

    def on_server_end(self, server: Server) -> None:
        server.close()
        del self.network.servers[server.url]

    def on_orchestrator(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    async def collective(self) -> None:
        """Wait until all members of the trainer's group are up; if one has ended, until the group is killed."""
        while not all(member.is_up for member in self._members()):
            await asyncio.sleep(REPORT_S)
        if not all(member.alive for member in self._members()):
            await asyncio.Event().wait()

    def _members(self) -> list[SimulatedProcess]:
        """Return the processes of the trainer's group, which may have been formed again with fewer."""
        trainers = [process for process in self.processes.values() if process.program == "trainer"]
        return [process for process in trainers if process.node_rank < self.processes["trainer"].nodes]

    def on_trained(self, step: int, batch: Batch) -> None:
        self._training_s += self.settings.step_s
        self.batches.setdefault(step, []).append(tuple(batch.draw_ids))
        self.staleness[step] = _mean_staleness(batch)
        if step not in self.trained_at:  # not one that is repeated, after the end of what is measured
            self.trained_at[step] = self.loop.time()
            self._end = self._count()
        if step == self._first_step and not self._start.time:
            self._start = self._end

    @property
    def _first_step(self) -> int:
        """The first step that counts: before, all episodes have begun together, and short ones come first."""
        return max(1, self.settings.max_steps // 3)

    def _count(self) -> Counters:
        decoding = sum(server.decoding_s for server in self._servers)
        return Counters(self.loop.time(), decoding, self._training_s)

    # -- the result -----------------------------------------------------------------------------------------------

    def _result(self, wall_s: float) -> Result:
        settings, start, end = self.settings, self._start, self._end
        last = max(self.trained_at)
        seconds = self.trained_at[last] - start.time
        times = [self.trained_at[step] for step in range(self._first_step, last + 1)]
        with sqlite3.connect(self.run.journal) as db:
            reasons = db.execute(
                "SELECT reason, COUNT(*) FROM draws WHERE reason IS NOT NULL GROUP BY reason"
            ).fetchall()
        return Result(
            settings=settings,
            rollouts_per_second=(last - self._first_step) * settings.batch_size / seconds,
            servers_idle=1 - (end.decoding_s - start.decoding_s) / (seconds * settings.servers),
            trainer_idle=1 - (end.training_s - start.training_s) / seconds,
            staleness=sum(self.staleness.values()) / len(self.staleness),
            retried=self.retried,
            kills=self.kills,
            repeated_steps=sum(len(times) - 1 for times in self.batches.values()),
            dropped=Counter(dict(reasons)),
            longest_stall_s=max(after - before for before, after in itertools.pairwise(times)),
            simulated_s=end.time - START_S,
            wall_s=wall_s,
            violations=self.find_violations(),
        )

    def find_violations(self) -> list[str]:
        """Return what is wrong in the journal: by the run's own audit, and by SQL against what was trained."""
        journal = Journal(self.run.journal, read_only=True)
        try:
            problems = [*audit.find_violations(self.run, journal), *journal.find_damage()]
        finally:
            journal.close()
        with sqlite3.connect(self.run.journal) as db:
            rows = db.execute("SELECT id, state, step, reason FROM draws ORDER BY id").fetchall()
        if [row[0] for row in rows] != list(range(len(rows))):
            problems.append("draws are missing")
        trained: dict[int, set[int]] = {}
        for draw, state, step, reason in rows:
            if state == "dropped" and reason:
                continue
            if state not in ("shipped", "trained"):
                problems.append(f"draw {draw} is lost: {state}")
            trained.setdefault(step, set()).add(draw)
        seen: Counter[int] = Counter()
        for step, versions in self.batches.items():
            seen.update(set(versions[-1]))
            if set(versions[-1]) != trained.get(step, set()):
                problems.append(f"step {step} trained other draws than the journal has")
            if len(set(versions)) > 1:
                problems.append(f"step {step} was trained with different batches")
        problems += [f"draw {draw} was trained {count} times" for draw, count in seen.items() if count > 1]
        return problems


def _mean_staleness(batch: Batch) -> float:
    """Return how many versions the tokens of a batch were older than the weights that it trains, on average."""
    ages = [batch.step - 1 - entry.sample.versions[entry.sample.mask] for entry in batch.samples]
    return float(np.concatenate(ages).mean())
