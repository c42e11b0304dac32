"""Isolation of code that a model wrote: bubblewrap, or a fallback of limits that a process can set for itself.

`bubblewrap_command` starts a program that sees a read-only system, its interpreter and a private /tmp, has no network,
no other process and no privilege, and ends with everything that it has started. It is used where the program `bwrap` is
installed and works; `[environments.sandbox]` of a run file chooses. The fallback is limits of the process, a filter of
system calls and, where allowed, a PID namespace (`code_runner.py`): `FALLBACK_ALLOWS` lists what it does not stop, and
the notice of a run is made of that list. The settings travel in an environment variable, which worker processes
inherit.

A control group (cgroup v2) limits the memory and the tasks of all processes of a sandbox together. It is used where
this process may make one: below an ancestor of its own group that has the controllers and is writable, such as one that
systemd has delegated. Elsewhere the limits are those of each process, and `code_runner` polls the sum.

The filter of system calls (seccomp) has a list of refused calls, not of allowed ones: a solution may use any library.
Refused is what reaches other processes, changes the user, mounts or namespaces, takes memory that no limit counts, or
has been a way out of sandboxes; such a call fails with EPERM. It needs no privilege and no library, and holds for all
children.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Literal

import msgspec

from headrace.environments.child_process import ONE_THREAD
from headrace.environments.code_runner import MAX_OPEN_FILES, may_enter_namespace
from headrace.errors import BadInput

log = logging.getLogger(__name__)

SETTINGS_VAR = "HEADRACE_SANDBOX"
KEY = "environments.sandbox"
INSTALL = "Install bubblewrap 0.8 or newer (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
PROBE_TIMEOUT_S = 30.0
PROBE = """
import os, sys
if user := int(sys.argv[1]):
    os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
import ctypes, subprocess
subprocess.run(["true"], check=True)
print("works")
"""
FIRST_USER_ID = 0x70000000
"""A superuser's sandboxes run as users from here on, each as another: the kernel counts processes by user."""
USER_IDS = 1 << 24
CHANGE_USER = 0b1100_0000
"""The capabilities CAP_SETUID and CAP_SETGID."""
OTHER_USER_ID = 65534
"""The user inside the user namespace of everyone else's sandboxes."""
OTHERS_MAY_ENTER = 0o001
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")

FALLBACK_ALLOWS = {
    "read files": "read every file that your user can read, such as keys and the tasks' answers",
    "write files": "change or delete every file that your user can write",
    "fill the disk": "fill the disk outside of its working directory",
    "see processes": "see your processes with their command lines, environment variables and, if the system allows it, "
    "memory",
}
"""What the fallback does not stop."""
WITHOUT_FILTER = {
    "network": "use the network",
    "unix sockets": "connect to local services, such as a Docker daemon",
    "unmapped memory": "take memory that the limit does not count",
    "trace processes": "trace and read processes of your user",
}
"""What the fallback does not stop either where system calls cannot be filtered."""
WITHOUT_NAMESPACE = {"signal processes": "signal and kill processes of your user"}
"""What the fallback does not stop either where the code has neither a PID namespace nor its own user. Functions in a
pooled process have no namespace."""


CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
ENTER_SCRIPT = 'echo $$ > "$0" && exec "$@"'
"""A shell script that moves itself into a group and becomes the program."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word; jump if equal, not less, or any bit is set; return."""
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW... flags that `clone` takes."""
X32_CALLS = 0x40000000
"""The first number of x86_64's second set of system calls."""
_COMMON = """io_uring_setup 425 io_uring_enter 426 io_uring_register 427 open_tree 428 move_mount 429 fsopen 430
    fsconfig 431 fsmount 432 fspick 433 clone3 435 pidfd_getfd 438 mount_setattr 442 memfd_secret 447"""
_X86_64 = """shmget 29 socket 41 clone 56 semget 64 msgget 68 ptrace 101 setuid 105 setreuid 113 setresuid 117
    personality 135 pivot_root 155 chroot 161 mount 165 umount2 166 mq_open 240 add_key 248 request_key 249 keyctl 250
    unshare 272 perf_event_open 298 fanotify_init 300 open_by_handle_at 304 setns 308 process_vm_readv 310
    process_vm_writev 311 kcmp 312 memfd_create 319 bpf 321 userfaultfd 323"""
