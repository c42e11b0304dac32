"""A control group for one sandbox (cgroup v2): limits on the memory and the tasks of all its processes together.

Used where this process may make one: below an ancestor of its own group that has the controllers and is writable, such
as one that systemd has delegated. Elsewhere the limits are those of each process, and `code_runner` polls the sum.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

log = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
ENTER = 'echo $$ > "$0" && exec "$@"'
"""A shell script that moves itself into a group and becomes the program."""


class Cgroup:
    """A group below `parent`. Remove it when its processes have ended."""

    def __init__(self, parent: Path, memory_mb: int, tasks: int) -> None:
        self.folder = Path(mkdtemp(prefix="headrace-", dir=parent))
        limits = {"memory.max": memory_mb << 20, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": tasks}
        try:
            for name, limit in limits.items():
                if name != "memory.swap.max" or (self.folder / name).exists():  # a kernel may not account for swap
                    (self.folder / name).write_text(str(limit))
        except OSError:
            self.remove()
            raise

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that starts a program in the group."""
        return ["/bin/sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *command]

    def remove(self) -> None:
        with suppress(OSError):  # a process is still ending
            self.folder.rmdir()


def make_cgroup(memory_mb: int, tasks: int) -> Cgroup | None:
    """Return a new group; None where none can be made, so that only the limits of each process hold."""
    parent = usable_parent()
    if parent is None:
        return None
    try:
        return Cgroup(parent, memory_mb, tasks)
    except OSError as error:
        _report(parent, error.strerror)
        return None


@cache
def _report(parent: Path, problem: str) -> None:
    """Log a problem once, not for every sandbox."""
    log.warning("%s: no control group can be made in it: %s. Sandboxes have limits for each process", parent, problem)


@cache
def usable_parent() -> Path | None:
    """Return the group below which this process can start programs with limits, if there is one."""
    parent = find_parent(ROOT, OWN.read_text() if OWN.exists() else "")
    if parent is None:
        return None
    try:
        group = Cgroup(parent, 64, 16)
        works = subprocess.run(group.command(["true"]), stderr=subprocess.DEVNULL, check=False).returncode == 0
        group.remove()
    except OSError:  # a limit cannot be set
        return None
    return parent if works else None  # else no process can be moved there


def find_parent(root: Path, own: str) -> Path | None:
    """Return the nearest group above or at our own (a line `0::/path`) that has the controllers and is writable."""
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::/")), None)
    if path is None:
        return None
    folder = root / path.strip().lstrip("/")
    for group in (folder, *(above for above in folder.parents if above.is_relative_to(root))):
        with suppress(OSError):
            controllers = set((group / "cgroup.subtree_control").read_text().split())
            if {"memory", "pids"} <= controllers and all(
                os.access(p, os.W_OK) for p in (group, group / "cgroup.procs")
            ):
                return group
    return None
