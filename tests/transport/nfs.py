"""NFS 4.0 without a kernel that knows it: the server nfs-ganesha, and a client on libnfs with the functions of `os`.

Needs root and Debian's packages nfs-ganesha, nfs-ganesha-vfs and libnfs13. libnfs caches no data and renames no file
that is deleted while it is open.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace

CONFIG = """
NFS_CORE_PARAM {{ NFS_Protocols = 4; NFS_Port = {port}; Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false; }}
NFSv4 {{ RecoveryBackend = fs; Lease_Lifetime = 120; RecoveryRoot = {directory}/recovery; Graceless = true; Minor_Versions = 0; }}
EXPORT {{ Export_Id = 1; Path = {folder}; Pseudo = /export; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
  Protocols = 4; FSAL {{ Name = VFS; }} }}
"""  # noqa: E501


def missing() -> str | None:
    """Return why there is no NFS here; None if there is."""
    if os.geteuid() != 0 or shutil.which("ganesha.nfsd") is None or ctypes.util.find_library("nfs") is None:
        return "NFS needs root, nfs-ganesha, nfs-ganesha-vfs and libnfs13"
    return None


@contextmanager
def exported(folder: Path, directory: Path) -> Iterator[str]:
    """Serve a folder by NFS until the end of the `with` statement; yields its URL. The server uses `directory`."""
    folder.mkdir(parents=True, exist_ok=True)
    (directory / "recovery").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (directory / "conf").write_text(CONFIG.format(port=port, directory=directory, folder=folder))
    (log := directory / "log").touch()
    command = ["ganesha.nfsd", "-F", "-f", directory / "conf", "-L", log, "-p", directory / "pid"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while "NFS SERVER INITIALIZED" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"nfs://127.0.0.1/export?version=4&nfsport={port}"
    finally:
        server.kill()
        server.wait()


MAX_WRITE_BYTES = 2048
"""libnfs 4.0 cannot encode more than about 3,500 bytes in a call of NFS 4."""


class _Entry(ctypes.Structure):
    """The beginning of libnfs' `struct nfsdirent`."""

    _fields_ = (("next", c_void_p), ("name", c_char_p))


NUMBERS = (
    *("st_dev", "st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blksize", "st_blocks"),
    *("atime", "mtime", "ctime", "atime_rest", "mtime_rest", "ctime_rest", "used"),
)
"""Of libnfs' `struct nfs_stat_64`, 64 bits each; times in seconds and nanoseconds."""


