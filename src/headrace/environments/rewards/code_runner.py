"""The program that runs a solution against its tests: `python -I code_runner.py`, with the standard library alone.

It reads one line of JSON from its standard input and answers with one. It executes nothing of the solution itself:
every test has a process of its own, forked from here, with limits, a directory that is removed afterwards, and nothing
to read but the test's input. What that process has started ends with it; when the standard input closes, all ends.

Of tests that compare an output, neither this program nor the processes below it ever see the expected one.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from math import ceil
from types import ModuleType
from typing import Any, NoReturn

LINUX = sys.platform == "linux"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks at a test's process."""
REPORT = 3
"""The descriptor on which a test's process says that the test has passed, or what the function returned."""
SPARE_TASKS = 64
"""Processes and threads that a solution may have besides all those of its user. A superuser has no limit."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Job = dict[str, Any]


def run_test(job: Job, test: dict[str, Any], deadline: float) -> str | None:
    """What the test's process wrote if it ended as it should, else None.

    A program has to end with status 0; an assertion or a function has to write a random token first, which no `exit`
    and no guess does.
    """
    token = os.urandom(16).hex().encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, tempfile.TemporaryFile() as given:
        given.write(test.get("input", "").encode(errors="replace"))
        given.seek(0)
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            _be_the_test(job, test, token, directory, given.fileno(), writing)
        os.close(writing)
        try:
            status, written = _watch(pid, reading, directory, job, deadline)
        finally:
            os.close(reading)
            _end_descendants(pid)
    if test["kind"] == "program":
        return written.decode(errors="replace") if status == 0 else None
    return written[len(token) :].decode(errors="replace") if written.startswith(token) else None


def _watch(pid: int, reading: int, directory: str, job: Job, deadline: float) -> tuple[int | None, bytes]:
    """Until it ends, or has to be ended: its exit status (None if it was ended), and what it wrote."""
    written, status, pause = bytearray(), None, FIRST_PAUSE
    watched = [sys.stdin.fileno(), reading]
    while (left := deadline - time.monotonic()) > 0 and len(written) <= job["max_output"]:
        ready = select.select(watched, [], [], min(pause, left) if status is None else 0)[0]
        if sys.stdin.fileno() in ready:  # nobody writes there: whoever asked is gone
            sys.exit(1)
        if reading in ready:
            content = os.read(reading, 1 << 16)
            written += content
            if not content:
                watched.remove(reading)
        elif status is not None:
            return status, bytes(written)
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
        elif pause == LONGEST_PAUSE and _used_mb(directory) > job["disk_mb"]:
            break
        else:
            pause = min(2 * pause, LONGEST_PAUSE)
    return None, b""


def _be_the_test(job: Job, test: dict[str, Any], token: bytes, directory: str, given: int, writing: int) -> NoReturn:
    """What the forked process does; it never returns to the code above."""
    status = 1
    try:
        _confine(job, directory, given, writing, is_program=test["kind"] == "program")
        solution = ModuleType("__main__" if test["kind"] == "program" else "solution")
        sys.modules[solution.__name__] = solution
        try:
            exec(compile(job["code"], "solution.py", "exec"), solution.__dict__)
            if test["kind"] == "assert":
                exec(compile(test["code"], "test.py", "exec"), solution.__dict__)
                os.write(REPORT, token)
            elif test["kind"] == "call":
                function = eval(job["entry"], solution.__dict__)
                os.write(REPORT, token + json.dumps(function(*test["arguments"])).encode())
            else:
                _join_threads()
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
    finally:  # whatever it raised: nobody would read it
        os._exit(status & 0xFF)


def _confine(job: Job, directory: str, given: int, writing: int, *, is_program: bool) -> None:
    """A session, a directory, limits and descriptors of its own."""
    os.setsid()
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(directory)
    os.environ.update(HOME=directory, TMPDIR=directory)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for source, target in ((given, 0), (writing if is_program else nowhere, 1), (nowhere, 2), (writing, REPORT)):
        os.dup2(source, target)
    os.closerange(REPORT if is_program else REPORT + 1, 1 << 16)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w")
    limits = {
        resource.RLIMIT_CPU: ceil(job["timeout"]) + 1,
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_CORE: 0,
    }
    if LINUX:  # elsewhere the one is not held, and the other cannot be told
        limits |= {resource.RLIMIT_DATA: job["memory_mb"] << 20, resource.RLIMIT_NPROC: job["tasks"]}
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (least, least))


def _join_threads() -> None:
    """A program ends when its last thread does."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _end_descendants(pid: int) -> None:
    """The test's process with its group, and those that it started and that have left the group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    while True:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """On Linux an orphan becomes a child of this process."""
    if not LINUX:
        return []
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _used_mb(directory: str) -> float:
    blocks = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it has just been removed
                blocks += os.lstat(os.path.join(parent, name)).st_blocks
    return blocks * 512 / 2**20


def _tasks_of_user() -> int:
    """Processes and threads."""
    tasks = 0
    for entry in os.scandir("/proc"):
        with suppress(OSError):  # it has just ended
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{entry.name}/task"))
    return tasks


def main() -> None:
    job: Job = json.loads(sys.stdin.buffer.readline())
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        job["tasks"] = _tasks_of_user() + SPARE_TASKS
    deadline = time.monotonic() + job["timeout"]
    try:
        print(json.dumps([run_test(job, test, deadline) for test in job.pop("tests")]))
    except SystemExit:  # the parent, which removes this directory, is gone
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
