"""The program that runs a solution against its tests: `python -I code_runner.py`, with the standard library only.

It reads one line of JSON from its standard input and writes one. It does not execute the solution itself: every test
runs in a forked process with limits, a temporary directory, and nothing to read but the test's input. The descendants
of that process are watched and killed with it; all processes end when the standard input closes.

With `contained` in the job it runs inside bubblewrap or a container (`isolation.py`), as the first process of a PID
namespace. Otherwise it enters one itself where Linux allows it: a solution can then signal nothing outside of it, and
cannot stop or kill this program. Where that is refused, as in many containers, and on other systems, a solution can
signal whatever its user can: `os.kill(-1, 9)` ends every process of the user.

The expected output of a test is never sent to this program or its children. The functions that confine a process and
end its descendants also serve the processes of `sandbox.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from contextlib import suppress
from math import ceil
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

LINUX = sys.platform == "linux"
FIRST_POLL_S, MAX_POLL_S = 0.001, 0.05
"""Interval between two polls of a test's process."""
REPORT_FD, TOKEN_FD = 3, 4
"""Descriptors of a test's process: for its report (passed, or the return value), and for reading its token."""
TOKEN_BYTES = 32
MIN_ENTRY_BYTES = 4096
"""Bytes of disk that a file or a directory counts as at least."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES_V3 = 0x20080522
"""The version of the structures of `capset`."""
MAX_OPEN_FILES = 256
"""Per process: open files can hold memory that no other limit counts."""
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000

LIBC = ctypes.CDLL(None, use_errno=True)

Job = dict[str, Any]


class _FilterProgram(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class Usage(NamedTuple):
    """What all descendants of a process use: tasks (processes and threads), resident bytes, seconds of CPU time."""

    tasks: int = 0
    memory: int = 0
    cpu_s: float = 0.0


class Clock:
    """The time budget of all tests: `seconds` of processor time, and `wall_factor` times that by the clock.

    Processor time is what counts, so that a right answer does not fail on a busy machine. Where it is not available,
    wall-clock time is used.
    """

    def __init__(self, seconds: float, wall_factor: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._wall_factor = wall_factor if LINUX else 1.0
        self.running = 0.0
        """CPU time of the running test's processes at the last check, in seconds."""

    def is_over(self, pid: int) -> bool:
        """Return whether the running test, process `pid`, and those before it have used up the budget."""
        passed = time.monotonic() - self._began
        if not self._seconds <= passed < self._seconds * self._wall_factor:
            return passed >= self._seconds
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = ended.ru_utime + ended.ru_stime
        with suppress(OSError):  # the process has ended and was waited for
            used += max(self.running, time.clock_gettime(~pid << 3 | 2))  # Linux's clock id of a process
        return used >= self._seconds


