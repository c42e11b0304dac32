"""GPUs, memory, network, versions and caches of this machine, without torch; process limits, garbage collection."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import headrace

VISIBLE_GPUS_VAR = "CUDA_VISIBLE_DEVICES"
SIOCGIFADDR = 0x8915
"""Linux's ioctl request for the IPv4 address of a network interface."""
MAX_OPEN_FILES = 65_536
M_MMAP_THRESHOLD = -3
"""The option of C's `mallopt` for the size from which a block has a mapping of its own. Set, it stays constant."""
LARGE_BLOCK_BYTES = 1 << 17
CACHE_VARIABLE = "HEADRACE_CACHE"
"""The environment variable with the cache directory of Headrace; in a run, its storage root."""
COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""By the variable that names it, the folder of a compiler's cache."""
FROZEN_AT_START = gc.get_freeze_count()
"""Objects that the interpreter itself excludes from garbage collection: some hundreds from Python 3.12 on."""


def own_versions() -> dict[str, str]:
    """Return the versions on which numbers depend; builds of one version for other devices count as the same."""
    import importlib.metadata  # a slow import

    versions = {"headrace": headrace.__version__}  # of a source folder, which has no metadata
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["headrace"] = importlib.metadata.version("headrace")
    versions |= {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    return {**versions, "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def cache_directory() -> Path:
    """Return `$HEADRACE_CACHE`, else the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def keep_compiled_kernels() -> None:
    """Name a lasting directory for compiled kernels in this process's environment; call it before importing torch.

    The default of torch is in /tmp, which may be gone in the next run. Variables that are set, and a cache directory
    that cannot be written, are left alone.
    """
    for variable, name in COMPILE_CACHES.items():
        folder = cache_directory() / "compiled" / name
        if variable not in os.environ:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ[variable] = str(folder)


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that CUDA may use in this process."""
    if (visible := os.environ.get(VISIBLE_GPUS_VAR)) is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [index for index, _, _ in _query_gpus()]


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises `OSError` if it does not exist or has none."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
    return socket.inet_ntoa(answer[20:24])


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_memory() -> int | None:
    """Return the bytes of memory of the smallest visible GPU; None if there is none, or it is not known."""
    visible = {name.strip() for name in visible_gpus()}
    sizes = [size for index, uuid, size in _query_gpus() if {index, uuid} & visible]
    return min((int(size) << 20 for size in sizes if size.isdigit()), default=None)


@cache
def _query_gpus() -> list[list[str]]:
    """Return index, UUID and MiB of memory of all GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.count(",") == 2]


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine within the limits of this process's control groups (containers), of version 1 or 2.

    `root` is the directory with `proc` and `sys`.
    """

    root: Path = Path("/")

    def total(self) -> int:
        """Return the bytes of memory that this process and its children may use together."""
        installed = self._meminfo("MemTotal")
        if installed is None:
            installed = int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
        return min([installed, *(limit for limit, _ in self._limits())])

    def free(self) -> int:
        """Return the bytes of available memory; half of all memory where that is unknown."""
        available = self._meminfo("MemAvailable")
        if available is None:
            return self.total() // 2
        return min([available, *(max(0, limit - used) for limit, used in self._limits())])

    def swap(self) -> int:
        """Return the bytes of swap space."""
        return self._meminfo("SwapTotal") or 0

    def oom_kills(self) -> int | None:
        """Return how many processes the kernel has ended because memory was short; None if it does not report that.

        Counted are those of this process's control group; those of the whole machine where a group has no count.
        """
        for group in self._groups():
            for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
                if (count := _counters(group / name).get("oom_kill")) is not None:
                    return count
        return _counters(self.root / "proc/vmstat").get("oom_kill")

    def _meminfo(self, name: str) -> int | None:
        kilobytes = _counters(self.root / "proc/meminfo").get(f"{name}:")
        return None if kilobytes is None else kilobytes << 10

    def _limits(self) -> Iterator[tuple[int, int]]:
        """Yield limit and used bytes of each control group; cached files do not count as used."""
        for group in self._groups():
            for limit_file, used_file, prefix in (
                ("memory.max", "memory.current", ""),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            ):
                with suppress(OSError, ValueError):  # another version, or "max": no limit
                    limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
                    stat = _counters(group / "memory.stat")
                    cached = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                    yield limit, max(0, used - cached)

    def _groups(self) -> Iterator[Path]:
        """Yield the directories of this process's memory control group and of those around it."""
        try:
            lines = (self.root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            mount = self.root / "sys/fs/cgroup" / controllers
            own = mount / path.strip("/")
            while own != mount:
                yield own  # it may not exist: in a container the path may be that of the host
                own = own.parent
            yield mount


def _counters(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines of a name and a number; empty if it cannot be read."""
    try:
        pairs = [line.split()[:2] for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class KernelProcess(NamedTuple):
    """A process as the kernel lists it."""

    parent: int
    state: str
    """`R` running, `S` sleeping, `D` waiting for a device, `T` stopped by a signal, `Z` ended."""
    name: str


def list_processes(root: Path = Path("/proc")) -> dict[int, KernelProcess]:
    """Return the processes of this host by id; empty where the kernel does not list them."""
    processes = {}
    for path in root.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            head, _, rest = path.read_text(errors="replace").rpartition(")")  # the name may contain anything
            state, parent = rest.split()[:2]
            processes[int(path.parent.name)] = KernelProcess(int(parent), state, head.partition("(")[2])
    return processes


def free_memory() -> int:
    """Return the bytes of available host memory."""
    return HostMemory().free()


def file_system(directory: Path) -> str:
    """Return the type of file system of a directory, such as `ext4`; empty where the kernel has no list of mounts."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return ""
    resolved, best = directory.resolve(), (0, "")
    for line in table.read_text().splitlines():
        fields, _, source = line.partition(" - ")
        mount_point, kind = Path(fields.split()[4]), source.split()[0]
        if resolved.is_relative_to(mount_point):
            best = max(best, (len(mount_point.parts), kind))
    return best[1]


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files to `MAX_OPEN_FILES`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def return_large_blocks() -> None:
    """Return every large block of memory to the system once it is freed, in this process; only with glibc.

    By default glibc keeps blocks in its heap from the first large one that was freed on, up to 32 MB each. The heap of
    a server grows then, since small blocks that stay are allocated between them.
    """
    import ctypes  # a slow import

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect no garbage in the block, and exclude its objects from later collections; for imports of large libraries.

    torch and transformers are a million objects that stay; collections take a quarter of the time of their imports.
    """
    gc.disable()
    sys.meta_path.insert(0, _SCANS_ONCE)
    try:
        yield
    finally:
        sys.meta_path.remove(_SCANS_ONCE)
        gc.freeze()
        gc.enable()


class _ScansOnce(MetaPathFinder):
    """Enlarges a cache of transformers, which else reads the source files of its 500 models twice at import.

    The second scan finds no folder of the first in the cache, which has 128 entries.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "transformers.utils.import_utils" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_enlarge(module: ModuleType) -> None:
                execute(module)
                scan = getattr(module, "create_import_structure_from_path", None)
                if (uncached := getattr(scan, "__wrapped__", None)) is not None:
                    vars(module)["create_import_structure_from_path"] = cache(uncached)

            vars(spec.loader)["exec_module"] = execute_and_enlarge
        return spec


_SCANS_ONCE = _ScansOnce()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collections in the block; enter once everything is loaded.

    A full collection over the objects of torch and transformers blocks the process for a third of a second or more,
    about every thousand requests. Where objects were excluded before, all stay so: only all at once can be included.
    """
    frozen_before = gc.get_freeze_count() > FROZEN_AT_START
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