class NfsFiles:
    """Files of a URL by the names of `os`. Not for threads.

    Every open file has a client of its own: after a failed OPEN the next one of the same client is refused, because
    libnfs 4.0 does not count it.
    """

    def __init__(self, url: str) -> None:
        self._url, self._handles, self._numbers = url, dict[int, tuple[c_void_p, c_void_p]](), itertools.count(1)
        self._nfs = ctypes.CDLL(ctypes.util.find_library("nfs"))
        for name in ("nfs_init_context", "nfs_parse_url_dir", "nfs_readdir"):
            getattr(self._nfs, name).restype = c_void_p
        self._nfs.nfs_get_error.restype = c_char_p
        self._client = self._connect()

    def _connect(self) -> c_void_p:
        client = c_void_p(self._nfs.nfs_init_context())
        self._nfs.nfs4_set_client_name(client, f"{os.getpid()}-{next(self._numbers)}".encode())
        where = c_void_p(self._nfs.nfs_parse_url_dir(client, self._url.encode()))
        server, path = ctypes.cast(where, POINTER(c_char_p))[:2]
        self._call(client, "mount", server, path)
        return client

    def _call(self, client: c_void_p, function: str, *arguments: object) -> int:
        words = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
        code = getattr(self._nfs, f"nfs_{function}")(client, *words)
        if code < 0:
            raise OSError(-code, self._nfs.nfs_get_error(client).decode())
        return int(code)

    def _call_alone(self, function: str, *arguments: object) -> None:
        """Call a function that opens the file for a moment. libnfs 4.0 cannot change the attributes of folders."""
        if stat.S_ISDIR(self.lstat(str(arguments[0])).st_mode):
            return
        client = self._connect()
        try:
            self._call(client, function, *arguments)
        finally:
            self._nfs.nfs_destroy_context(client)

    def _status(self, client: c_void_p, function: str, which: object) -> SimpleNamespace:
        numbers = (c_uint64 * len(NUMBERS))()
        self._call(client, function, which, numbers)
        found = dict(zip(NUMBERS, numbers, strict=True))
        times = {f"st_{name}_ns": found[name] * 10**9 + found[f"{name}_rest"] for name in ("atime", "mtime", "ctime")}
        return SimpleNamespace(**found, **times)

    def lstat(self, path: str) -> SimpleNamespace:
        return self._status(self._client, "lstat64", path)

    def fstat(self, number: int) -> SimpleNamespace:
        client, handle = self._handles[number]
        return self._status(client, "fstat64", handle)

    def exists(self, path: str) -> bool:
        try:
            return bool(self.lstat(path))
        except FileNotFoundError:
            return False

    def access(self, path: str, mode: int) -> bool:
        return self.exists(path)

    def listdir(self, path: str) -> list[str]:
        directory, names = c_void_p(), []
        self._call(self._client, "opendir", path, byref(directory))
        while entry := self._nfs.nfs_readdir(self._client, directory):
            names.append((ctypes.cast(entry, POINTER(_Entry)).contents.name or b"").decode())
        self._nfs.nfs_closedir(self._client, directory)
        return [name for name in names if name not in (".", "..")]

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        client, handle, number = self._connect(), c_void_p(), next(self._numbers)
        try:
            if flags & os.O_EXCL or (flags & os.O_CREAT and not self.exists(path)):
                self._call(client, "create", path, c_int(flags), c_int(mode), byref(handle))  # always exclusive
            else:
                self._call(client, "open", path, c_int(flags), byref(handle))
        except OSError:
            self._nfs.nfs_destroy_context(client)
            raise
        self._handles[number] = client, handle
        return number

    def close(self, number: int) -> None:
        client, handle = self._handles.pop(number)
        self._call(client, "close", handle)
        self._nfs.nfs_destroy_context(client)

    def pread(self, number: int, size: int, offset: int) -> bytes:
        (client, handle), buffer = self._handles[number], ctypes.create_string_buffer(size)
        count = self._call(client, "pread", handle, c_uint64(offset), c_uint64(size), buffer)
        return buffer.raw[:count]

    def pwrite(self, number: int, content: bytes, offset: int) -> int:
        (client, handle), written = self._handles[number], 0
        while part := content[written : written + MAX_WRITE_BYTES]:
            written += self._call(client, "pwrite", handle, c_uint64(offset + written), c_uint64(len(part)), part)
        return written

    def fsync(self, number: int) -> None:
        client, handle = self._handles[number]
        self._call(client, "fsync", handle)

    def truncate(self, which: str | int, length: int) -> None:
        if isinstance(which, str):
            self._call_alone("truncate", which, c_uint64(length))
        else:
            client, handle = self._handles[which]
            self._call(client, "ftruncate", handle, c_uint64(length))

    def chmod(self, path: str, mode: int) -> None:
        self._call_alone("chmod", path, c_int(mode))

    def utime(self, path: str, ns: tuple[int, int] | None) -> None:
        pairs = [part for time_ns in ns or (time.time_ns(),) * 2 for part in divmod(time_ns // 1000, 10**6)]
        self._call_alone("utimes", path, (ctypes.c_long * 4)(*pairs))

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs("/")

    def rename(self, old: str, new: str) -> None:
        self._call(self._client, "rename", old, new)

    def link(self, source: str, target: str) -> None:
        self._call(self._client, "link", source, target)

    def mkdir(self, path: str, mode: int) -> None:
        self._call(self._client, "mkdir2", path, c_int(mode))

    def rmdir(self, path: str) -> None:
        self._call(self._client, "rmdir", path)

    def unlink(self, path: str) -> None:
        self._call(self._client, "unlink", path)
