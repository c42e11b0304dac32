"""Announcements: which names are in a directory of the run, before the file system of this host shows them.

Clients of network file systems cache directories: a host may see a new file half a minute late, or remember for as long
that a name did not exist. So readers list directories and never open a name that they have not seen. Processes also
announce what they have written to the launcher's driver, which passes it on (`GET /announcements`, a long poll).
Announcements are hints: only files count, and without a driver, as on one host, readers use the listing alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from queue import SimpleQueue

import msgspec

log = logging.getLogger(__name__)

DRIVER_VAR = "HEADRACE_DRIVER"
"""The environment variable with the URL of the driver."""
KEY_VAR = "HEADRACE_DRIVER_KEY"
REQUEST_TIMEOUT_S = 20.0
RETRY_S = 1.0


class _AnnouncementList(msgspec.Struct):
    """Announcements after a sequence number, and the newest number."""

    seq: int
    entries: list[tuple[int, str, bool]]


class _DriverConnection:
    """The connection to the driver: one thread posts announcements, another one receives those of other processes."""

    def __init__(self, root: Path, url: str, key: str) -> None:
        self.root = root.absolute()
        self.hints: defaultdict[Path, dict[str, bool]] = defaultdict(dict)
        """Announced names by directory, and whether each was withdrawn."""
        self.closed = threading.Event()
        self._url, self._key = f"{url.rstrip('/')}/announcements", key
        self._posts: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"announcements-{work.__name__[1:]}", daemon=True)
            for work in (self._post, self._follow)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, path: Path, withdrawn: bool) -> None:
        relative = path.absolute().relative_to(self.root).as_posix()
        self._posts.put(msgspec.json.encode({"path": relative, "withdrawn": withdrawn}))

    def close(self) -> None:
        """Send queued announcements for at most `RETRY_S`; do not wait for the long poll."""
        self._posts.put(None)
        self._threads[0].join(RETRY_S)
        self.closed.set()

    def _post(self) -> None:
        while (body := self._posts.get()) is not None:
            while not self.closed.is_set() and self._request("", body) is None:
                self.closed.wait(RETRY_S)

    def _follow(self) -> None:
        after = 0
        while not self.closed.is_set():
            content = self._request(f"?after={after}")
            if content is None:
                self.closed.wait(RETRY_S)
                continue
            received = msgspec.json.decode(content, type=_AnnouncementList)
            after = received.seq
            for _, path, withdrawn in received.entries:
                name = PurePosixPath(path)
                self.hints[self.root / name.parent][name.name] = withdrawn

    def _request(self, query: str, body: bytes | None = None) -> bytes | None:
        """Return the body of the response; None if the driver cannot be reached at the moment."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        import urllib.request  # only processes of a cluster need it

        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self._url}{query}", body, headers)
        try:
            with direct.open(request, timeout=REQUEST_TIMEOUT_S) as response:
                return bytes(response.read())
        except OSError as error:
            log.debug("announcements: %s", error)
            return None


_driver: _DriverConnection | None = None


@contextmanager
def announcements(root: Path, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Exchange announcements about a run directory with the driver, if the environment variables name one."""
    global _driver
    url, key = env.get(DRIVER_VAR), env.get(KEY_VAR)
    if not url or not key:
        yield
        return
    _driver = driver = _DriverConnection(root, url, key)
    try:
        yield
    finally:
        _driver = None
        driver.close()


def announce(path: Path, *, withdrawn: bool = False) -> None:
    """Announce that a path exists now, or with `withdrawn` that it was deleted. Returns at once and never fails."""
    if _driver is not None and path.absolute().is_relative_to(_driver.root):
        _driver.post(path, withdrawn)


def list_names(directory: Path) -> list[str]:
    """Return the sorted names in a directory: those of its listing, and announced ones that it does not show yet."""
    try:
        listed = set(os.listdir(directory))
    except FileNotFoundError:
        listed = set()
    if _driver is not None:
        for name, withdrawn in dict(_driver.hints.get(directory.absolute(), {})).items():
            if withdrawn:
                listed.discard(name)
            elif name not in listed and os.path.lexists(directory / name):
                listed.add(name)
    return sorted(listed)