_AARCH64 = """umount2 39 mount 40 pivot_root 41 chroot 51 personality 92 unshare 97 ptrace 117 setreuid 145 setuid 146
    setresuid 147 mq_open 180 msgget 186 semget 190 shmget 194 socket 198 add_key 217 request_key 218 keyctl 219
    clone 220 perf_event_open 241 fanotify_init 262 open_by_handle_at 265 setns 268 process_vm_readv 270
    process_vm_writev 271 kcmp 272 memfd_create 279 bpf 280 userfaultfd 282"""


def _parse_numbers(*tables: str) -> dict[str, int]:
    words = " ".join(tables).split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


CALL_NUMBERS = {
    "x86_64": (0xC000003E, _parse_numbers(_X86_64, _COMMON)),
    "aarch64": (0xC00000B7, _parse_numbers(_AARCH64, _COMMON)),
}
"""By machine, the kernel's number of the architecture, and the numbers of the system calls by name (Linux 6.1)."""


class SandboxSettings(msgspec.Struct, frozen=True):
    """`[environments.sandbox]`: see `SandboxConfig`."""

    kind: Literal["auto", "strict", "rlimit"] = "auto"
    memory_mb: int = 2048
    processes: int = 128
    cpu_s: float = 600.0
    output_mb: int = 64


def apply_settings(settings: SandboxSettings) -> None:
    """Set the settings of this process and of those that it starts."""
    os.environ[SETTINGS_VAR] = msgspec.json.encode(settings).decode()


def current_settings() -> SandboxSettings:
    """Return the settings of this process: by default those of `kind = "auto"`; the variable may be a kind alone."""
    value = os.environ.get(SETTINGS_VAR, "{}")
    try:
        content = value if value.startswith("{") else msgspec.json.encode({"kind": value})
        return msgspec.json.decode(content, type=SandboxSettings)
    except msgspec.MsgspecError as error:
        raise BadInput(f"not settings of a sandbox: {error}", key=SETTINGS_VAR, value=value) from error


def uses_bubblewrap() -> bool:
    """Return whether untrusted code runs in bubblewrap. Raises `BadInput` if it must and cannot."""
    kind = current_settings().kind
    problem = None if kind == "rlimit" else bubblewrap_problem()
    if kind == "strict" and problem is not None:
        raise BadInput(problem, key=KEY, value=kind, fix=f'{INSTALL}, or set it to "auto".')
    return kind != "rlimit" and problem is None


_registered: set[Literal["solution", "function"]] = set()
_reported: set[str] = set()


def register_untrusted(code: Literal["solution", "function"]) -> bool:
    """Record that this process runs untrusted code, for `fallback_notice`; return whether it does so in bubblewrap."""
    _registered.add(code)
    return uses_bubblewrap()


def fallback_notice() -> str | None:
    """Return a notice of what the fallback does not stop; None unless untrusted code runs in the fallback."""
    if not _registered or uses_bubblewrap():
        return None
    why, fix = bubblewrap_problem(), INSTALL
    if current_settings().kind == "rlimit":
        why, fix = 'it is "rlimit"', 'Set it to "auto"'
    return f"{KEY}: {why}, so that code that the model writes can: {'; '.join(fallback_allows().values())}. {fix}."


def fallback_allows() -> dict[str, str]:
    """Return what the fallback does not stop on this machine."""
    user = choose_user()
    is_apart = user is not None and interpreter_is_public()
    if sys.platform == "linux" and not is_apart and "function" not in _registered:
        is_apart = may_enter_namespace(with_users=user is None)
    filtered = {} if has_filters() else WITHOUT_FILTER
    return FALLBACK_ALLOWS | filtered | ({} if is_apart else WITHOUT_NAMESPACE)


def filter_hex() -> str | None:
    """Return the seccomp filter for untrusted code in hexadecimal; None if this system has no filters."""
    return build_filter(platform.machine(), sockets=uses_bubblewrap()).hex() if has_filters() else None


