"""The files of the journal: `journal-E.sqlite`, one for each epoch of the orchestrator; the newest one counts.

SQLite writes in place. So an orchestrator that was paused and replaced continues to write its own file, which is no
longer read. Its successor begins with a copy. `journal.sqlite`, of older versions and of copied runs, is epoch 0.

Between hosts neither locks nor shared memory can be relied on. There the only writer of a file keeps its write-ahead
log without either (SQLite's VFS `unix-none`, in exclusive mode), and readers read a copy (`copy_journal`).
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from headrace.machine import file_system

FIRST_JOURNAL = "journal.sqlite"
WAL_HEADER_BYTES = 32
HOSTS_VAR = "HEADRACE_HOSTS"
"""The number of hosts that take part in the run, in the environment of its processes; 1 if it is not set."""
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "fuse.")


def journals(root: Path) -> dict[int, Path]:
    """Return the journals of a run by epoch, oldest first."""
    names = os.listdir(root) if root.is_dir() else []
    epochs = {
        int(match[1] or 0): name for name in names if (match := re.fullmatch(r"journal(?:-(\d+))?\.sqlite", name))
    }
    return {epoch: root / epochs[epoch] for epoch in sorted(epochs)}


def newest_journal(root: Path) -> Path:
    """Return the newest journal of a run; if there is none, a path that does not exist."""
    return max(journals(root).items(), default=(0, root / FIRST_JOURNAL))[1]


def delete_journal(path: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(f"{path.name}{end}").unlink(missing_ok=True)


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal and its log without locks, also while a process on another host writes it.

    SQLite appends to the log, and copies pages from it to the database without changing the log. So a database and the
    log that was copied after it are consistent, unless SQLite restarted the log in between, which changes its header.
    """
    while True:
        header = _wal_header(source)
        shutil.copyfile(source, target)
        for end in ("-wal", "-journal"):
            part, copy = (path.with_name(f"{path.name}{end}") for path in (source, target))
            copy.unlink(missing_ok=True)
            if part.name in os.listdir(part.parent):
                with suppress(FileNotFoundError):  # its last writer has just ended
                    shutil.copyfile(part, copy)
        if header == _wal_header(source):
            return


def wal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def has_wal(path: Path) -> bool:
    """Return whether a journal has a write-ahead log; by a listing, since a host may cache that a name is missing."""
    return path.parent.is_dir() and wal_path(path).name in os.listdir(path.parent)


def _wal_header(path: Path) -> bytes:
    if has_wal(path):
        with suppress(FileNotFoundError), open(wal_path(path), "rb") as file:
            return file.read(WAL_HEADER_BYTES)
    return b""


def is_shared_between_hosts(directory: Path) -> bool:
    return int(os.environ.get(HOSTS_VAR, "1")) > 1 or network_file_system(directory) is not None


def network_file_system(directory: Path) -> str | None:
    """Return the type of file system of a directory if it is a network file system."""
    kind = file_system(directory)
    return kind if kind.startswith(_NETWORK_FILE_SYSTEMS) or kind == "fuse" else None
