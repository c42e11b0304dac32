"""A folder mounted through FUSE, like a network file system on one host: arguments SOURCE MOUNT_POINT.

The source is a folder, or a folder of an NFS server by its URL. Two mounts of the same source are two hosts. Each
remembers names, and that a name does not exist, for 30 s, and neither has locks, nor memory that processes share (files
are opened for direct access).
"""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.transport.nfs import NfsFiles

CACHED_S = 30


def missing() -> str | None:
    """Return why nothing can be mounted here; None if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse, or it is not ours"
    if os.geteuid() != 0:
        return "mounting needs root"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    try:
        import mfusepy  # noqa: F401 (it loads libfuse)
    except OSError:
        return "libfuse is not installed"
    return None


@contextmanager
def mounted(source: Path | str, point: Path) -> Iterator[int]:
    """Yield the process id of the file system's server."""
    if isinstance(source, Path):
        source.mkdir(parents=True, exist_ok=True)
    point.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-m", __spec__.name, str(source), str(point)])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(point):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process.pid
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)
        process.kill()
        process.wait()


def _serve(source: str, point: str) -> None:
    import mfusepy

    files, folder = (NfsFiles(source), "") if source.startswith("nfs://") else (os, source)

    class PassThrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def access(self, path: str, mode: int) -> int:
            return 0 if files.access(folder + path, mode) else -errno.EACCES

        def getattr(self, path: str, handle: Any = None) -> dict[str, Any]:
            status = files.lstat(folder + path) if handle is None else files.fstat(handle.fh)
            found = {name: getattr(status, name) for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")}
            times = {name: getattr(status, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {**found, **times}

        def readdir(self, path: str, handle: Any) -> list[str]:
            return [".", "..", *files.listdir(folder + path)]

        def open(self, path: str, handle: Any) -> int:
            handle.fh = files.open(folder + path, handle.flags)
            handle.direct_io = 1
            return 0

        def create(self, path: str, mode: int, handle: Any) -> int:
            handle.fh = files.open(folder + path, handle.flags | os.O_CREAT, mode)
            handle.direct_io = 1
            return 0

        def read(self, path: str, size: int, offset: int, handle: Any) -> bytes:
            return files.pread(handle.fh, size, offset)

        def write(self, path: str, content: bytes, offset: int, handle: Any) -> int:
            return files.pwrite(handle.fh, content, offset)

        def truncate(self, path: str, length: int, handle: Any = None) -> int:
            files.truncate(folder + path if handle is None else handle.fh, length)
            return 0

        def fsync(self, path: str, data_only: bool, handle: Any) -> int:
            files.fsync(handle.fh)
            return 0

        def fsyncdir(self, path: str, data_only: bool, handle: Any) -> int:
            return 0

        def release(self, path: str, handle: Any) -> int:
            files.close(handle.fh)
            return 0

        def rename(self, old: str, new: str) -> int:
            files.rename(folder + old, folder + new)
            return 0

        def link(self, target: str, source: str) -> int:
            files.link(folder + source, folder + target)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            files.mkdir(folder + path, mode)
            return 0

        def rmdir(self, path: str) -> int:
            files.rmdir(folder + path)
            return 0

        def unlink(self, path: str) -> int:
            files.unlink(folder + path)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            files.chmod(folder + path, mode)
            return 0

        def utimens(self, path: str, times: Any = None) -> int:
            files.utime(folder + path, ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, Any]:
            status = files.statvfs(folder + path)
            return {name: getattr(status, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")}

        def flock(self, path: str, handle: Any, operation: int) -> int:
            raise mfusepy.FuseOSError(errno.ENOLCK)

        def lock(self, path: str, handle: Any, command: int, lock: Any) -> int:
            raise mfusepy.FuseOSError(errno.ENOLCK)

    mfusepy.FUSE(
        PassThrough(),
        point,
        raw_fi=True,
        foreground=True,
        nothreads=isinstance(files, NfsFiles),
        entry_timeout=CACHED_S,
        negative_timeout=CACHED_S,
        attr_timeout=1,
        fsname="headrace-test",
    )


if __name__ == "__main__":
    _serve(*sys.argv[1:])
