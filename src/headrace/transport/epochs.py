"""Epochs: each start of a part of a run (launcher, orchestrator, trainer) has a number, and only the newest may write.

An epoch is taken by exclusive creation of `epochs/ROLE/E.json`, which is atomic on network file systems, too. The file
is also the lease. A process that was paused (SIGSTOP, a cut network) and continues after another has taken over must
not change the run, and a check before each write would leave a gap between check and write. So its writes must fail:

- Everything that gets a final name is a draft in `.drafts/ROLE-E-NONCE/` first, and is renamed (`files.draft_of`). A
  process that takes an epoch deletes the drafts of the older ones before anything else. From then on their renames
  fail: the source does not exist, whatever a host has cached. What they had renamed before counts.
- The journal is written in place, so its path has the epoch: `journal-E.sqlite` (`journal_files`).

The holder checks every second whether a newer epoch exists, and exits if so. Left out on purpose: metrics and status
files, which an older process may still write until then; no process depends on them.

A lease shows whether the holder of an epoch is alive, without comparing clocks of hosts. The holder rewrites its
lease every second with a higher counter, and an observer measures on its own monotonic clock how long the counter has
not changed. A holder of the same boot and pid namespace is looked up by its process id instead: a restart on one host
does not wait. A lease prevents accidents, such as two launchers; only the epoch stops a process that was paused.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.errors import FENCED, BadInput, Failure
from headrace.rollout.digest import seal
from headrace.rollout.schema import SCHEMA, SchemaError, decode_versioned
from headrace.transport.files import discard_drafts, temporary, use_drafts

log = logging.getLogger(__name__)

EPOCHS, DRAFTS = "epochs", ".drafts"
LAUNCHER_VAR = "HEADRACE_LAUNCHER_EPOCH"
"""The launcher's epoch, in the environment of the processes that it starts. They take over without waiting for a lease
to expire: the launcher has decided that their predecessors have ended."""
POLL_S = 0.1
RENEWAL_S = 1.0
"""Interval between two renewals of a lease."""
LEASE_S = 15.0
"""Time without a renewal, on the observer's clock, after which a lease has expired."""

OnFenced = Callable[[str], None]
"""Called with a message when another process has taken over."""


class Holder(msgspec.Struct, frozen=True):
    """A process, identified across hosts, reboots and reused process ids."""

    host: str
    boot: str
    """Changes when the host starts; empty if unknown."""
    pid_namespace: str
    pid: int
    started: int
    """Start of the process in clock ticks since the boot; 0 if unknown."""
    nonce: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease(msgspec.Struct):
    """The content of a lease file."""

    holder: Holder
    counter: int = 0
    released: bool = False
    schema: int = SCHEMA


class Verdict(Enum):
    """Whether a lease is held, as far as an observer knows."""

    FREE = "free"
    HELD = "held"
    UNKNOWN = "unknown"
    """It was not renewed since it was first read, and has not expired: read it again."""


class Observer:
    """Decides whether a lease is held, from its contents at several times of the observer's own clock."""

    def __init__(self, is_gone: Callable[[Holder], bool]) -> None:
        self._is_gone = is_gone
        self._seen: object = None
        self._since = 0.0

    def judge(self, number: int, lease: Lease | None, now: float) -> Verdict:
        """Return whether the lease of epoch `number`, as read at `now`, is held; None: it is not written or damaged."""
        if lease is not None and (lease.released or self._is_gone(lease.holder)):
            return Verdict.FREE
        seen = (number, None if lease is None else (lease.holder.nonce, lease.counter))
        if self._seen is None:
            self._seen, self._since = seen, now
        elif seen != self._seen:
            return Verdict.HELD
        return Verdict.FREE if now - self._since > LEASE_S else Verdict.UNKNOWN


