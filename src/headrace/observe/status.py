"""Status and log of each process of a run.

The status is a small file that is rewritten as it changes and every second, and read by the launcher: a rewrite is the
heartbeat. A process that waits shows for what and from which component; after a minute it also logs that, then at
growing intervals.

Durations come from monotonic clocks, so that setting the wall clock changes none. A file has wall-clock times, but all
of them relative to the moment of its writing: only differences within one file are durations. To these a reader adds
how long ago, on its own monotonic clock, it saw the file change.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.errors import Failure
from headrace.safe_text import CONTINUATION, escape_output
from headrace.transport.files import temporary

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_NOTICE_S = 60.0
"""Time of waiting after which it is logged."""
MIN_SHOWN_S = 5
"""Time since the last progress from which on it is shown."""
MAX_HEARTBEAT_S = 10.0
"""Time without a heartbeat from which on it is shown."""
MIN_CLOCK_JUMP_S = 2.0
"""Change of the wall clock between two heartbeats, beyond the time that passed, from which on it was set."""
THE_GPU = "the GPU"
"""What trainer and engines wait for if they share a device."""
ENDED = ("finished", "failed")
"""States of processes that have ended."""


class WaitTimeout(Failure):
    """A wait passed its deadline. The message names what was awaited and from which component."""


class Progress(msgspec.Struct):
    """Progress within the current state: "micro-batch 3 of 7"."""

    what: str
    done: int
    total: int
    since: float
    """Time of the last change; within the process monotonic, in the file as the wall clock shows it."""

    def __str__(self) -> str:
        return f"{self.what} {self.done:,} of {self.total:,}"


class ProcessStatus(msgspec.Struct):
    """The content of a status file."""

    process: str
    pid: int
    time: float
    """When the file was written. The other times are relative to it."""
    state: str
    waiting_for: str = ""
    waiting_since: float = 0.0
    progress: Progress | None = None
    problem: str = ""
    """Why the run does not advance although the process works, and what to change; or why the process failed."""
    problem_since: float = 0.0
    gauges: dict[str, Any] = msgspec.field(default_factory=dict)
    notices: list[str] = msgspec.field(default_factory=list)
    """Messages for the user, oldest first."""
    host: str = ""
    """Name of the host of the process."""
    clock_jump_s: float = 0.0
    """By how much the wall clock was last set while the process ran; 0: it was not."""
    clock_jump_since: float = 0.0
    notice_times: list[float] = msgspec.field(default_factory=list)
    """When each was given, by the wall clock; empty in files of older versions."""


class ObservedStatus(ProcessStatus):
    """A status as a reader sees it."""

    silent_s: float = 0.0
    """Seconds since the reader saw the file change."""

    def age(self, since: float) -> float:
        """Return the seconds since a time of the file, until now."""
        return self.time - since + self.silent_s


def is_up(status: ProcessStatus | None) -> bool:
    """Return whether a process has started and loaded everything."""
    return status is not None and not status.state.startswith(("starting", "loading"))


def not_up(names: Sequence[str], statuses: Mapping[str, ObservedStatus]) -> list[str]:
    """Return the processes that are still starting, each with its activity."""
    missing = []
    for name in names:
        status = statuses.get(name)
        if not is_up(status):
            missing.append(f"{name} ({'has not reported yet' if status is None else activity(status)})")
    return missing


def activity(status: ObservedStatus) -> str:
    """Return what a process is doing: its state, its progress, and what it waits for."""
    words = status.state
    if status.progress is not None:
        words += f": {status.progress}"
        if not status.waiting_for and (age := status.age(status.progress.since)) >= MIN_SHOWN_S:
            words += f" ({age:.0f} s)"
    if status.waiting_for:
        age = status.age(status.waiting_since)
        wait = f"waiting for {status.waiting_for}" + (f" ({age:.0f} s)" if age >= 1 else "")
        words = wait if words.startswith("waiting") else f"{words}, {wait}"
    if status.silent_s > MAX_HEARTBEAT_S and status.state not in ENDED:
        words += f" (no heartbeat for {status.silent_s:.0f} s)"
    return words


def duration(seconds: float) -> str:
    """Return seconds as `45 s`, `3:07` or `2:03:07`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Status:
    """The status file of this process. A thread rewrites it regularly: a stale file means a dead or stuck process."""

    def __init__(self, directory: Path, process: str, interval: float = 1.0) -> None:
        self.path, self._interval = directory / f"{process}.json", interval
        self.current = ProcessStatus(process, os.getpid(), 0.0, "starting", host=socket.gethostname())
        self._clock_offset: float | None = None
        """Wall clock minus monotonic clock at the last write."""
        self._waits: dict[int, tuple[str, float]] = {}
        self._wait_keys = itertools.count(1)
        self._lock, self._closed = threading.Lock(), threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def set(self, state: str | None = None, **gauges: Any) -> None:
        """Update the status; changes of `state` are written at once, gauges with the next heartbeat."""
        self.current.gauges.update(gauges)
        if state is not None and state != self.current.state:
            self.current.state, self.current.progress = state, None
            self._write()

    def advance(self, what: str, done: int, total: int) -> None:
        """Set the progress of the current state, shown from the next heartbeat on."""
        shown = self.current.progress
        if shown is None or (shown.what, shown.done, shown.total) != (what, done, total):
            self.current.progress = Progress(what, done, total, time.monotonic())

    def set_problem(self, problem: str) -> None:
        """Set why the run does not advance; empty clears it. The time is that of the first non-empty text."""
        if problem and not self.current.problem:
            self.current.problem_since = time.monotonic()
        self.current.problem = problem

    def notify(self, sentence: str, level: int = logging.WARNING) -> None:
        """Log a message and show it on the terminal of the run."""
        log.log(level, "%s", sentence)
        self.current.notices.append(sentence)
        self.current.notice_times.append(time.time())
        self._write()

    def begin_wait(self, what: str) -> int:
        """Show what is awaited, the longest wait first; return a key for `end_wait`."""
        key = next(self._wait_keys)
        self._waits[key] = (what, time.monotonic())
        self._show_wait()
        return key

    def end_wait(self, key: int) -> None:
        self._waits.pop(key, None)
        self._show_wait()

    def _show_wait(self) -> None:
        waits = list(self._waits.values())
        self.current.waiting_for, self.current.waiting_since = waits[0] if waits else ("", 0.0)

    def close(self, state: str, problem: str = "") -> None:
        """Write the final state, and why the process failed."""
        self.current.state, self.current.progress = state, None
        self.set_problem(problem)
        self._waits.clear()
        self._show_wait()
        self._closed.set()
        self._thread.join()
        self._write()

    def _beat(self) -> None:
        has_failed = False
        while not self._closed.wait(self._interval):
            try:
                self._write()
                has_failed = False
            except OSError as error:  # a full disk ends the process elsewhere, if it has to write anything
                if not has_failed:
                    log.error("no heartbeats: cannot write %s: %s", self.path, error)
                has_failed = True

    def _write(self) -> None:
        # Not fsynced: a status is useless after a power loss.
        with self._lock:
            self.current.time, now = time.time(), time.monotonic()
            offset = self.current.time - now
            if self._clock_offset is not None and abs(offset - self._clock_offset) >= MIN_CLOCK_JUMP_S:
                self.current.clock_jump_s, self.current.clock_jump_since = offset - self._clock_offset, now
            self._clock_offset = offset
            draft = temporary(self.path)
            draft.write_bytes(msgspec.json.encode(_on_wall_clock(self.current)))
            os.replace(draft, self.path)


