"""What the driver of a run and the node agents on its hosts send each other, as JSON over HTTP.

    GET  /health                -> Health      for probes; needs no key
    GET  /run                   -> RunFacts    what a host needs to check itself before it joins
    POST /nodes/NAME            Join -> Joined, or 409 with a Refusal
    POST /nodes/NAME/report     Report -> Orders, held for up to `HOLD_S`; 410: the lease was lost, join again
    GET  /announcements?after=N -> News, held for up to `ANNOUNCEMENT_HOLD_S`
    POST /announcements         Announcement
    POST /scale                 Scale -> Scaled, or 409 with a Refusal

Every other request carries `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from headrace.launch.hosts.base import HostRole, MemoryAtEnd

LEASE_S = 20.0
"""A host that has not reported for so long is lost; a node that could not report for so long kills its processes."""
REJOIN_S = 300.0
"""How long a node that has lost its driver tries to join again."""
HOLD_S = 0.5
"""How long an answer to a report waits for a command."""
ANNOUNCEMENT_HOLD_S = 5.0
MAX_BODY_BYTES = 1 << 20
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class DriverAddress(msgspec.Struct, frozen=True):
    """The content of `driver.json` in the run directory, which only its owner may read."""

    url: str
    key: str

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def __repr__(self) -> str:
        """Leave the key out: representations end up in logs."""
        return f"DriverAddress({self.url!r})"


class RunFacts(msgspec.Struct, frozen=True):
    directory: str
    """The path of the run directory, the same on all hosts."""
    canary: str
    """The folder in it with the files by which the hosts prove that they share it."""
    interface: str | None = None
    """The network interface whose address a host advertises; None: the one on its route to the driver."""
    lease_s: float = LEASE_S
    rejoin_s: float = REJOIN_S


class Health(msgspec.Struct, frozen=True):
    hosts: int
    """Hosts that take part at the moment."""


class Join(msgspec.Struct, frozen=True):
    """A host, as its node agent describes it."""

    nonce: str
    """Different at every join: processes that were started before are gone."""
    address: str
    check_port: int
    """The other hosts dial this port to check the address; it answers with the nonce."""
    gpus: Sequence[str]
    cores: int
    python: str
    """The path of its interpreter."""
    versions: Mapping[str, str]
    clock: float
    """Its wall clock, in seconds since 1970."""
    write_s: float = 0.0
    """Seconds of a durable write into the run directory."""
    problem: str = ""
    """Why the host cannot take part, if it knows."""
    role: HostRole = ""
    """What the host is meant for; empty: anything."""
    replaces: str = ""
    """The nonce of the same agent's last join, whose processes it has killed."""


class Joined(msgspec.Struct, frozen=True):
    warnings: Sequence[str] = ()


class Refusal(msgspec.Struct, frozen=True):
    message: str
    again: bool = False
    """Whether the same request may succeed later."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    process: int
    """Number of the process, unique in the run."""
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: str

    def __repr__(self) -> str:
        """Leave the environment out, which has keys."""
        return f"Start({self.process}, {self.name!r}, {self.argv!r})"


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    process: int
    number: int


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Kill the process and its children."""

    process: int


class Dial(msgspec.Struct, frozen=True, tag="dial"):
    """Check that the port of another host can be reached."""

    name: str
    nonce: str
    address: str
    port: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop all processes, and end the node agent."""


Command = Start | Signal | Kill | Dial | Stop


class ProcessState(msgspec.Struct, frozen=True):
    pid: int = 0
    exit_status: int | None = None
    peak_bytes: int = 0
    memory: MemoryAtEnd | None = None
    """Of a process that has ended."""


class Report(msgspec.Struct, frozen=True):
    """Renews the lease of a host. Repeating a report has no effect."""

    nonce: str
    done: int = 0
    """Number of the last command that was carried out."""
    processes: Mapping[int, ProcessState] = {}
    dialed: Mapping[str, str] = {}
    """By the nonce of another host: why it cannot be reached, or empty."""
    free_ports: Sequence[int] = ()
    leaving: bool = False
    """The host stops its processes and takes no new ones."""
    left: bool = False
    """All of its processes have ended. It is the last report."""


class Orders(msgspec.Struct, frozen=True):
    commands: Sequence[tuple[int, Command]] = ()
    """Numbered from 1, in order; those that were not reported as done are sent again."""


class Announcement(msgspec.Struct, frozen=True):
    """A path, relative to the run directory, that exists now, or no longer does."""

    path: str
    withdrawn: bool = False


class News(msgspec.Struct, frozen=True):
    seq: int
    """To be sent as `after` in the next request."""
    entries: Sequence[tuple[int, str, bool]] = ()
    """Number, path, and whether it was withdrawn."""


class Scale(msgspec.Struct, frozen=True):
    inference: int


class Scaled(msgspec.Struct, frozen=True):
    message: str
