"""Functions that do in a sandbox what functions do there, and what they must not. Rewards for `in_sandbox`, too."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = __name__
hoard: list[bytearray] = []


def same(value: Any) -> Any:
    return value


def spin_until(started: str, path: str) -> int:
    Path(started).touch()
    while not os.path.exists(path):
        pass
    return os.getpid()


def backtrack_for_ever(lock: str) -> None:
    """Holds `lock` until the process ends, in C code that never lets another thread run."""
    hold(lock)
    print("locked", flush=True)
    re.fullmatch("(a|aa)+b", "a" * 100)


def leave_a_process_and_hang(lock: str, started: str) -> None:
    """The process that it starts holds `lock`."""
    subprocess.Popen(["sleep", "3600"], pass_fds=[hold(lock)])
    Path(started).touch()
    time.sleep(3600)


def hold(lock: str) -> int:
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def want_memory(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


def keep_memory(megabytes: int) -> None:
    while True:
        hoard.append(bytearray(b"x" * (megabytes << 20)))


def mumble() -> None:
    raise ValueError("a lone surrogate: \ud800")


def read_input() -> str:
    return sys.stdin.read()


def run_event_loop() -> int:
    async def seven() -> int:
        return 7

    return asyncio.run(seven())


def length(text: str, data: Mapping[str, Any]) -> float:
    """A reward."""
    return float(len(text)) / data["most"]


def never(text: str, data: Mapping[str, Any]) -> float:
    """A reward that never comes."""
    while True:
        pass


def replace_same() -> str:
    """Tampers with the module for later calls."""
    globals()["same"] = lambda value: "replaced"
    return str(same(0))


def write_everywhere() -> None:
    """Forges messages on every open descriptor, and on that for its own result."""
    for descriptor in range(64):
        with suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x04\x93\xa6Resu")
    os._exit(0)
