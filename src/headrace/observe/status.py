"""What each process is doing right now: one small file each, rewritten as it changes, read by whoever watches.

Heartbeats are these files' times. A process that waits says for what and from whom; after a minute it also says so in
its log, then at growing intervals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.errors import Failure

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_NOTICE_S = 60.0
"""Time of waiting after which it is logged."""


class WaitTimeout(Failure):
    """A wait passed its deadline. The message names what was awaited from whom."""


class Progress(msgspec.Struct):
    """How far a process has come in what it is doing: "micro-batch 3 of 7"."""

    what: str
    done: int
    total: int
    since: float
    """The time of the last change."""

    def __str__(self) -> str:
        return f"{self.what} {self.done:,} of {self.total:,}"


class ProcessStatus(msgspec.Struct):
    """The content of a status file."""

    process: str
    pid: int
    time: float
    state: str
    waiting_for: str = ""
    waiting_since: float = 0.0
    progress: Progress | None = None
    """Within the state."""
    problem: str = ""
    """Why the run gets no further although the process works, and what to change."""
    problem_since: float = 0.0
    gauges: dict[str, Any] = msgspec.field(default_factory=dict)
    notices: list[str] = msgspec.field(default_factory=list)
    """What its user should know, in the order in which it was said."""


class Status:
    """This process's status file. A background thread keeps it fresh, so a stale one means a dead or stuck process."""

    def __init__(self, directory: Path, process: str, interval: float = 1.0) -> None:
        self.path = directory / f"{process}.json"
        self.current = ProcessStatus(process, os.getpid(), time.time(), "starting")
        self._waits: dict[int, tuple[str, float]] = {}
        self._wait_key = 0
        self._interval = interval
        self._lock = threading.Lock()
        self._closed = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def set(self, state: str | None = None, **gauges: Any) -> None:
        """Change what the next beat says; `state` changes are written at once."""
        self.current.gauges.update(gauges)
        if state is not None and state != self.current.state:
            self.current.state, self.current.progress = state, None
            self._write()

    def advance(self, what: str, done: int, total: int) -> None:
        """Show how far the current state has come, from the next beat on."""
        shown = self.current.progress
        if shown is None or (shown.what, shown.done, shown.total) != (what, done, total):
            self.current.progress = Progress(what, done, total, time.time())

    def set_problem(self, problem: str) -> None:
        """Show why the run gets no further; an empty text takes it back. The time is that of the first text."""
        if problem and not self.current.problem:
            self.current.problem_since = time.time()
        self.current.problem = problem

    def notify(self, sentence: str, level: int = logging.WARNING) -> None:
        """Say something in the log of this process, and through its status on the terminal of the run."""
        log.log(level, "%s", sentence)
        self.current.notices.append(sentence)
        self._write()

    def begin_wait(self, what: str) -> int:
        """Show that something is awaited; returns the key with which `end_wait` takes it back."""
        self._wait_key += 1
        self._waits[self._wait_key] = (what, time.time())
        self._show_wait()
        return self._wait_key

    def end_wait(self, key: int) -> None:
        self._waits.pop(key, None)
        self._show_wait()

    def _show_wait(self) -> None:
        """Of several waits, the longest is shown."""
        waits = list(self._waits.values())
        self.current.waiting_for, self.current.waiting_since = waits[0] if waits else ("", 0.0)

    def close(self, state: str) -> None:
        self.current.state, self.current.progress, self.current.problem = state, None, ""
        self._waits.clear()
        self._show_wait()
        self._closed.set()
        self._thread.join()
        self._write()

    def _beat(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self._write()
            except OSError as error:  # a full disk ends the process where it matters; here it only ends the heartbeat
                log.error("no more heartbeats: cannot write %s: %s", self.path, error)
                return

    def _write(self) -> None:
        # Not fsynced: a status is worth nothing after a power loss.
        with self._lock:
            self.current.time = time.time()
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(msgspec.json.encode(self.current))
            os.replace(temporary, self.path)


def read_status(directory: Path) -> dict[str, ProcessStatus]:
    """The status of every process that has one."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # removed since we looked: its process has ended
            continue
        status = msgspec.json.decode(content, type=ProcessStatus)
        found[status.process] = status
    return found


class _Patience:
    """Tells, from the time a wait began, when to speak up again and when to give up."""

    def __init__(self, what: str, whom: str, deadline: float | None) -> None:
        self.what, self.whom, self.deadline = what, whom, deadline
        self.started = time.monotonic()
        self.next_notice = FIRST_NOTICE_S

    def check(self) -> None:
        waited = time.monotonic() - self.started
        if self.deadline is not None and waited > self.deadline:
            raise WaitTimeout(f"gave up after {waited:.0f} s of waiting for {self.what} from {self.whom}")
        if waited > self.next_notice:
            log.warning("has been waiting for %s from %s for %.0f s", self.what, self.whom, waited)
            self.next_notice *= 2


def wait_until(
    ready: Callable[[], bool],
    what: str,
    whom: str,
    status: Status,
    *,
    poll: float = 0.02,
    deadline: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Block until `ready`; False if `stopped` was true first. Says what it waits for, and gives up at the deadline."""
    if ready():
        return True
    patience = _Patience(what, whom, deadline)
    key = status.begin_wait(f"{what} from {whom}")
    try:
        while not ready():
            if stopped():
                return False
            patience.check()
            time.sleep(poll)
        return True
    finally:
        status.end_wait(key)


async def wait_for(
    awaitable: Awaitable[T], what: str, whom: str, status: Status, *, deadline: float | None = None
) -> T:
    """Await something, saying after a minute what it is and from whom; cancelled at the deadline."""
    task = asyncio.ensure_future(awaitable)
    patience = _Patience(what, whom, deadline)
    key = status.begin_wait(f"{what} from {whom}")
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=1.0)
            if done:
                return task.result()
            patience.check()
    finally:
        status.end_wait(key)
        task.cancel()
