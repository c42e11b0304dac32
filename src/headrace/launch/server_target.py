"""Whom to talk to: a server by its address, the server of a run, or one that is started for this and ends with it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import BadInput
from headrace.inference.client.chat_stream import ChatClient
from headrace.inference.client.openai_client import OpenAIError
from headrace.launch.private_server import PrivateServer
from headrace.launch.run_directory import in_use, is_run
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir

POLL = 0.2

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Shows what is being waited for, as it is told, for as long as it is open."""


def find(target: str, key_var: str) -> ChatClient | None:
    """The server at an address, or one of the run in a directory; None where one has to be started."""
    if "://" in target:
        return ChatClient(base_url(target), key_in(key_var))
    return live(RunDir(Path(target))) if is_run(Path(target)) else None


def base_url(given: str) -> str:
    """The address with the path that OpenAI's interface is under, where it has none."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("cannot be read as the address of a server", value=given, fix="Write http://HOST:PORT.")
    return f"{given.rstrip('/')}/v1" if parts.path in ("", "/") else given.rstrip("/")


def key_in(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadInput(
            "contains characters that are not allowed in a key: a line break, or one beyond ASCII", key=variable
        )
    return key or None


def live(run: RunDir) -> ChatClient | None:
    """A server of the run that answers; None if the run is over, or was stopped."""
    for endpoint in read_endpoints(run.endpoints).values():
        server = ChatClient(f"{endpoint.url}/v1", endpoint.api_key)
        try:
            server.models()
        except OpenAIError:
            server.close()
        else:
            return server
    if in_use(run.root):
        raise BadInput(
            "the run is running, but none of its servers answers",
            key="MODEL",
            value=run.root,
            fix="Try again when it is up.",
        )
    return None


@contextmanager
def started(target: str, overrides: Sequence[str], progress: Progress) -> Iterator[ChatClient]:
    """A server for this chat alone. Ctrl-C ends the wait for it."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-chat-") as directory,
        closing(PrivateServer(target, overrides, Path(directory) / "serve.log")) as own,
    ):
        with progress() as tell:
            url = _wait(own, lambda seconds: tell(f"loading {target} ({seconds:.0f} s)"))
        with closing(ChatClient(url, own.key)) as server:
            yield server


def _wait(server: PrivateServer, tell: Callable[[float], None]) -> str:
    """Until it is up; returns where."""
    began = time.monotonic()
    while (address := server.address()) is None:
        tell(time.monotonic() - began)
        time.sleep(POLL)
    return address
