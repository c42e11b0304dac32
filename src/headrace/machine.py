"""What this machine has: GPUs and memory, told without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
CGROUP = Path("/sys/fs/cgroup")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names under which CUDA knows them."""
    if (chosen := os.environ.get(VISIBLE)) is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.split() if found.returncode == 0 else []


def free_memory() -> int:
    """Bytes that could be taken now, in a container within its limit; half of all there is where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        most, taken = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if most == "max" else min(free, max(0, int(most) - int(taken)))
