"""A sign of life for monitors outside the run: `heartbeat.json`, and a POST of the same to a URL.

A run that fails sends nothing more, so that a service such as healthchecks.io raises its alarm. The URL is called from
a thread of its own, one call at a time: it may hang or fail without the run noticing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import urllib.request
from pathlib import Path

import msgspec

from headrace.transport.files import write_atomically

log = logging.getLogger(__name__)

FILE_INTERVAL_S = 5.0
URL_TIMEOUT_S = 10.0
LAST_CALL_S = 2.0
"""Seconds that the end of a run waits for the last call."""


class Beat(msgspec.Struct):
    """The content of `heartbeat.json`. Times are seconds since 1970."""

    time: float
    pid: int
    """Of the launcher."""
    state: str
    """`running`, `finished`, `stopped` (it can be resumed) or `failed`."""
    step: int
    last_progress: float
    """When a step or an evaluation was last recorded, or the launcher started."""
    problem: str = ""
    """Why the run gets no further, where it says so."""


class Heartbeat:
    """Writes the file every few seconds, and calls the URL every `interval` seconds."""

    def __init__(self, path: Path, url: str | None = None, interval: float = 60.0) -> None:
        self._path, self._url, self._interval = path, url, interval
        self._moves = -1
        self._beat = Beat(0.0, os.getpid(), "running", 0, time.time())
        self._file_at = self._url_at = 0.0
        self.call: threading.Thread | None = None
        """The newest call to the URL."""
        self._failed = False

    def look(self, step: int, moves: int, problem: str) -> None:
        """Take in how far the run is; `moves` grows with every step and evaluation."""
        now = time.time()
        if moves != self._moves:
            self._moves, self._beat.last_progress = moves, now
        self._beat.time, self._beat.step, self._beat.problem = now, step, problem
        if now >= self._file_at + FILE_INTERVAL_S:
            self._file_at = now
            self._write()
        if now >= self._url_at + self._interval:
            self._url_at = now
            self._send()

    def close(self, state: str) -> None:
        """Say how the run ended."""
        self._beat.time, self._beat.state = time.time(), state
        self._write()
        if state != "failed":
            self._send()
            if self.call is not None:
                self.call.join(LAST_CALL_S)

    def _write(self) -> None:
        try:
            write_atomically(self._path, msgspec.json.encode(self._beat))
        except OSError as error:  # a full disk ends the run where it matters
            log.warning("cannot write %s: %s", self._path, error)

    def _send(self) -> None:
        if self._url is None or (self.call is not None and self.call.is_alive()):
            return
        self.call = threading.Thread(target=self._post, args=(msgspec.json.encode(self._beat),), daemon=True)
        self.call.start()

    def _post(self, content: bytes) -> None:
        assert self._url is not None
        request = urllib.request.Request(self._url, content, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=URL_TIMEOUT_S):
                self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:  # once in a row
                log.warning("launch.heartbeat_url did not answer: %s", error)
            self._failed = True