@cache
def bubblewrap_problem() -> str | None:
    """Return why bubblewrap cannot be used here; None if a program started in it works."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    user = choose_user()
    command = bubblewrap_command([sys.executable, "-I", "-c", PROBE, str(user or 0)], user=user, disk_mb=1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work: {error}"
    if done.stdout.strip() == "works":
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"bubblewrap does not work: {lines[-1]}"


def choose_user() -> int | None:
    """Return a random user id for a sandbox; None unless this process may change its user."""
    return FIRST_USER_ID + secrets.randbelow(USER_IDS) if may_change_user(Path("/proc/self")) else None


def may_change_user(process: Path) -> bool:
    """Return whether a process, a folder in /proc, has the privileges, and the users exist in its user namespace."""
    if not process.exists():
        return False
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    extents = [[*map(int, line.split())] for line in (process / "uid_map").read_text().splitlines()]
    exist = any(first <= FIRST_USER_ID and first + count >= FIRST_USER_ID + USER_IDS for first, _, count in extents)
    return exist and int(status["CapEff"], 16) & CHANGE_USER == CHANGE_USER


def choose_users(*, contained: bool) -> dict[str, int | None]:
    """Return the user ids of a sandbox: `user` for its processes, `file_user` for the files that it can read."""
    user = choose_user()
    return {"user": user, "file_user": user if contained or interpreter_is_public() else 0}


def interpreter_is_public() -> bool:
    """Return whether other users can use this interpreter."""
    paths = {path for folder in find_interpreter_folders() for path in (Path(folder), *Path(folder).parents)}
    return all(path.stat().st_mode & OTHERS_MAY_ENTER for path in paths)


def bubblewrap_command(
    program: Sequence[str], files: Mapping[str, str] = MappingProxyType({}), *, user: int | None, disk_mb: int
) -> list[str]:
    """Return the command line that starts a program inside bubblewrap, as process 1.

    `files` are files and folders to read, by their path inside; the system and this interpreter are always there. A
    superuser's program may change to `user`, which it does first (`code_runner.enter_container`); for other users there
    is a user namespace, in which no further one can be made. /tmp and /dev/shm take `disk_mb` each.
    """
    user_options = ["--unshare-user", "--uid", str(OTHER_USER_ID), "--gid", str(OTHER_USER_ID), "--disable-userns"]
    if user is not None:
        user_options = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    private = ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs"]
    command = [
        *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(*user_options, "--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"),
        *("--proc", "/proc", "--dev", "/dev", *private, "/dev/shm", "--remount-ro", "/dev", *private, "/tmp"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for folder in filter(os.path.isdir, SYSTEM_FOLDERS):
        is_link = os.path.islink(folder)
        command += ["--symlink", os.readlink(folder), folder] if is_link else ["--ro-bind", folder, folder]
    mounts = {path: path for path in (*filter(os.path.exists, SYSTEM_FILES), *find_interpreter_folders())} | dict(files)
    parents = {str(parent) for path in mounts for parent in Path(path).parents} - {"/", "/tmp", "/usr"}
    for parent in sorted(parents):  # otherwise bubblewrap makes them for their owner alone
        command += ["--dir", parent]
    for inside, path in mounts.items():
        command += ["--ro-bind", path, inside]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in {"PATH": os.defpath, "HOME": "/tmp", "TMPDIR": "/tmp", **ONE_THREAD}.items():
        command += ["--setenv", name, value]
    return [*command, "--", *program]


def find_interpreter_folders() -> list[str]:
    """Return the folders of this interpreter and of its virtual environment, except below /usr."""
    real = Path(sys.executable).resolve().parents[1]
    folders = {Path(sys.prefix), Path(sys.base_prefix), real} - {Path("/"), Path("/usr")}
    return sorted(str(folder) for folder in folders if not folder.is_relative_to("/usr"))


def podman_command(
    image: str, program: Sequence[str], files: Mapping[str, str], *, memory_mb: int, processes: int, disk_mb: int
) -> list[str]:
    """Return the command line that starts a program in a container of an image that has been pulled before."""
    return [
        *("podman", "run", "--rm", "--interactive", "--pull=never", "--network=none", "--read-only"),
        *("--cap-drop=all", "--security-opt=no-new-privileges", f"--user={OTHER_USER_ID}:{OTHER_USER_ID}"),
        *(f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m", f"--pids-limit={processes}"),
        *(f"--ulimit=nofile={MAX_OPEN_FILES}:{MAX_OPEN_FILES}", f"--ulimit=nproc={processes}:{processes}"),
        *(f"--tmpfs=/tmp:rw,mode=1777,size={disk_mb}m", f"--shm-size={disk_mb}m", "--workdir=/tmp"),
        *(f"--volume={path}:{inside}:ro" for inside, path in files.items()),
        *("--env=HOME=/tmp", "--env=TMPDIR=/tmp", f"--entrypoint={program[0]}", image, *program[1:]),
    ]


class Cgroup:
    """A control group below `parent`. Remove it when its processes have ended."""

    def __init__(self, parent: Path, memory_mb: int, tasks: int) -> None:
        self.folder = Path(mkdtemp(prefix="headrace-", dir=parent))
        limits = {"memory.max": memory_mb << 20, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": tasks}
        try:
            for name, limit in limits.items():
                if name != "memory.swap.max" or (self.folder / name).exists():  # a kernel may not account for swap
                    (self.folder / name).write_text(str(limit))
        except OSError:
            self.remove()
            raise

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that starts a program in the group."""
        return ["/bin/sh", "-c", ENTER_SCRIPT, str(self.folder / "cgroup.procs"), *command]

    def remove(self) -> None:
        with suppress(OSError):  # a process is still ending
            self.folder.rmdir()


