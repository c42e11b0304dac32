"""What is known of a run at one moment: its files, the processes of this host, its disk, and servers it depends on.

Only the ends of the metrics are read, so that the answer takes milliseconds however long the run is.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.errors import BadInput
from headrace.machine import KernelProcess, list_processes
from headrace.observe.metrics import History, Tail
from headrace.observe.status import ENDED, ObservedStatus, StatusReader
from headrace.transport.files import MARKER, STEP, in_daemon_thread
from headrace.transport.run_dir import RunDir

log = logging.getLogger(__name__)

TAIL_BYTES = 512 << 10
"""Bytes at the end of the metrics that are read: some ten steps."""
LOG_BYTES = 8 << 10
"""Bytes at the end of a log that are read."""
CONNECT_S = 0.4
"""Time for a connection to another server."""
OUT_OF_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "MemoryError", "failed to map segment")
"""Texts in the errors of a process that lacks memory; the last one is the dynamic loader's."""
LONGER = 1.25
"""Multiple of the longest recent time without a sign of progress from which on a run is probably stalled."""


class HeartbeatContent(msgspec.Struct):
    """The content of `heartbeat.json`. Times are seconds since 1970; only their difference is a duration."""

    time: float = 0.0
    pid: int = 0
    """Process id of the launcher."""
    state: str = ""
    """`running`, `finished`, `stopped` (can be resumed) or `failed`."""
    step: int = 0
    last_progress: float = 0.0
    """When a step or an evaluation was last recorded, or the launcher started."""
    problem: str = ""
    """Why the run makes no progress, or why it failed."""
    host: str = ""
    """Name of the launcher's host."""
    restarts: dict[str, str] = msgspec.field(default_factory=dict)
    """By process: how it ended before its restart, if the run has not got further since."""
    last_sign: float = 0.0
    """When a process last showed progress of any kind; 0 in files of older versions."""
    longest_quiet_s: float = 0.0
    """Longest time between two such signs in the last ten steps, without starts, compilation and checkpoints."""


def read_heartbeat(path: Path) -> HeartbeatContent | None:
    """Return the last heartbeat of a run; None if there is none, or if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatContent)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s is damaged and left out: %s", path, error)
        return None


@dataclass
class RunState:
    """What is known of a run at one moment."""

    history: History
    """Its recent steps at least."""
    statuses: Mapping[str, ObservedStatus]
    heartbeat: HeartbeatContent | None = None
    silent_s: float = 0.0
    """Seconds since the heartbeat was written."""
    host: str = ""
    """The host that the processes below are on."""
    processes: Mapping[int, KernelProcess] = field(default_factory=dict)
    free_bytes: int | None = None
    checkpoint_bytes: int = 0
    """Size of the newest checkpoint."""
    memory_errors: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By process: the last line about lack of memory near the end of its log, and the log's age in seconds."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Models on other servers that do not accept a connection: by name, address and reason."""

    @property
    def is_running(self) -> bool:
        return self.heartbeat is None or self.heartbeat.state == "running"

    @property
    def active(self) -> dict[str, ObservedStatus]:
        """Return the status of each process that has not ended."""
        return {name: status for name, status in self.statuses.items() if status.state not in ENDED}

    @property
    def still_s(self) -> float | None:
        """Return the seconds since the last step, evaluation, micro-batch or rollout; None if that is unknown."""
        if self.heartbeat is None:
            return None
        ages = [status.age(status.progress.since) for status in self.active.values() if status.progress]
        return min([self.heartbeat.time - self.heartbeat.last_progress + self.silent_s, *ages])

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the last sign of progress of any process; infinite if that is unknown."""
        if (beat := self.heartbeat) is None:
            return math.inf
        return beat.time - (beat.last_sign or beat.last_progress) + self.silent_s

    def usual_s(self, least_s: float, factor: float = LONGER) -> float:
        """Return for how many seconds this run may show no progress, at least `least_s`."""
        return max(least_s, factor * (self.heartbeat.longest_quiet_s if self.heartbeat is not None else 0.0))


class RunReader:
    """Reads the state of a run again and again, and of its files only what is new."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._lock = run, threading.Lock()
        self._statuses = [StatusReader(path, from_file_times=True) for path in (run.status, run.status / "ranks")]
        self._tail, self._history = Tail(run.metrics), History()
        self._size = 0

    def read(self, connect: bool = False) -> RunState:
        """Return the state of the run; with `connect` of a running one, also which other servers are unreachable."""
        with self._lock:
            self._read_metrics()
            statuses = {name: status for reader in self._statuses for name, status in reader.read().items()}
        state = RunState(self._history, statuses, read_heartbeat(self._run.heartbeat), host=socket.gethostname())
        if state.heartbeat is not None:
            state.silent_s = max(0.0, time.time() - self._run.heartbeat.stat().st_mtime)
        add_machine(state, self._run)
        if connect and state.is_running and state.active and self._run.config.is_file():
            try:  # not by `config.files`, whose imports take longer than all the rest
                state.unreachable = unreachable_servers(tomllib.loads(self._run.config.read_text()))
            except ValueError as error:
                raise BadInput(f"not the configuration of a run: {error}", file=self._run.config) from error
        return state

    def _read_metrics(self) -> None:
        """Add the new records to the history, which begins again if the file was replaced."""
        size = self._run.metrics.stat().st_size if self._run.metrics.is_file() else 0
        if size < self._size or self._size == 0:  # a resume from an earlier checkpoint has replaced the file
            self._history, self._tail.offset = History(), max(0, size - TAIL_BYTES)
            if self._tail.offset:
                with open(self._run.metrics, "rb") as file:
                    file.seek(self._tail.offset)
                    self._tail.offset += len(file.readline())
        self._size = size
        for record in self._tail.read():
            self._history.add(record)