def run_test(job: Job, test: dict[str, Any], clock: Clock) -> str | None:
    """Return the output of the test's process if it succeeded, else None.

    A program has to end with status 0; an assertion or a function has to write a random token first, which no `exit`
    and no guess does. The token is made after the fork and sent through a pipe: no frame of the solution has it.
    """
    directory = tempfile.mkdtemp()
    reading, writing = os.pipe()
    token_reading, token_writing = os.pipe()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(test.get("input", "").encode(errors="replace"))
        stdin.seek(0)
        if (pid := os.fork()) == 0:
            _execute_test(job, test, directory, (stdin.fileno(), writing, token_reading))
    os.close(writing)
    os.close(token_reading)
    token = os.urandom(TOKEN_BYTES // 2).hex().encode()
    try:
        with suppress(BrokenPipeError):  # it has ended already, or is a program
            os.write(token_writing, token)
        os.close(token_writing)
        status, written = _watch(pid, reading, directory, job, clock)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        end_descendants()
        remove_tree(directory)
    if test["kind"] == "program":
        return written.decode(errors="replace") if status == 0 else None
    return written[len(token) :].decode(errors="replace") if written.startswith(token) else None


def _watch(pid: int, reading: int, directory: str, job: Job, clock: Clock) -> tuple[int | None, bytes]:
    """Wait for a process within its limits; return its exit status (None if it exceeded them) and its output."""
    written, status, pause = bytearray(), None, FIRST_POLL_S
    watched = [sys.stdin.fileno(), reading]
    clock.running, next_check = 0.0, time.monotonic() + MAX_POLL_S
    while not clock.is_over(pid) and len(written) <= job["max_output"]:
        ready = select.select(watched, [], [], pause if status is None else 0)[0]
        if sys.stdin.fileno() in ready:  # closed: the parent has ended
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
        else:
            pause = min(2 * pause, MAX_POLL_S)
        if status is None and time.monotonic() >= next_check:
            usage = measure_descendants(os.getpid())
            clock.running = usage.cpu_s
            if exceeds_limits(usage, job) or _exceeds_disk_limit(directory, job["disk_mb"] << 20):
                break
            next_check = time.monotonic() + MAX_POLL_S
    return None, b""


def _execute_test(job: Job, test: dict[str, Any], directory: str, descriptors: tuple[int, int, int]) -> NoReturn:
    """Run the test in the forked process, and exit.

    The functions that are needed after the solution are looked up before, since a solution may replace them.
    """
    status = 1
    leave, read, write, execute, evaluate, dumps = os._exit, os.read, os.write, exec, eval, json.dumps
    try:
        os.setsid()
        os.chdir(directory)
        os.environ.update(HOME=directory, TMPDIR=directory)
        _install_descriptors(*descriptors, is_program=test["kind"] == "program")
        drop_privileges(job, directory)
        solution = ModuleType("__main__" if test["kind"] == "program" else "solution")
        sys.modules[solution.__name__] = solution
        try:
            check = compile(test["code"], "test.py", "exec") if test["kind"] == "assert" else None
            execute(compile(job["code"], "solution.py", "exec"), solution.__dict__)
            if check is not None:
                execute(check, solution.__dict__)
                write(REPORT_FD, read(TOKEN_FD, TOKEN_BYTES))
            elif test["kind"] == "call":
                function = evaluate(job["entry"], solution.__dict__)
                result = dumps(function(*test["arguments"]))
                write(REPORT_FD, read(TOKEN_FD, TOKEN_BYTES) + result.encode())
            else:
                for thread in threading.enumerate():  # as at the end of any Python program
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
    finally:  # exceptions are not reported
        leave(status & 0xFF)


def drop_privileges(job: Job, directory: str | None = None) -> None:
    """Set the limits, user, capabilities and filter of a process for untrusted code; its children inherit them.

    A superuser's code outside of a container becomes another user, who owns the `directory`. If that user could not
    read the interpreter, its processes count as that user's, and its files are the superuser's.
    """
    _limit_resources(job)
    if job["user"] is not None and not job["contained"]:
        if directory is not None:
            os.chown(directory, job["file_user"], -1)
        _change_user(job["user"], job["file_user"])
    if LINUX:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # reset by the change of user
        LIBC.prctl(PR_SET_DUMPABLE, 1)
        LIBC.capset(struct.pack("Ii", CAPABILITIES_V3, 0), bytes(24))  # drop all capabilities of a superuser
    if job["filter"] is not None:
        _install_filter(bytes.fromhex(job["filter"]))


def _limit_resources(job: Job) -> None:
    """Set the limits of the process. RLIMIT_AS also counts shared mappings; it adds to what is mapped already."""
    limits = {
        resource.RLIMIT_CPU: ceil(job["timeout"]) + 1,
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    if LINUX:  # elsewhere the first two are not enforced, and the third is not available
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        memory = job["memory_mb"] << 20
        others = 0 if job["contained"] or job["user"] is not None else _count_user_tasks()
        limits |= {
            resource.RLIMIT_DATA: memory,
            resource.RLIMIT_AS: mapped + memory,
            resource.RLIMIT_NPROC: others + job["processes"],
        }
    for kind, value in limits.items():
        maximum = resource.getrlimit(kind)[1]
        limit = value if maximum == resource.RLIM_INFINITY else min(value, maximum)
        resource.setrlimit(kind, (limit, limit))


def _install_filter(program: bytes) -> None:
    """Install a seccomp filter, a program of `isolation.py`, in this process and its children."""
    installed = _FilterProgram(len(program) // 8, program)
    zero = ctypes.c_ulong(0)
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or LIBC.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(installed)
    ):
        raise OSError(ctypes.get_errno(), "the filter of system calls cannot be installed")


def enter_container(user: int | None) -> None:
    """Drop from superuser to `user` in the first process inside bubblewrap, and end with the process outside."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal that Python handles, and so could come from inside
    if user is not None:
        _change_user(user, user)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # reset by the change of user
    hide_memory()


def hide_memory() -> None:
    """Keep other processes of the user from this process's memory and descriptors. Only on Linux."""
    if LINUX:
        LIBC.prctl(PR_SET_DUMPABLE, 0)


def _change_user(user: int, file_user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, file_user, file_user)


def _install_descriptors(stdin: int, writing: int, token: int, *, is_program: bool) -> None:
    """Move the descriptors to their numbers. They were opened in this order, so that none is overwritten."""
    devnull = os.open(os.devnull, os.O_RDWR)
    stdout = writing if is_program else devnull
    for target, source in enumerate((stdin, stdout, devnull, writing, token)):
        os.dup2(source, target)
    os.closerange(REPORT_FD if is_program else TOKEN_FD + 1, 1 << 16)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w")


def end_descendants() -> None:
    """Kill and reap all descendants of this process. On Linux orphans are among them, if it adopts those."""
    pause = FIRST_POLL_S
    while True:
        if LINUX and os.getpid() == 1:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything in the namespace, at once
        else:
            kill_descendants(os.getpid())
        try:
            while os.waitpid(-1, 0 if not LINUX else os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)


def kill_descendants(pid: int) -> None:
    """Kill all processes below this one, where the system can list them.

    They are stopped first, until no new ones appear: what is stopped starts no process.
    """
    stopped: set[int] = set()
    while new := set(list_descendants(pid)) - stopped:
        for descendant in new:
            with suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGSTOP)
        stopped |= new
    for descendant in stopped:
        with suppress(ProcessLookupError):
            os.kill(descendant, signal.SIGKILL)


def list_descendants(pid: int) -> list[int]:
    """Return the ids of the processes below this one, as /proc numbers them; [] where there is no /proc."""
    pids = [int(os.readlink("/proc/self")) if LINUX and pid == os.getpid() else pid]
    for parent in pids:  # grows during the loop
        with suppress(OSError):  # the process has just ended
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
    return pids[1:]


def measure_descendants(pid: int) -> Usage:
    """Return the usage of the processes below this one, with the CPU time of children that they have waited for."""
    usage, tick_s, page = Usage(), 1 / os.sysconf("SC_CLK_TCK"), resource.getpagesize()
    for descendant in list_descendants(pid):
        with suppress(OSError), open(f"/proc/{descendant}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            cpu_s = tick_s * sum(map(int, fields[11:15]))
            tasks, memory = int(fields[17]), int(fields[21]) * page
            usage = Usage(usage.tasks + tasks, usage.memory + memory, usage.cpu_s + cpu_s)
    return usage


def exceeds_limits(usage: Usage, job: Job) -> bool:
    """Return whether the descendants of this process have too many tasks or too much memory."""
    if usage.tasks > job["processes"]:
        return True
    limit: int = job["memory_mb"] << 20
    return usage.memory > limit and sum(map(_read_memory_bytes, list_descendants(os.getpid()))) > limit


def _read_memory_bytes(pid: int) -> int:
    """Return a process's memory in bytes, with its share of pages that it has in common with others."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/smaps_rollup") as file:
        return int(file.read().partition("\nPss:")[2].split()[0]) << 10
    with suppress(OSError), open(f"/proc/{pid}/statm") as file:  # smaps_rollup is not readable
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0  # the process has just ended


def _exceeds_disk_limit(directory: str, limit: int) -> bool:
    """Return whether a directory takes more than `limit` bytes, or cannot be read."""
    used, unseen = 0, [directory]
    while unseen and used <= limit:
        try:
            for entry in os.scandir(unseen.pop()):
                with suppress(FileNotFoundError):  # the entry has just been removed
                    used += max(entry.stat(follow_symlinks=False).st_blocks * 512, MIN_ENTRY_BYTES)
                    if entry.is_dir(follow_symlinks=False):
                        unseen.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # nested too deeply to have a path, or closed to us
            return True
    return used > limit


def remove_tree(directory: str) -> None:
    """Remove a directory of any depth and with any permissions, as far as that is allowed."""
    try:
        shutil.rmtree(directory)
    except (OSError, RecursionError):  # nested too deeply for Python, or closed to us
        import subprocess  # seldom needed

        for command in (["chmod", "-R", "u+rwx", directory], ["rm", "-rf", directory]):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _count_user_tasks() -> int:
    """Return the number of processes and threads of this user."""
    tasks = 0
    for entry in os.scandir("/proc"):
        with suppress(OSError):  # the process has just ended
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{entry.name}/task"))
    return tasks


def _enter_namespace(with_users: bool) -> None:
    """Enter a PID namespace, of which the next child is the first process; all others there end with it.

    Without privileges that needs a user namespace, too (`with_users`), in which only the current user exists.
    """
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWPID | (CLONE_NEWUSER if with_users else 0)):
        raise OSError(ctypes.get_errno(), "no namespace")
    if not with_users:
        return
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def may_enter_namespace(with_users: bool) -> bool:
    """Return whether a namespace is allowed, tried in a child, since a failed attempt cannot be undone."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            _enter_namespace(with_users)
            if (first := os.fork()) == 0:
                os._exit(0)
            status = os.waitpid(first, 0)[1]
        finally:
            os._exit(int(status != 0))
    return os.waitpid(pid, 0)[1] == 0


def _isolate(with_users: bool) -> None:
    """Isolate this program from the solution as far as the system allows."""
    prctl = LIBC.prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if may_enter_namespace(with_users):
        _enter_namespace(with_users)
        if (first := os.fork()) != 0:
            prctl(PR_SET_DUMPABLE, 0)
            os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])))
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # only a superuser can read its memory or use its descriptors


def main() -> None:
    job: Job = json.loads(sys.stdin.buffer.readline())
    if job["contained"]:
        enter_container(job["user"])
    elif LINUX:
        _isolate(with_users=job["user"] is None)
    clock = Clock(job["timeout"], job["wall_factor"])
    try:
        print(json.dumps([run_test(job, test, clock) for test in job.pop("tests")]))
    except SystemExit:  # the parent, which removes this directory, has ended
        remove_tree(tempfile.gettempdir())
        raise


if __name__ == "__main__":
    main()
