"""Check that all hosts of a run share its directory, and that its file system has the operations that a run needs.

The driver writes a file into a new folder of the run directory; every host must see it, and write one of its own, which
the driver must see. A network file system may cache missing names and listings for half a minute, so a file is first
opened after another host has announced it, and from then on looked for by listing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import time
from pathlib import Path

from headrace.errors import Failure
from headrace.transport.files import write_atomically

VISIBLE_TIMEOUT_S = 5.0
"""Time until a new file must be visible. No host has looked for it before, so none has cached that it is missing."""
POLL_S = 0.25
TIMED_WRITES = 3
DRIVER_FILE = "driver"
PREFIX = ".canary-"
FIX = "Choose an output_dir on a file system that has it (NFS 4, Lustre, BeeGFS, CephFS and GPFS do)."


class UnsuitableDirectory(Failure):
    """A host does not share the run directory, or its file system lacks an operation that the run needs."""


class Canary:
    """A folder of the run directory with a test file of the driver and of each host. `name` begins with `PREFIX`."""

    def __init__(self, run: Path, name: str) -> None:
        self.folder, self.name = run / name, name

    def create(self) -> None:
        """Write the driver's file, and delete folders that a killed driver has left."""
        for old in self.folder.parent.glob(PREFIX + "*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_atomically(self.folder / DRIVER_FILE, self.name.encode())

    def check(self, nonce: str, timeout_s: float = VISIBLE_TIMEOUT_S) -> float:
        """Check the folder from a host, write its file, and return the seconds of a durable write.

        Raises `UnsuitableDirectory`.
        """
        if not becomes_visible(self.folder / DRIVER_FILE, self.name, timeout_s):
            raise UnsuitableDirectory(
                f"{self.folder.parent}: this host does not see the driver's files within {timeout_s:g} s. Mount the "
                "directory of the run at the same path on all hosts."
            )
        try:
            self._check_exclusive_creation(self.folder / f"{nonce}.{secrets.token_hex(4)}")
            durations = []
            for content in (f"{nonce}-{number}" for number in range(TIMED_WRITES - 1, -1, -1)):  # the last one stays
                started = time.monotonic()
                write_atomically(self.folder / nonce, content.encode())
                durations.append(time.monotonic() - started)
                if (self.folder / nonce).read_bytes() != content.encode():
                    fact = f"{self.folder}: after a rename the old content of the target is read"
                    raise UnsuitableDirectory(f"{fact}. {FIX}")
        except OSError as error:
            raise UnsuitableDirectory(
                f"{error.filename or self.folder}: {error.strerror}. Give the user of the run write access from all "
                "hosts, and use a file system with rename, exclusive creation and fsync."
            ) from error
        return statistics.median(durations)

    def _check_exclusive_creation(self, own: Path) -> None:
        own.touch(exist_ok=False)
        for path, owner in ((own, "this host"), (self.folder / DRIVER_FILE, "the driver")):
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            raise UnsuitableDirectory(f"{path}: exclusive creation ignores a file of {owner}. {FIX}")
        own.unlink()

    def confirm(self, nonce: str, timeout_s: float = VISIBLE_TIMEOUT_S) -> bool:
        """Return whether the driver sees the file of a host that has passed `check`."""
        return becomes_visible(self.folder / nonce, f"{nonce}-0", timeout_s)

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def becomes_visible(path: Path, content: str, timeout_s: float) -> bool:
    """Return whether a file with this content becomes visible within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    is_announced = True
    while True:
        try:
            if (is_announced or path.name in os.listdir(path.parent)) and path.read_bytes() == content.encode():
                return True
        except OSError:  # not visible yet, or a stale entry of a listing
            pass
        is_announced = False
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
