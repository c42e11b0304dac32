"""Faults of disks, processes and clocks, for tests with real runs. Everything random comes from a seed.

Files are damaged by `flip_bit` and `truncate`. A process that is started with the variables of `failing_calls` or
`clock_jump` has a shim loaded, which the C compiler makes; `stopped` acts on a running one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from headrace.transport.run_dir import RunDir

NOT_COVERED = (
    "logs",
    "status",
    "turns",
    "metrics.jsonl",
    "heartbeat.json",
    "summary.md",
    "reward.svg",
    ".canary-",
    ".drafts",
)
"""Logs, plots, the present state of processes and hosts, and unfinished files of a killed process, which no one reads.

By the beginning of their path.
"""


class Flip(NamedTuple):
    """One bit of a file of a run, by its path in the run directory."""

    file: Path
    bit: int


def files_of(run: RunDir) -> list[Path]:
    """The files that a flip may hit, by their path in the run directory."""
    paths = (path.relative_to(run.root) for path in sorted(run.root.rglob("*")) if path.is_file())
    return [
        path
        for path in paths
        if not (str(path).startswith(NOT_COVERED) or path.name.endswith(".lock")) and (run.root / path).stat().st_size
    ]


def random_flips(run: RunDir, count: int, seed: int) -> list[Flip]:
    """Flips in files chosen at random, so that small ones are hit as often as large ones."""
    rng, files = random.Random(seed), files_of(run)
    chosen = [rng.choice(files) for _ in range(count)]
    return [Flip(file, rng.randrange(8 * (run.root / file).stat().st_size)) for file in chosen]


def flip_bit(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip a bit for some time."""
    flip_bit(path, bit)
    try:
        yield
    finally:
        flip_bit(path, bit)


def truncate(path: Path, share: float) -> None:
    """Cut a file to this share of its size."""
    os.truncate(path, int(path.stat().st_size * share))


@cache
def shim() -> Path | None:
    """The shared library of `shim.c`; None without a C compiler, or where the linker cannot load it."""
    compiler = shutil.which("cc")
    if compiler is None or not Path("/proc/self/fd").exists():
        return None
    library = Path(tempfile.mkdtemp(prefix="headrace-faults-")) / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True)
    return library


def failing_calls(call: str, path: str, kind: str, number: int = 1) -> dict[str, str]:
    """Variables of a process in which calls on a path fail, from the given one on.

    `call`: open, read, write, fsync, rename or any; `path`: a part of it; `kind`: eio, enospc (a full disk), kill (at
    this named point), slow=MILLISECONDS (a slow disk, or with fsync a delayed one).
    """
    return {"LD_PRELOAD": str(shim()), "FAULT": f"{call}:{path}:{number}:{kind}"}


def clock_jump(seconds: int, delay_s: int) -> dict[str, str]:
    """Variables of a process whose wall clock jumps once it has run for a while."""
    return {"LD_PRELOAD": str(shim()), "FAULT_CLOCK": f"{seconds}:{delay_s}"}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for some time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