def add_machine(state: RunState, run: RunDir) -> None:
    """Add the processes of this host, what logs say about memory, and the space on the disk of the run."""
    if state.is_running:
        state.processes = list_processes()
    for name in {*state.statuses, *(state.heartbeat.restarts if state.heartbeat is not None else ())}:
        path = run.logs / f"{name}.log"
        if lines := [line for line in last_lines(path) if any(text in line for text in OUT_OF_MEMORY)]:
            state.memory_errors[name] = lines[-1], max(0.0, time.time() - path.stat().st_mtime)
    disk = os.statvfs(run.root)
    state.free_bytes = disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0
    checkpoints = sorted(path.parent for path in run.checkpoints.glob(f"{STEP}/{MARKER}"))
    for folder, _, files in os.walk(checkpoints[-1]) if checkpoints else ():
        for name in files:
            with suppress(FileNotFoundError):  # a newer checkpoint has just replaced it
                state.checkpoint_bytes += os.lstat(f"{folder}/{name}").st_size


def unreachable_servers(tree: dict[str, Any]) -> dict[str, str]:
    """Return the models of a run's configuration whose servers accept no connection: address and reason by key."""
    tests = [(key, url, in_daemon_thread(partial(_connect, url))) for key, url in _servers(tree, "")]
    wait([test for *_, test in tests], CONNECT_S + 0.1)  # a name that is looked up may take longer
    reasons = {(key, url): test.result() if test.done() else "no answer in time" for key, url, test in tests}
    return {key: f"{url}: {reason}" for (key, url), reason in reasons.items() if reason}


def _servers(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the URL of each `base_url` of a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in entries:
        if name == "base_url":
            yield from ((key, url) for url in ([value] if isinstance(value, str) else value))
        else:
            yield from _servers(value, f"{key}.{name}".lstrip("."))


def _connect(url: str) -> str:
    """Return why no connection to the server of a URL can be made; empty if one can."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def last_lines(path: Path) -> list[str]:
    """Return the lines at the end of a log file, without empty ones; none if there is no such file."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return [line.strip() for line in lines if line.strip()]
