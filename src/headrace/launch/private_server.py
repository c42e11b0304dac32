"""`headrace serve` for one purpose: on this machine, behind a key that nobody else has, gone with who started it."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import Failure
from headrace.launch.lifeline import Lifeline
from headrace.launch.process import Process, ProcessSpec

KEY_VAR = "HEADRACE_API_KEY"
LOOPBACK = "127.0.0.1"
GREETING = re.compile(rf"^serving on (http://{re.escape(LOOPBACK)}:\d+/v1);", re.MULTILINE)
"""What `headrace serve` says once it is up."""
STOPPING = 10.0
"""Seconds that it gets to end in order."""


class ServerEnded(Failure):
    """The server ended by itself. The message has the end of its log."""


class PrivateServer:
    """It is starting from here on, and logs to that file. `key` opens it; `env` are variables for it."""

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        self.key = key or secrets.token_urlsafe()
        address = ["--host", LOOPBACK, "--port", "0", "--api_key_var", KEY_VAR]
        argv = [sys.executable, "-m", "headrace", "serve", model, "--alone", *options, *address]
        log.unlink(missing_ok=True)  # an earlier server's address is in it
        self._lifeline = Lifeline()
        spec = ProcessSpec("the server", argv, {**(env or {}), KEY_VAR: self.key}, service=True)
        self._process = Process(spec, log, self._lifeline)

    def address(self) -> str | None:
        """Where it answers, with `/v1`, once it is up; raises `ServerEnded`. A model may take any time to load."""
        running = self._process.running  # before its log is read: what it said last is in there
        address = address_in(self._process.log.read_text(errors="replace"))
        if address is None and not running:
            lines = "\n".join(f"    {line}" for line in self._process.last_lines())
            raise ServerEnded(f"the server {self._process.how_it_ended()}; the end of its log:\n{lines}")
        return address

    def close(self) -> None:
        """End it, and what it has started."""
        self._process.terminate()
        self._process.wait(STOPPING)
        self._process.kill()
        self._lifeline.close()


def address_in(log: str) -> str | None:
    """Where a server on this machine listens, by what it says once it is up.

    A port that was chosen for it could be another's by then, who would be shown the key.
    """
    said = GREETING.search(log)
    return None if said is None else said[1]
