"""Launching the supervisor over fake processes, and what became of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

LAUNCHER = str(Path(__file__).with_name("fake_launcher.py"))
LIMIT_S = 120.0
"""For anything that takes a moment on an idle machine; the fake processes would live longer."""


def launch(run: Path, *arguments: str) -> subprocess.Popen[str]:
    run.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, LAUNCHER, str(run), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=LIMIT_S)
    return launcher.returncode, out, err


def next_line(launcher: subprocess.Popen[str], beginning: str) -> str:
    """The next line of the launcher's output that begins so."""
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line begins with {beginning!r}")


def events(run: Path) -> list[list[str]]:
    path = run / "events"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_start(run: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len([event for event in events(run) if event[1] == "started"]) < count:
        assert time.monotonic() < deadline, "the fake processes did not start"
        time.sleep(0.02)


def pids(run: Path) -> list[int]:
    return [int(pid) for _, event, pid in events(run) if event == "started"]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")


def assert_all_gone(run: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(is_alive(pid) for pid in pids(run)):
        assert time.monotonic() < deadline, f"left behind: {[e for e in events(run) if is_alive(int(e[2]))]}"
        time.sleep(0.05)
