"""Monitoring from outside the run: `heartbeat.json`, a POST of its content to a URL, and `/metrics` of the launcher.

A run that fails stops sending, so that a service such as healthchecks.io raises an alarm. A thread calls the URL, one
call at a time, so that a slow or failing URL does not affect the run.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.observe.diagnosis import RECENT_STEPS
from headrace.observe.metrics import History
from headrace.observe.prometheus import family_head, sample_line
from headrace.observe.run_state import HeartbeatContent
from headrace.observe.status import ObservedStatus
from headrace.transport.files import write_atomically

log = logging.getLogger(__name__)

FILE_INTERVAL_S = 5.0
URL_TIMEOUT_S = 10.0
LAST_CALL_TIMEOUT_S = 2.0
"""How long the end of a run waits for the last call."""


class Heartbeat:
    """Writes the file every few seconds, and calls the URL every `interval` seconds."""

    def __init__(self, path: Path, url: str | None = None, interval: float = 60.0) -> None:
        self._path, self._url, self._interval = path, url, interval
        self._moves, self._moved_at = -1, time.monotonic()
        self._signs: object = None
        self._sign_at, self._works_long = self._moved_at, True
        self._quiet_s = deque([0.0], RECENT_STEPS)
        """The longest time between two signs of progress in each of the recent steps."""
        self._file_at = self._url_at = -math.inf
        self._failed = False
        self.content = HeartbeatContent(0.0, os.getpid(), "running", 0, 0.0, host=socket.gethostname())
        self.call: threading.Thread | None = None
        """The latest call to the URL."""

    def update(
        self,
        step: int,
        moves: int,
        problem: str,
        restarts: Mapping[str, str] | None = None,
        signs: object = None,
        works_long: bool = False,
    ) -> None:
        """Record the progress of the run, and send what is due.

        `moves` grows with every step and evaluation, `signs` changes with every sign of progress. While a process
        `works_long`, the time without a sign is not what is usual in this run.
        """
        now = time.monotonic()
        if (moves, signs) != self._signs:
            if not self._works_long:
                self._quiet_s[-1] = max(self._quiet_s[-1], now - self._sign_at)
            self._signs, self._sign_at = (moves, signs), now
        self._works_long = works_long
        if step != self.content.step:
            self._quiet_s.append(0.0)
        if moves != self._moves:
            self._moves, self._moved_at = moves, now
        self._set_times(now)
        self.content.step, self.content.problem, self.content.restarts = step, problem, dict(restarts or {})
        if now >= self._file_at + FILE_INTERVAL_S:
            self._file_at = now
            self._write()
        if now >= self._url_at + self._interval:
            self._url_at = now
            self._send()

    def close(self, state: str, problem: str | None = None) -> None:
        """Report the final state of the run, and why it failed."""
        self.content.problem = self.content.problem if problem is None else problem
        self.content.state = state
        self._set_times(time.monotonic())
        self._write()
        if state != "failed":
            self._send()
            if self.call is not None:
                self.call.join(LAST_CALL_TIMEOUT_S)

    def _set_times(self, now: float) -> None:
        """Set wall-clock times whose difference is right even if the clock was set since the last progress."""
        self.content.time = time.time()
        self.content.last_progress = self.content.time - (now - self._moved_at)
        self.content.last_sign = self.content.time - (now - self._sign_at)
        self.content.longest_quiet_s = max(self._quiet_s)

    def _write(self) -> None:
        try:
            write_atomically(self._path, msgspec.json.encode(self.content))
        except OSError as error:  # a full disk ends the run elsewhere
            log.warning("cannot write %s: %s", self._path, error)

    def _send(self) -> None:
        if self._url is None or (self.call is not None and self.call.is_alive()):
            return
        content = msgspec.json.encode(self.content)
        self.call = threading.Thread(target=self._post, args=(self._url, content), daemon=True)
        self.call.start()

    def _post(self, url: str, content: bytes) -> None:
        try:
            request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=URL_TIMEOUT_S):
                self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:  # one warning per series of failures
                log.warning("launch.heartbeat_url: the request failed: %s", error)
            self._failed = True


def launcher_lines(
    history: History, statuses: Mapping[str, ObservedStatus], running: Mapping[str, bool], restarts: Mapping[str, int]
) -> Iterator[str]:
    """Return the samples; `running` and `restarts` are by process and by unit."""
    yield from family_head("headrace_run_step", "gauge", "Optimizer steps done.")
    yield sample_line("headrace_run_step", history.step)
    if "time" in history.latest:
        name = "headrace_run_last_record_timestamp_seconds"
        yield from family_head(name, "gauge", "When a metric was last recorded.")
        yield sample_line(name, history.latest["time"])
    waiting = {name: status.age(status.waiting_since) for name, status in statuses.items() if status.waiting_for}
    for name, kind, help_text, label, values in (
        ("process_running", "gauge", "1 while a process of the run runs.", "process", running),
        ("process_restarts_total", "counter", "Restarts after crashes and lost hosts.", "unit", restarts),
        ("process_waiting_seconds", "gauge", "For how long processes have been waiting.", "process",
         {name: waiting.get(name, 0.0) for name in statuses}),
        ("process_silent_seconds", "gauge", "Seconds since a process last wrote its status.", "process",
         {name: status.silent_s for name, status in statuses.items()}),
        ("process_problem", "gauge", "1 while a process reports a problem.", "process",
         {name: bool(status.problem) for name, status in statuses.items()}),
    ):  # fmt: skip
        yield from family_head(f"headrace_{name}", kind, help_text)
        for process, value in sorted(values.items()):
            yield sample_line(f"headrace_{name}", float(value), {label: process})
