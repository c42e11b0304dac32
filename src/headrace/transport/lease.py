"""Leases: who holds a part of a run, and whether that process still lives, without comparing clocks of hosts.

The holder rewrites its lease every second with a higher counter. An observer measures on its own monotonic clock how
long the counter has not changed, so neither wall clocks nor clocks of other hosts matter. A holder of the same boot and
pid namespace is looked up by its process id instead: a restart on one host does not wait.

A lease prevents accidents, such as two launchers. It cannot stop a process that was paused and continues: `epochs` can.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path

import msgspec

from headrace.rollout.schema import SCHEMA

RENEWAL_S = 1.0
"""Interval between two renewals of a lease."""
LEASE_S = 15.0
"""Time without a renewal, on the observer's clock, after which a lease has expired."""


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
    """What an observer knows about a lease."""

    FREE = "free"
    HELD = "held"
    UNKNOWN = "unknown"
    """It was not renewed since the first look, and has not expired: look again."""


class Observer:
    """Decides whether a lease is held, from what was read at times of the observer's own clock."""

    def __init__(self, is_gone: Callable[[Holder], bool]) -> None:
        self._is_gone = is_gone
        self._seen: object = None
        self._since = 0.0

    def judge(self, name: int, lease: Lease | None, now: float) -> Verdict:
        """Judge the lease file `name` as read at `now`; None: its holder is about to write it, or it is damaged."""
        if lease is not None and (lease.released or self._is_gone(lease.holder)):
            return Verdict.FREE
        seen = (name, None if lease is None else (lease.holder.nonce, lease.counter))
        if self._seen is None:
            self._seen, self._since = seen, now
        elif seen != self._seen:
            return Verdict.HELD
        return Verdict.FREE if now - self._since > LEASE_S else Verdict.UNKNOWN


@cache
def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""


@cache
def boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def this_process() -> Holder:
    """Return this process as a holder, with a nonce of its own."""
    pid = os.getpid()
    started = _process_start(pid)
    return Holder(socket.gethostname(), boot_id(), pid_namespace(), pid, started or 0, uuid.uuid4().hex)


def is_here(holder: Holder) -> bool:
    """Whether a process is, or was, of this boot of this host and of this pid namespace."""
    return (holder.host, holder.boot, holder.pid_namespace) == (socket.gethostname(), boot_id(), pid_namespace())


def is_gone(holder: Holder) -> bool:
    """Whether a process is known to have ended: of the same boot and pid namespace, and no longer there."""
    return is_here(holder) and _process_start(holder.pid) not in (holder.started, 0)


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; 0 if it is unknown, None if it has ended."""
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