def _on_wall_clock(status: ProcessStatus) -> ProcessStatus:
    """Return the status with its monotonic times as the wall clock would have shown them without being set."""
    offset = status.time - time.monotonic()
    progress = status.progress
    return msgspec.structs.replace(
        status,
        progress=progress and msgspec.structs.replace(progress, since=progress.since + offset),
        waiting_since=status.waiting_since + offset if status.waiting_for else 0.0,
        problem_since=status.problem_since + offset if status.problem else 0.0,
        clock_jump_since=status.clock_jump_since + offset if status.clock_jump_s else 0.0,
    )


class StatusReader:
    """Reads the status files of a run, and notes when each last changed.

    A file counts as just written when it is first read, unless `from_file_times`: for a reader that has no time to
    watch it, and may be misled if a clock is set.
    """

    def __init__(
        self, directory: Path, clock: Callable[[], float] = time.monotonic, *, from_file_times: bool = False
    ) -> None:
        self._directory, self._clock, self._from_file_times = directory, clock, from_file_times
        self._changes: dict[str, tuple[tuple[int, float], float]] = {}
        """By process: the id of the process and the time in its file, and when it was first seen so."""
        self._decoded: dict[str, tuple[tuple[int, int], ObservedStatus]] = {}
        """By file name: its inode and time, and its content. Every write replaces the file."""

    def read(self) -> dict[str, ObservedStatus]:
        """Return the status of every process that has a status file."""
        statuses, now = {}, self._clock()
        for path in sorted(self._directory.glob("*.json"), key=lambda path: path.name):
            # Removed meanwhile, since its process has ended; or damaged, until its process writes it again.
            with suppress(FileNotFoundError, ValueError):
                status = self._decode(path)
                beat = (status.pid, status.time)
                if self._changes.get(status.process, (None, 0.0))[0] != beat:
                    age = max(0.0, time.time() - path.stat().st_mtime) if self._from_file_times else 0.0
                    self._changes[status.process] = (beat, now - age)
                status.silent_s = now - self._changes[status.process][1]
                statuses[status.process] = status
        return statuses

    def _decode(self, path: Path) -> ObservedStatus:
        """Return the content of a file, which is read only if it has changed: there may be hundreds."""
        stat = path.stat()
        written = (stat.st_ino, stat.st_mtime_ns)
        decoded = self._decoded.get(path.name)
        if decoded is None or decoded[0] != written:
            status = msgspec.json.decode(path.read_bytes(), type=ObservedStatus)
            decoded = self._decoded[path.name] = (written, status)
        return decoded[1]


