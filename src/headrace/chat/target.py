"""Whom to talk to: a server by its address, the server of a run, or one that is started for this and ends with it."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import BadInput, Failure
from headrace.inference.client.chat_stream import ChatServer
from headrace.inference.client.openai_client import OpenAIError
from headrace.launch.lifeline import Lifeline
from headrace.launch.process import Process, ProcessSpec
from headrace.launch.run_directory import in_use, is_run
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir

KEY_VAR = "HEADRACE_API_KEY"
LOOPBACK = "127.0.0.1"
GREETING = re.compile(rf"^serving on (http://{re.escape(LOOPBACK)}:\d+/v1);", re.MULTILINE)
"""What `headrace serve` says once it is up."""
POLL = 0.2
STOPPING = 10.0
"""Seconds that a server of ours gets to end in order."""

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Shows what is being waited for, as it is told, for as long as it is open."""


class ServerEnded(Failure):
    """A server that was started for a chat ended by itself. The message has the end of its log."""


def find(target: str, key_var: str) -> ChatServer | None:
    """The server at an address, or one of the run in a directory; None where one has to be started."""
    if "://" in target:
        return ChatServer(base_url(target), key_in(key_var))
    return live(RunDir(Path(target))) if is_run(Path(target)) else None


def base_url(given: str) -> str:
    """The address with the path that OpenAI's interface is under, where it has none."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"{given} is not the address of a server: write http://HOST:PORT")
    return f"{given.rstrip('/')}/v1" if parts.path in ("", "/") else given.rstrip("/")


def key_in(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadInput(f"{variable} holds what is in no key, a line break or a character beyond ASCII")
    return key or None


def live(run: RunDir) -> ChatServer | None:
    """A server of the run that answers; None if the run is over, or was stopped."""
    for endpoint in read_endpoints(run.endpoints).values():
        server = ChatServer(f"{endpoint.url}/v1", endpoint.api_key)
        try:
            server.models()
        except OpenAIError:
            server.close()
        else:
            return server
    if in_use(run.root):
        raise BadInput(f"{run.root} is running, but none of its servers answers: try again when it is up")
    return None


@contextmanager
def started(target: str, overrides: Sequence[str], progress: Progress) -> Iterator[ChatServer]:
    """`headrace serve` for this chat alone: on this machine, behind a key that nobody else has."""
    key = secrets.token_urlsafe()
    address = ["--host", LOOPBACK, "--port", "0", "--api_key_var", KEY_VAR]
    argv = [sys.executable, "-m", "headrace", "serve", target, "--alone", *overrides, *address]
    lifeline = Lifeline()
    with tempfile.TemporaryDirectory(prefix="headrace-chat-") as directory:
        log = Path(directory) / "serve.log"
        process = Process(ProcessSpec("the server", argv, {KEY_VAR: key}, service=True), log, lifeline)
        try:
            with progress() as tell:
                url = _wait(process, lambda seconds: tell(f"loading {target} ({seconds:.0f} s)"))
            with closing(ChatServer(url, key)) as server:
                yield server
        finally:
            process.terminate()
            process.wait(STOPPING)
            process.kill()  # and what it had started
            lifeline.close()


def _wait(process: Process, tell: Callable[[float], None]) -> str:
    """Until the server says that it is up; returns where. A model may take any time to load: Ctrl-C ends the wait."""
    began = time.monotonic()
    while True:
        tell(time.monotonic() - began)
        running = process.running
        if (address := address_in(process.log.read_text(errors="replace"))) is not None:
            return address
        if not running:
            lines = "\n".join(f"    {line}" for line in process.last_lines())
            raise ServerEnded(f"the server {process.how_it_ended()}; the end of its log:\n{lines}")
        time.sleep(POLL)


def address_in(log: str) -> str | None:
    """Where a server on this machine listens, by what it says once it is up.

    A port that was chosen for it could be another's by then, who would be shown the key.
    """
    said = GREETING.search(log)
    return None if said is None else said[1]
