"""The driver of a run: the HTTP side of the launcher, for node agents, processes and `headrace scale`.

`node_messages` has the routes. Its address and key are in the environment of nodes and processes, and in `driver.json`
of the run directory. Not authenticated requests change nothing.

Processes announce paths that now exist in the run directory, or no longer do. These are hints, which arrive before a
network file system shows a change: files stay the truth. Old ones are forgotten.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import dropwhile
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from headrace.errors import Failure
from headrace.launch import node_messages as messages
from headrace.launch.addresses import advertised_address, listen_everywhere, url_of
from headrace.launch.node_registry import LeaseLost, NameInUse, Node, NodeRegistry
from headrace.machine import own_versions
from headrace.rollout.digest import seal
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir
from headrace.transport.shared_directory import PREFIX, Canary

log = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S = 30.0
NOTED_CLOCK_SKEW_S = 2.0
SLOW_WRITE_S = 0.5
POLL_S = 0.1
CONNECTION_TIMEOUT_S = 30.0
"""A connection on which nothing arrives for so long is closed."""
MAX_REJECTED = 100
Body = TypeVar("Body", bound=msgspec.Struct)


class Refused(Exception):
    """Ends a request with a status and a `Refusal`."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.CONFLICT, *, again: bool = False) -> None:
        super().__init__(message)
        self.status, self.refusal = status, messages.Refusal(message, again)


