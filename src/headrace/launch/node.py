"""The node agent of a host (`headrace node RUN`): joins the driver of a run, and starts the processes it is sent.

It renews its lease with every report. If that fails for as long as the lease lasts, the driver may have started the
processes elsewhere: the agent kills its own, and joins again when the driver answers.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import msgspec

from headrace.launch import node_messages as messages
from headrace.launch.addresses import CheckPort, dial, find_free_ports, interface_address, source_address
from headrace.launch.driver_client import DriverClient, NoDriver, RefusedByDriver, find_driver
from headrace.launch.errors import BadRequest, LaunchError
from headrace.launch.hosts.base import HostRole, ProcessSpec
from headrace.launch.out_of_memory import OomMonitor
from headrace.launch.process import GRACE_S, Lifeline, Process, signals_to
from headrace.machine import HostMemory, own_versions, usable_cores, visible_gpus
from headrace.transport.run_dir import RunDir
from headrace.transport.shared_directory import Canary, UnsuitableDirectory

log = logging.getLogger(__name__)

RETRY_S = 0.5
REQUEST_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 25.0
"""The driver looks for the host's file meanwhile."""
LEASE_POLL_S = 0.1
MAX_DIALS = 16
"""Connections to other hosts that are checked at the same time."""
SPARE_PORTS = 8
"""Free ports in each report."""
CANNOT_START = 127
"""Exit status of a process whose command could not be executed, as in a shell."""


JOINED = "joined"
"""The state of a host with a lease."""


class NodeProcesses:
    """The processes of one lease. None is started after all were killed."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._lifeline, self._oom = Lifeline(), OomMonitor(memory or HostMemory())
        self._processes: dict[int, Process] = {}
        self._ended: dict[int, messages.ProcessState] = {}
        """Also processes that could not be started."""
        self._lock = threading.Lock()
        self._is_over = False

    def start(self, command: messages.Start) -> None:
        spec = ProcessSpec(command.name, command.argv, command.env)
        with self._lock:
            if self._is_over:
                return
            try:
                self._processes[command.process] = Process(spec, Path(command.log), self._lifeline)
            except OSError as error:
                log.error("%s cannot be started: %s", command.name, error)
                with suppress(OSError), open(command.log, "a") as output:  # it may be the log that cannot be written
                    output.write(f"cannot be started: {error}\n")
                self._ended[command.process] = messages.ProcessState(exit_status=CANNOT_START)

    def send_signal(self, number: int, signal_number: int) -> None:
        if (process := self._processes.get(number)) is not None:
            process.send_signal(signal.Signals(signal_number))

    def kill(self, number: int) -> None:
        if (process := self._processes.get(number)) is not None:
            process.kill()

    def kill_all(self) -> None:
        with self._lock:
            self._is_over = True
        for process in self._processes.values():
            process.kill()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop all processes, last started first."""
        for process in reversed(list(self._processes.values())):
            process.terminate()
            process.wait(grace_s)
            process.kill()
            process.wait(grace_s)

    def states(self) -> dict[int, messages.ProcessState]:
        now, states = time.monotonic(), {}
        self._oom.observe(now)
        for number, process in list(self._processes.items()):
            if (status := process.exit_status) is None:
                states[number] = messages.ProcessState(process.pid)
            elif number not in self._ended:
                self._ended[number] = messages.ProcessState(
                    process.pid, status, process.peak_bytes, self._oom.at_end(now)
                )
        return states | self._ended

    def close(self) -> None:
        self.kill_all()
        for process in self._processes.values():
            process.wait(GRACE_S)
        self._lifeline.close()


class Lease:
    """Kills the processes once it has not been renewed for `lease_s`, whatever the agent waits for."""

    def __init__(self, lease_s: float, processes: NodeProcesses) -> None:
        self.renewed_at = time.monotonic()
        """When the newest report was sent that the driver has answered."""
        self.is_lost = False
        self._lease_s, self._processes = lease_s, processes
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_closed.wait(LEASE_POLL_S):
            if time.monotonic() - self.renewed_at > self._lease_s:
                self.is_lost = True
                self._processes.kill_all()
                return

    def close(self) -> None:
        self._is_closed.set()