def make_cgroup(memory_mb: int, tasks: int) -> Cgroup | None:
    """Return a new group; None where none can be made, so that only the limits of each process hold."""
    parent = find_usable_parent()
    try:
        return None if parent is None else Cgroup(parent, memory_mb, tasks)
    except OSError as error:
        if (problem := f"{parent}: no control group can be made in it: {error.strerror}") not in _reported:
            _reported.add(problem)  # once, not for every sandbox
            log.warning("%s. Sandboxes have limits for each process", problem)
        return None


@cache
def find_usable_parent() -> Path | None:
    """Return the group below which this process can start programs with limits, if there is one."""
    parent = find_parent(CGROUP_ROOT, OWN_CGROUP_FILE.read_text() if OWN_CGROUP_FILE.exists() else "")
    if parent is None:
        return None
    try:
        group = Cgroup(parent, 64, 16)
        works = subprocess.run(group.command(["true"]), stderr=subprocess.DEVNULL, check=False).returncode == 0
        group.remove()
    except OSError:  # a limit cannot be set
        return None
    return parent if works else None  # else no process can be moved there


def find_parent(root: Path, own: str) -> Path | None:
    """Return the nearest group above or at our own (a line `0::/path`) that has the controllers and is writable."""
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::/")), None)
    if path is None:
        return None
    folder = root / path.strip().lstrip("/")
    for group in (folder, *(above for above in folder.parents if above.is_relative_to(root))):
        with suppress(OSError):
            controllers = set((group / "cgroup.subtree_control").read_text().split())
            writable = all(os.access(path, os.W_OK) for path in (group, group / "cgroup.procs"))
            if {"memory", "pids"} <= controllers and writable:
                return group
    return None


def has_filters() -> bool:
    """Return whether this system has seccomp filters, and the call numbers of this machine are known."""
    return platform.machine() in CALL_NUMBERS and Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def build_filter(machine: str, *, sockets: bool) -> bytes:
    """Return the BPF program for a machine. Without `sockets` no socket can be opened, except for pairs of sockets."""
    architecture, numbers = CALL_NUMBERS[machine]
    special = {"clone", "clone3", *(["socket"] if sockets else [])}
    refuse = REFUSE | errno.EPERM
    program = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, refuse),
        (EQUAL, 0, 1, numbers["clone3"]),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),  # its flags cannot be read here; libraries then use clone
    ]
    for name in sorted(numbers.keys() - special):
        program += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, refuse)]
    program += [
        (EQUAL, 0, 3, numbers["clone"]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, refuse),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