class Driver:
    """Listens until `close`. `nodes` is guarded by `changed`, which is notified of commands.

    `address`: what the other hosts dial; None: chosen by route. `is_alone`: no other host takes part, so that only
    this one can connect. `notify`: shows a sentence to the user.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        address: str | None = None,
        port: int = 0,
        interface: str | None = None,
        is_alone: bool = False,
        lease_s: float = messages.LEASE_S,
        rejoin_s: float = messages.REJOIN_S,
        notify: Callable[[str], None] = log.warning,
    ) -> None:
        self.on_scale: Callable[[int], str] | None = None
        """Called with the number of inference servers; returns what happens. Raises `Failure`."""
        self.nodes, self.changed = NodeRegistry(lease_s), threading.Condition()
        self.refusals: dict[str, str] = {}
        """By name of the host: why it could not join. A host that has joined since is not in it."""
        self.rejected: dict[str, str] = {}
        """By address: what was wrong with a request without the right key."""
        self.board = AnnouncementBoard()
        self.is_closed = False
        self.notify = notify
        self.run, self._interface, self._rejoin_s = run, interface, rejoin_s
        self._key = os.environ.get(KEY_VAR) or secrets.token_urlsafe(32)
        self._canary = Canary(run.root.resolve(), f"{PREFIX}{secrets.token_hex(8)}")
        self._canary.create()
        self._server = _Server(self, socket.create_server(("127.0.0.1", port)) if is_alone else listen_everywhere(port))
        address = address or ("127.0.0.1" if is_alone else advertised_address(interface))
        self.url = url_of(address, self._server.server_port)
        write_atomically(run.driver, seal(messages.DriverAddress(self.url, self._key)), mode=0o600)
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="driver", daemon=True).start()

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables by which nodes and processes find the driver."""
        return {DRIVER_VAR: self.url, KEY_VAR: self._key}

    def close(self) -> None:
        self.is_closed = True
        self.board.close()
        self._server.shutdown()
        self._server.server_close()
        self.run.driver.unlink(missing_ok=True)
        self._canary.delete()

    def accepts(self, authorization: str | None, client: str) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self._key.encode()) and scheme.lower() == "bearer"
        if not right and len(self.rejected) < MAX_REJECTED:
            self.rejected[client] = "a request with a wrong key" if key else "a request without a key"
        return right

    def facts(self) -> messages.RunFacts:
        folder, canary = str(self._canary.folder.parent), self._canary.name
        return messages.RunFacts(folder, canary, self._interface, self.nodes.lease_s, self._rejoin_s)

    def join(self, name: str, facts: messages.Join) -> messages.Joined:
        """Admit a host to the run. Raises `Refused`."""
        try:
            warnings = self.check(name, facts)
            with self.locked():
                self.nodes.join(name, facts, time.monotonic())
                self.refusals.pop(name, None)
                self.changed.notify_all()  # the others are to dial it
        except NameInUse:
            message = f"--name = {name}: another host of the run has this name. Start one of them with another --name."
            raise Refused(message, again=True) from None
        except Refused as error:
            with self.locked():
                self.refusals[name] = str(error)
            raise
        for warning in warnings:
            self.notify(warning)
        return messages.Joined(warnings)

    def check(self, name: str, facts: messages.Join) -> list[str]:
        """Return warnings about a host. Raises `Refused`."""
        skew_s = facts.clock - time.time()
        if facts.problem:
            raise Refused(f"host {name}: {facts.problem}")
        for package, version in own_versions().items():
            if (other := facts.versions.get(package, "none")) != version:
                raise Refused(f"host {name} has {package} {other}, the driver {version}. Install the same version.")
        if abs(skew_s) > MAX_CLOCK_SKEW_S:
            ahead = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'}"
            raise Refused(f"the clock of host {name} is {ahead} the driver's. Set it, for example with chrony.")
        if not self._canary.confirm(facts.nonce):
            raise Refused(
                f"host {name} writes into another {self.run.root} than the driver's: its file does not appear there. "
                "Mount the directory of the run at the same path on all hosts."
            )
        warnings = []
        if abs(skew_s) > NOTED_CLOCK_SKEW_S:
            warnings.append(f"the clock of host {name} differs from the driver's by {abs(skew_s):.1f} s")
        if facts.write_s > SLOW_WRITE_S:
            warnings.append(f"a durable write into {self.run.root} from host {name} takes {facts.write_s:.1f} s")
        return warnings

    def report(self, name: str, report: messages.Report) -> messages.Orders:
        """Renew the lease of a host, and return its commands; waits a moment for one. Raises `Refused`."""
        try:
            with self.locked():
                node = self.nodes.report(name, report, time.monotonic())
                if not report.leaving:
                    self.changed.wait_for(lambda: node.commands or node.is_gone, messages.HOLD_S)
                return messages.Orders(list(node.commands))
        except LeaseLost:
            raise Refused(f"host {name} has lost its lease", HTTPStatus.GONE, again=True) from None

    @contextmanager
    def locked(self) -> Iterator[NodeRegistry]:
        """Guard a use of `nodes`, after leases that have expired were taken from their hosts."""
        with self.changed:
            for node in self.nodes.expire(time.monotonic()):
                self.notify(f"host {node.name} is lost: it has not answered for {self.nodes.lease_s:g} s")
            yield self.nodes

    def send(self, node: Node, command: messages.Command) -> None:
        with self.changed:
            node.send(command)
            self.changed.notify_all()

    def scale(self, request: messages.Scale) -> messages.Scaled:
        if self.on_scale is None:
            raise Refused("the number of servers of this run cannot be changed")
        try:
            return messages.Scaled(self.on_scale(request.inference))
        except Failure as error:
            raise Refused(str(error)) from error

    def announce(self, announcement: messages.Announcement) -> messages.News:
        try:
            return messages.News(self.board.post(announcement))
        except ValueError as error:
            raise Refused(str(error), HTTPStatus.BAD_REQUEST) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, driver: Driver, listening: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.driver, self.socket = driver, listening
        self.server_port = int(listening.getsockname()[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection of %s", client_address, exc_info=True)  # a peer that went away


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_TIMEOUT_S
    wbufsize = -1  # headers and body in one packet: two would wait 40 ms for a delayed acknowledgement
    server: _Server

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        try:
            status, answer = HTTPStatus.OK, self._route(method)
        except Refused as error:
            status, answer = error.status, error.refusal
        except msgspec.DecodeError as error:
            status, answer = HTTPStatus.BAD_REQUEST, messages.Refusal(f"{self.path}: {error}")
        content = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _route(self, method: str) -> msgspec.Struct:
        driver, url = self.server.driver, urlsplit(self.path)
        if method == "GET" and url.path == "/health" and not driver.is_closed:
            with driver.locked() as nodes:
                return messages.Health(len(list(nodes.living())))
        if not driver.accepts(self.headers.get("Authorization"), self.client_address[0]):
            self.close_connection = True  # the body is not read
            raise Refused("wrong key", HTTPStatus.UNAUTHORIZED)
        if driver.is_closed:  # connections stay open until their next request
            self.close_connection = True
            raise Refused("the launcher of the run has ended", HTTPStatus.SERVICE_UNAVAILABLE, again=True)
        if method == "GET" and url.path == "/run":
            return driver.facts()
        if method == "GET" and url.path == "/announcements":
            after = parse_qs(url.query).get("after", ["0"])[0]
            return driver.board.read(int(after) if after.isdecimal() else 0, messages.ANNOUNCEMENT_HOLD_S)
        match method, url.path.split("/")[1:]:
            case "POST", ["nodes", name] if messages.NODE_NAME.fullmatch(name):
                return driver.join(name, self._read(messages.Join))
            case "POST", ["nodes", name, "report"] if messages.NODE_NAME.fullmatch(name):
                return driver.report(name, self._read(messages.Report))
            case "POST", ["announcements"]:
                return driver.announce(self._read(messages.Announcement))
            case "POST", ["scale"]:
                return driver.scale(self._read(messages.Scale))
        self.close_connection = True
        raise Refused(f"{method} {url.path}: no such route", HTTPStatus.NOT_FOUND)

    def _read(self, kind: type[Body]) -> Body:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > messages.MAX_BODY_BYTES:
            self.close_connection = True
            fact = f"Content-Length = {length[:20]!r}: from 0 to {messages.MAX_BODY_BYTES} bytes are read"
            raise Refused(fact, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return msgspec.json.decode(self.rfile.read(int(length)), type=kind)

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)


MAX_ENTRIES = 4096
MAX_PATH_CHARACTERS = 512


class AnnouncementBoard:
    """The newest announcements, numbered; readers wait for the next one."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: deque[tuple[int, str, bool]] = deque(maxlen=max_entries)
        self._seq = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def post(self, announcement: messages.Announcement) -> int:
        """Add an entry and return its number. Raises `ValueError` for a path that is not inside the run directory."""
        path = PurePosixPath(announcement.path)
        if len(announcement.path) > MAX_PATH_CHARACTERS or path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"path = {announcement.path[:100]!r}: not a path inside the run directory")
        with self._changed:
            self._seq += 1
            self._entries.append((self._seq, str(path), announcement.withdrawn))
            self._changed.notify_all()
            return self._seq

    def read(self, after: int, wait_s: float) -> messages.News:
        """Return the entries after number `after`; if there are none, wait for one.

        A number of an earlier driver, above the newest, counts as 0.
        """
        with self._changed:
            after = 0 if after > self._seq else after
            self._changed.wait_for(lambda: self._seq > after or self._is_closed, wait_s)
            return messages.News(self._seq, list(dropwhile(lambda entry: entry[0] <= after, self._entries)))

    def close(self) -> None:
        """Release all readers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