class NodeAgent:
    """`wait_s`: how long the driver is waited for at first. `state`: a file that says whether this host has joined."""

    def __init__(self, run: Path, name: str, wait_s: float, role: HostRole = "", state: Path | None = None) -> None:
        self._run, self._name, self._wait_s, self._role, self._state = run, name, wait_s, role, state
        self._signals: list[int] = []
        self._check_port = CheckPort()
        self._nonce = ""

    def run(self) -> int:
        """Return 0 when the driver has ended the run, or 128 + N after signal N. Raises `Failure`."""
        wait_s = self._wait_s
        with signals_to(self._signals):
            while True:
                joined = self._join(wait_s)
                if joined is None:
                    return 128 + self._signals[0]
                client, facts = joined
                service = NodeService(self._name, self._nonce, client, facts.lease_s, self._signals, self._write_state)
                code = service.run()
                client.close()
                if code is not None:
                    return code
                log.warning("the lease of this host is lost, its processes are killed; joining again")
                wait_s = facts.rejoin_s

    def _write_state(self, state: str) -> None:
        """Write the state of this host for probes, which also see from the time of the file that the agent is alive."""
        if self._state is not None:
            self._state.write_text(state)

    def _join(self, wait_s: float) -> tuple[DriverClient, messages.RunFacts] | None:
        """Join the run as soon as the driver answers; None: a signal came before. Raises `Failure`."""
        replaces, self._nonce = self._nonce, secrets.token_hex(8)  # one for all attempts: an answer may be lost
        deadline, said = time.monotonic() + wait_s, ""
        while not self._signals:
            self._write_state("waiting")
            try:
                client = DriverClient(find_driver(self._run))
                facts = self._join_once(client, replaces)
                log.info("host %s has joined the run at %s", self._name, client.driver.url)
                return client, facts
            except (NoDriver, RefusedByDriver) as error:
                if isinstance(error, RefusedByDriver) and not error.again:
                    raise LaunchError(str(error)) from error
                if time.monotonic() > deadline:
                    fix = "Start the run, or wait longer for it with --wait."
                    raise LaunchError(f"{error}; waited for {wait_s:g} s. {fix}") from error
                if str(error) != said:
                    log.warning("%s; waiting for up to %g s", error, wait_s)
                said = str(error)
            time.sleep(RETRY_S)
        return None

    def _join_once(self, client: DriverClient, replaces: str) -> messages.RunFacts:
        """Check this host, and join. Returns what the driver says about the run."""
        run = client.get("/run", messages.RunFacts, REQUEST_TIMEOUT_S)
        self._check_port.nonce = self._nonce
        try:
            facts = describe_host(run, client.driver.host, self._check_port, visible_gpus())
        except OSError as error:
            raise NoDriver(f"{client.driver.url}: no route to the driver ({error})") from error
        join = msgspec.structs.replace(facts, role=self._role, replaces=replaces)
        for warning in client.post(f"/nodes/{self._name}", join, messages.Joined, JOIN_TIMEOUT_S).warnings:
            log.warning("%s", warning)
        return run

    def close(self) -> None:
        self._check_port.close()


def describe_host(
    run: messages.RunFacts, driver_host: str, check_port: CheckPort, gpus: Sequence[str]
) -> messages.Join:
    """Check this host, and describe it to the driver. Raises `OSError` if there is no route to the driver."""
    address, write_s, problem = "", 0.0, ""
    try:
        address = interface_address(run.interface) if run.interface else source_address(driver_host)
        write_s = Canary(Path(run.directory), run.canary).check(check_port.nonce)
    except (UnsuitableDirectory, BadRequest) as error:
        problem = str(error)
    return messages.Join(
        nonce=check_port.nonce,
        address=address,
        check_port=check_port.port,
        gpus=gpus,
        cores=usable_cores(),
        python=sys.executable,
        versions=own_versions(),
        clock=time.time(),
        write_s=write_s,
        problem=problem,
    )


