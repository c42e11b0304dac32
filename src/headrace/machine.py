"""GPUs and memory of this machine, without torch, and limits and garbage collector of this process."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VISIBLE_GPUS_VAR = "CUDA_VISIBLE_DEVICES"
MAX_OPEN_FILES = 65_536
CGROUP = Path("/sys/fs/cgroup")


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that CUDA may use in this process."""
    if (visible := os.environ.get(VISIBLE_GPUS_VAR)) is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else []


def free_memory() -> int:
    """Return the bytes of available memory, within a container's limit; half of all memory where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files to `MAX_OPEN_FILES`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect no garbage in the block, and exclude its objects from later collections; for imports of large libraries.

    torch and transformers are a million objects that stay; collections take a quarter of the time of their imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collections in the block; enter once everything is loaded.

    A full collection over the objects of torch and transformers blocks the process for a third of a second or more,
    about every thousand requests. Where objects were excluded before, all stay so: only all at once can be included.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