@contextmanager
def _waiting(what: str, source: str, status: Status, deadline: float | None = None) -> Iterator[Callable[[], None]]:
    """Show a wait in the status. Yields a function that logs it at growing intervals and checks the deadline."""
    subject, started, next_notice = f"{what} from {source}", time.monotonic(), FIRST_NOTICE_S

    def check() -> None:
        nonlocal next_notice
        waited = time.monotonic() - started
        if deadline is not None and waited > deadline:
            raise WaitTimeout(f"gave up after {waited:.0f} s of waiting for {subject}")
        if waited > next_notice:
            log.warning("has been waiting for %s for %.0f s", subject, waited)
            next_notice *= 2

    key = status.begin_wait(subject)
    try:
        yield check
    finally:
        status.end_wait(key)


def wait_until(
    ready: Callable[[], bool],
    what: str,
    source: str,
    status: Status,
    *,
    stopped: Callable[[], bool],
    poll: float = 0.02,
) -> bool:
    """Block until `ready` and return True; return False if `stopped` first. Checks both every `poll` seconds."""
    if ready():
        return True
    with _waiting(what, source, status) as check:
        while not ready():
            if stopped():
                return False
            check()
            time.sleep(poll)
    return True


async def wait_for(
    awaitable: Awaitable[T], what: str, source: str, status: Status, *, deadline: float | None = None
) -> T:
    """Return the result of an awaitable; log waits of more than a minute; raise `WaitTimeout` at the deadline."""
    import asyncio  # only the orchestrator needs it

    task = asyncio.ensure_future(awaitable)
    try:
        with _waiting(what, source, status, deadline) as check:
            while not (await asyncio.wait({task}, timeout=1.0))[0]:
                check()
        return task.result()
    finally:
        task.cancel()


class _Format(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = f"{prefix}: " if prefix else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, '%H:%M:%S')} {level}{self._prefix}{record.getMessage()}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text.replace("\n", CONTINUATION)


def setup_logging(prefix: str = "") -> None:
    """Log to standard error, which the launcher redirects to a file; everything that this process prints is escaped.

    With a `prefix`, for one of several equal processes, each line has it and only warnings and errors are logged.
    """
    escape_output()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format(prefix))
    logging.basicConfig(level=logging.WARNING if prefix else logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