class NodeService:
    """One lease: reports to the driver and carries out its commands."""

    def __init__(
        self,
        name: str,
        nonce: str,
        client: DriverClient,
        lease_s: float,
        signals: list[int],
        show: Callable[[str], None],
    ) -> None:
        self._path, self._nonce, self._client, self._signals = f"/nodes/{name}/report", nonce, client, signals
        self._write_state = show
        self._processes = NodeProcesses()
        self._lease = Lease(lease_s, self._processes)
        self._dials = ThreadPoolExecutor(MAX_DIALS, "dial")
        self._dialed: dict[str, str] = {}
        self._done = 0
        self._reported: dict[int, messages.ProcessState] = {}
        """Ends of processes that the driver knows."""
        self._stopping: threading.Thread | None = None
        self._is_stopped_by_driver = False

    def run(self) -> int | None:
        """Return the exit code, or None if the lease is lost."""
        try:
            while not self._lease.is_lost:
                self._write_state(JOINED)
                if self._signals and self._stopping is None:
                    log.warning("%s: stopping the processes of this host", signal.Signals(self._signals[0]).name)
                    self._stop()
                if len(self._signals) > 1:
                    self._processes.kill_all()
                left = self._stopping is not None and not self._stopping.is_alive()
                try:
                    self._exchange(left)
                except NoDriver as error:
                    if left:  # it may have ended by now
                        return self._exit_code()
                    log.warning("%s", error)
                    time.sleep(RETRY_S)
                except RefusedByDriver as error:
                    if error.status != HTTPStatus.GONE:
                        log.warning("%s", error)
                    return self._exit_code() if left else None
                else:
                    if left:
                        return self._exit_code()
            return None
        finally:
            self._lease.close()
            self._processes.close()
            self._dials.shutdown(wait=False, cancel_futures=True)

    def _exit_code(self) -> int:
        return 0 if self._is_stopped_by_driver else 128 + self._signals[0]

    def _stop(self) -> None:
        self._stopping = threading.Thread(target=self._processes.stop, name="stop", daemon=True)
        self._stopping.start()

    def _exchange(self, left: bool) -> None:
        """Send one report and carry out the commands in the answer. Raises `NoDriver`, `RefusedByDriver`."""
        states, dialed, sent_at = self._processes.states(), dict(self._dialed), time.monotonic()
        report = messages.Report(
            nonce=self._nonce,
            done=self._done,
            processes={number: state for number, state in states.items() if self._reported.get(number) != state},
            dialed=dialed,
            free_ports=find_free_ports(SPARE_PORTS),
            leaving=self._stopping is not None,
            left=left,
        )
        orders = self._client.post(self._path, report, messages.Orders, REQUEST_TIMEOUT_S)
        self._lease.renewed_at = sent_at
        self._reported |= states
        for nonce in dialed:
            del self._dialed[nonce]
        for number, command in orders.commands:
            if number > self._done:
                self._carry_out(command)
                self._done = number
        if self._stopping is not None:
            time.sleep(LEASE_POLL_S)

    def _carry_out(self, command: messages.Command) -> None:
        match command:
            case messages.Start():
                self._processes.start(command)
            case messages.Signal(process, number):
                self._processes.send_signal(process, number)
            case messages.Kill(process):
                self._processes.kill(process)
            case messages.Dial():
                self._dials.submit(self._dial, command)
            case messages.Stop() if self._stopping is None:
                self._is_stopped_by_driver = True
                self._stop()

    def _dial(self, peer: messages.Dial) -> None:
        self._dialed[peer.nonce] = dial(peer.address, peer.port, peer.nonce)


def log_to_run(run: Path, name: str) -> None:
    """Also write the log of this agent to `logs/node-NAME.log`, if the run directory is there."""
    logs = RunDir(run).logs
    try:
        logs.mkdir(exist_ok=True)
        handler = logging.FileHandler(logs / f"node-{name}.log")
    except OSError as error:
        log.debug("no log in the run directory: %s", error)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
