"""Announcements: which names are in a directory of the run, before the file system of this host shows them.

Clients of network file systems cache directories: a host may see a new file half a minute late, or remember for as long
that a name did not exist. So readers list directories, never ask for a name that they have not seen, and processes also
announce what they have written to the launcher's driver, which passes it on (`GET /announcements`, a long poll). These
are hints: files stay the truth, and without a driver, as on one host, a listing is all there is.
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


class _News(msgspec.Struct):
    seq: int
    entries: list[tuple[int, str, bool]]


class _Driver:
    """The connection to the driver: one thread posts, another one follows."""

    def __init__(self, root: Path, url: str, key: str) -> None:
        self.root = root.absolute()
        self.hints: defaultdict[Path, dict[str, bool]] = defaultdict(dict)
        """By directory: names, and whether each was withdrawn."""
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
        """Send what is queued, for a moment; do not wait for the long poll."""
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
            news = msgspec.json.decode(content, type=_News)
            after = news.seq
            for _, path, withdrawn in news.entries:
                name = PurePosixPath(path)
                self.hints[self.root / name.parent][name.name] = withdrawn

    def _request(self, query: str, body: bytes | None = None) -> bytes | None:
        """Return the answer; None if there is none: the driver is restarting, or the network is down."""
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


_driver: _Driver | None = None


@contextmanager
def announcements(root: Path, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Exchange announcements about a run directory with the driver that environment variables name, if they do."""
    global _driver
    url, key = env.get(DRIVER_VAR), env.get(KEY_VAR)
    if not url or not key:
        yield
        return
    _driver = driver = _Driver(root, url, key)
    try:
        yield
    finally:
        _driver = None
        driver.close()


def announce(path: Path, *, withdrawn: bool = False) -> None:
    """Announce that a path exists now, or with `withdrawn` no longer. Returns at once, and never fails."""
    if _driver is not None and path.absolute().is_relative_to(_driver.root):
        _driver.post(path, withdrawn)


def names(directory: Path) -> list[str]:
    """Return the names in a directory, in order: those of a listing and those that were announced."""
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