class Held(Failure):
    """Another process holds the role."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(f"held by {holder or 'another process'}")
        self.holder = holder


class Epoch:
    """An epoch that this process has taken; a thread renews its lease until `release`."""

    def __init__(self, drafts: Path, directory: Path, number: int, lease: Lease, on_fenced: OnFenced) -> None:
        self.drafts, self.number = drafts, number
        self._directory, self._lease, self._on_fenced = directory, lease, on_fenced
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name=f"lease-{directory.name}", daemon=True)
        self._thread.start()

    def _renew_until_released(self) -> None:
        while not self._released.wait(RENEWAL_S):
            try:
                newest = max(list_epochs(self._directory), default=0)
                if newest > self.number:
                    lease = read_lease(self._directory, newest)
                    self._on_fenced(
                        f"epoch {self.number} of the {self._directory.name} has ended: "
                        f"{lease.holder if lease else 'another process'} has taken over as epoch {newest}. This "
                        "process was paused or cut off for too long; it writes nothing more"
                    )
                    return
                self.renew()
            except OSError as error:  # a network file system may fail for a moment; if it lasts, the lease expires
                log.warning("the lease of the %s could not be renewed: %s", self._directory.name, error)

    def renew(self, *, released: bool = False) -> None:
        """Write the lease with a higher counter, or as released."""
        self._lease.counter += 1
        self._lease.released = released
        path = self._directory / f"{self.number}.json"
        draft = temporary(path)
        draft.write_bytes(seal(self._lease))  # not fsynced: after a power loss its holder is gone
        os.replace(draft, path)

    def release(self) -> None:
        """End the lease, so that a successor need not wait for it to expire."""
        self._released.set()
        self._thread.join()
        with suppress(FileNotFoundError):  # the run directory was deleted
            self.renew(released=True)
        shutil.rmtree(self.drafts, ignore_errors=True)


def take_epoch(
    root: Path,
    role: str,
    *,
    take_over: bool = False,
    on_wait: Callable[[Holder | None], None] = lambda _: None,
    on_fenced: OnFenced | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Epoch:
    """Take the next epoch of a role; then no process of an older one can write. Raises `Held` if its holder is alive.

    With `take_over` a living holder is replaced. `on_wait` is called once if the lease must be observed for a while.
    """
    directory = root / EPOCHS / role
    directory.mkdir(parents=True, exist_ok=True)
    probe = temporary(directory / "refresh")  # after a change by this host, its NFS client drops the cached listing
    probe.touch()
    probe.unlink(missing_ok=True)
    observer, newest, is_waiting = Observer(is_gone), 0, False
    while True:
        newest = max(newest, *list_epochs(directory), 0)
        lease = read_lease(directory, newest) if newest else None
        verdict = Verdict.FREE if take_over or not newest else observer.judge(newest, lease, clock())
        if verdict is Verdict.HELD:
            raise Held(lease.holder if lease else None)
        if verdict is Verdict.FREE:
            if epoch := _try_to_take(root, role, newest + 1, on_fenced or _exit):
                return epoch
            newest += 1  # another process was faster, and a listing may not show it yet
            continue
        if not is_waiting:
            is_waiting = True
            on_wait(lease.holder if lease else None)
        sleep(POLL_S)


def _try_to_take(root: Path, role: str, number: int, on_fenced: OnFenced) -> Epoch | None:
    """Take an epoch and delete the drafts of older ones; return None if another process has taken it."""
    directory, lease = root / EPOCHS / role, Lease(this_process())
    # Created before the epoch is taken, and never again: so a process with a later epoch finds and deletes it.
    drafts = root / DRAFTS / f"{role}-{number}-{lease.holder.nonce}"
    drafts.mkdir(parents=True)
    try:
        with open(directory / f"{number}.json", "xb") as file:
            file.write(seal(lease))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        with suppress(FileNotFoundError):  # a process that has taken a later epoch deleted it
            drafts.rmdir()
        return None
    for path in drafts.parent.glob(f"{role}-*-*"):
        if int(path.name.split("-")[1]) < number:
            discard_drafts(path)
    return Epoch(drafts, directory, number, lease, on_fenced)


@contextmanager
def hold_epoch(root: Path, role: str) -> Iterator[Epoch]:
    """Hold an epoch of a role, so that writes of this process in `root` fail once another process takes over.

    Raises `BadInput` if another process holds the role.
    """
    launcher = os.environ.get(LAUNCHER_VAR)
    newest = max(list_epochs(root / EPOCHS / "launcher"), default=0)
    if launcher is not None and int(launcher) < newest:
        fact = f"its launcher (epoch {launcher}) was replaced by another one (epoch {newest})"
        raise BadInput(fact, key="RUN", value=root, fix="Stop this one.")

    def notify(holder: Holder | None) -> None:
        message = "waiting: %s was the %s of this run; does it still renew its lease?"
        log.info(message, holder or "another process", role)

    try:
        epoch = take_epoch(root, role, take_over=launcher is not None, on_wait=notify)
    except Held as error:
        fact = f"another {role} is running in it ({error.holder or 'unknown'})"
        raise BadInput(fact, key="RUN", value=root, fix="Stop that one first.") from error
    try:
        with use_drafts(root, epoch.drafts):
            yield epoch
    finally:
        epoch.release()


def newest_lease(root: Path, role: str) -> Lease | None:
    directory = root / EPOCHS / role
    return read_lease(directory, max(list_epochs(directory), default=0))


def is_held(root: Path, role: str) -> bool:
    """Return whether a process holds the role; may observe its lease for up to `LEASE_S`."""
    directory, observer = root / EPOCHS / role, Observer(is_gone)
    while newest := max(list_epochs(directory), default=0):
        verdict = observer.judge(newest, read_lease(directory, newest), time.monotonic())
        if verdict is not Verdict.UNKNOWN:
            return verdict is Verdict.HELD
        time.sleep(POLL_S)
    return False


def list_epochs(directory: Path) -> list[int]:
    """Return the numbers of the epochs in the directory of a role."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [int(stem) for stem, end in map(os.path.splitext, names) if end == ".json" and stem.isdecimal()]


def read_lease(directory: Path, number: int) -> Lease | None:
    """Return a lease; None while it is being created, or if it is damaged or was deleted."""
    path = directory / f"{number}.json"
    try:
        return decode_versioned(path.read_bytes(), Lease, str(path))
    except (FileNotFoundError, SchemaError, BadInput):
        return None


def _exit(message: str) -> NoReturn:
    """End this process at once, without a shutdown that would change files of its successor."""
    log.critical("%s", message)
    logging.shutdown()
    os._exit(FENCED)


@cache
def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""


@cache
def boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def this_process() -> Holder:
    """Return the identity of this process, with a new nonce."""
    pid = os.getpid()
    started = _process_start(pid)
    return Holder(socket.gethostname(), boot_id(), pid_namespace(), pid, started or 0, uuid.uuid4().hex)


def is_here(holder: Holder) -> bool:
    """Return whether a process runs, or ran, in this pid namespace since the last boot of this host."""
    return (holder.host, holder.boot, holder.pid_namespace) == (socket.gethostname(), boot_id(), pid_namespace())


def is_gone(holder: Holder) -> bool:
    """Return whether a process is known to have ended; False for one of another host, boot or pid namespace."""
    return is_here(holder) and _process_start(holder.pid) not in (holder.started, 0)


def _process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; 0 if it is unknown, None if it has ended."""
    try:
        os.kill(pid, 0)
        # The name of the program is in parentheses, and may contain any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return None
    except PermissionError:  # a process of another user
        return 0
    except FileNotFoundError:
        return 0 if not os.path.exists("/proc/self/stat") else None
    return None if state in "ZX" else int(fields[18])
