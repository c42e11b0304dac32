"""A `headrace serve` process on the loopback address with a random API key; it ends with its parent process."""

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
"""The line that `headrace serve` prints when it is up. The server chooses its port: one chosen here could be taken by
another process, which would receive the key."""
STOP_TIMEOUT_S = 10.0


class ServerEnded(Failure):
    """The server process ended unexpectedly. The message has the end of its log."""


class PrivateServer:
    """A server process that starts on construction. `key` is its API key, `env` are additional variables for it."""

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
        """Return the base URL with `/v1`, or None while the model is loading. Raises `ServerEnded`."""
        running = self._process.running  # read before the log, so that the log is complete if the process has ended
        address = address_in(self._process.log.read_text(errors="replace"))
        if address is None and not running:
            lines = "\n".join(f"    {line}" for line in self._process.last_lines())
            raise ServerEnded(f"the server {self._process.how_it_ended()}; the end of its log:\n{lines}")
        return address

    def close(self) -> None:
        """Stop the server and its child processes."""
        self._process.terminate()
        self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._lifeline.close()


def address_in(log: str) -> str | None:
    """Return the base URL that the log of a server names, or None."""
    match = GREETING.search(log)
    return None if match is None else match[1]
