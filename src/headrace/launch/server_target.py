"""Find or start the server that a client connects to: by URL, of a run, or a new one that ends with the client."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import BadInput, Failure
from headrace.inference.client.chat_stream import ChatClient
from headrace.inference.client.openai_client import OpenAIError
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.process import Lifeline, Process
from headrace.launch.run_directory import in_use, is_run
from headrace.transport.endpoint import is_past_server, read_endpoints
from headrace.transport.run_dir import RunDir

POLL_S = 0.2
KEY_VAR = "HEADRACE_API_KEY"
LOOPBACK = "127.0.0.1"
GREETING = re.compile(rf"^serving on (http://{re.escape(LOOPBACK)}:\d+/v1);", re.MULTILINE)
"""The line that `headrace serve` prints when it is up. The server chooses its port: one chosen here could be taken by
another process, which would receive the key."""
STOP_TIMEOUT_S = 10.0

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""A context that yields a function to display a progress message."""


def find_server(target: str, key_var: str) -> ChatClient | None:
    """Return a client of the server at a URL or of a run in progress; None if a server must be started."""
    if "://" in target:
        return ChatClient(base_url(target), key_in(key_var))
    return _find_live_server(RunDir(Path(target))) if is_run(Path(target)) else None


def base_url(address: str) -> str:
    """Return a server address as a base URL: `/v1` is added if it has no path."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("not the URL of a server", value=address, fix="Write http://HOST:PORT.")
    return f"{address.rstrip('/')}/v1" if parts.path in ("", "/") else address.rstrip("/")


def key_in(variable: str) -> str | None:
    """Return the API key in an environment variable, or None if it is not set."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        fact = "contains characters that are not allowed in a key"
        raise BadInput(fact, key=variable, fix="Use printable ASCII characters.")
    return key or None


def _find_live_server(run: RunDir) -> ChatClient | None:
    """Return a client of a server of the run; None if the run has ended. Raises `BadInput` while it starts."""
    for name, endpoint in read_endpoints(run.endpoints).items():
        if is_past_server(name):
            continue
        server = ChatClient(f"{endpoint.url}/v1", endpoint.api_key)
        try:
            server.models()
        except OpenAIError:
            server.close()
        else:
            return server
    if in_use(run.root):
        fact = "the run is in progress, but none of its servers responds"
        raise BadInput(fact, key="MODEL", value=run.root, fix="Try again when a server is up.")
    return None


@contextmanager
def start_server(target: str, overrides: Sequence[str], progress: Progress) -> Iterator[ChatClient]:
    """Start a server for this context, and yield a client of it once it is up."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-chat-") as directory,
        closing(PrivateServer(target, overrides, Path(directory) / "serve.log")) as own,
    ):
        began = time.monotonic()
        with progress() as show:
            while (url := own.address()) is None:
                show(f"loading {target} ({time.monotonic() - began:.0f} s)")
                time.sleep(POLL_S)
        with closing(ChatClient(url, own.key)) as server:
            yield server


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
        greeting = GREETING.search(self._process.log.read_text(errors="replace"))
        if greeting is None and not running:
            lines = "\n".join(f"    {line}" for line in self._process.last_lines())
            raise ServerEnded(f"the server {self._process.how_it_ended()}; the end of its log:\n{lines}")
        return None if greeting is None else greeting[1]

    def close(self) -> None:
        """Stop the server and its child processes."""
        self._process.terminate()
        self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._lifeline.close()
