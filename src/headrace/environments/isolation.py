"""How code that a model wrote is kept from the rest of the machine: bubblewrap, or what a process can do without it.

`bubblewrap_command` starts a program that sees a read-only system, its interpreter and a private /tmp, has no network,
no other process and no privilege, and ends with everything that it has started. It is used where the program `bwrap` is
installed and works; `[environments.sandbox]` of a run file chooses. The fallback is limits of the process, a filter of
system calls and, where allowed, a PID namespace (`code_runner.py`): `FALLBACK_ALLOWS` lists what it does not stop, and
the notice of a run is made of that list.

The settings travel in an environment variable, which worker processes inherit.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from headrace.environments import seccomp
from headrace.environments.child_process import ONE_THREAD
from headrace.environments.code_runner import MAX_OPEN_FILES, may_enter_namespace
from headrace.errors import BadInput

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
FIRST_USER = 0x70000000
"""A superuser's sandboxes run as users from here on, each as another: the kernel counts processes by user."""
USERS = 1 << 24
CHANGE_USER = 0b1100_0000
"""The capabilities CAP_SETUID and CAP_SETGID."""
OTHER_USER = 65534
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
"""What it does not stop either where system calls cannot be filtered."""
WITHOUT_NAMESPACE = {"signal processes": "signal and kill processes of your user"}
"""What it does not stop either where the code has no PID namespace and no user of its own. Functions in a pooled
process have no namespace."""


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


def register_untrusted(code: Literal["solution", "function"]) -> bool:
    """Record that this process runs untrusted code, for `fallback_notice`; return whether it does so in bubblewrap."""
    _registered.add(code)
    return uses_bubblewrap()


def fallback_notice() -> str | None:
    """Return what the fallback does not stop, if untrusted code is run, and in it."""
    if not _registered or uses_bubblewrap():
        return None
    why, fix = bubblewrap_problem(), INSTALL
    if current_settings().kind == "rlimit":
        why, fix = 'it is "rlimit"', 'Set it to "auto"'
    return f"{KEY}: {why}, so that code that the model writes can: {'; '.join(fallback_allows().values())}. {fix}."


def fallback_allows() -> dict[str, str]:
    """Return what the fallback does not stop on this machine."""
    user = new_user()
    is_apart = user is not None and interpreter_is_public()
    if sys.platform == "linux" and not is_apart and "function" not in _registered:
        is_apart = may_enter_namespace(with_users=user is None)
    filtered = {} if seccomp.is_available() else WITHOUT_FILTER
    return FALLBACK_ALLOWS | filtered | ({} if is_apart else WITHOUT_NAMESPACE)


def filter_hex() -> str | None:
    """Return the filter of system calls for untrusted code, if this system has filters."""
    if not seccomp.is_available():
        return None
    return seccomp.filter_program(platform.machine(), sockets=uses_bubblewrap()).hex()


@cache
def bubblewrap_problem() -> str | None:
    """Return why bubblewrap cannot be used here; None if a program started in it works."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    user = new_user()
    command = bubblewrap_command([sys.executable, "-I", "-c", PROBE, str(user or 0)], user=user, disk_mb=1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work: {error}"
    if done.stdout.strip() == "works":
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"bubblewrap does not work: {lines[-1]}"


def new_user() -> int | None:
    """Return the user that a sandbox changes to; None unless this process may change its user."""
    return FIRST_USER + secrets.randbelow(USERS) if may_change_user(Path("/proc/self")) else None


def may_change_user(process: Path) -> bool:
    """Return whether a process, a folder in /proc, has the privileges, and the users exist in its user namespace."""
    if not process.exists():
        return False
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    extents = [[*map(int, line.split())] for line in (process / "uid_map").read_text().splitlines()]
    exist = any(first <= FIRST_USER and first + count >= FIRST_USER + USERS for first, _, count in extents)
    return exist and int(status["CapEff"], 16) & CHANGE_USER == CHANGE_USER


def identity(*, contained: bool) -> dict[str, int | None]:
    """Return the users of a process that runs untrusted code: for its processes, and for the files that it can read."""
    user = new_user()
    return {"user": user, "file_user": user if contained or interpreter_is_public() else 0}


def interpreter_is_public() -> bool:
    """Return whether other users can use this interpreter."""
    paths = {path for folder in interpreter_folders() for path in (Path(folder), *Path(folder).parents)}
    return all(path.stat().st_mode & OTHERS_MAY_ENTER for path in paths)


def bubblewrap_command(
    program: Sequence[str], files: Mapping[str, str] = MappingProxyType({}), *, user: int | None, disk_mb: int
) -> list[str]:
    """Return the command line that starts a program inside bubblewrap, as process 1.

    `files` are files and folders to read, by their path inside; the system and this interpreter are always there. A
    superuser's program may change to `user`, which it does first (`code_runner.enter_container`); for other users there
    is a user namespace, in which no further one can be made. /tmp and /dev/shm take `disk_mb` each.
    """
    identity = ["--unshare-user", "--uid", str(OTHER_USER), "--gid", str(OTHER_USER), "--disable-userns"]
    if user is not None:
        identity = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    private = ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs"]
    command = [
        *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(*identity, "--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"),
        *("--proc", "/proc", "--dev", "/dev", *private, "/dev/shm", "--remount-ro", "/dev", *private, "/tmp"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for folder in filter(os.path.isdir, SYSTEM_FOLDERS):
        is_link = os.path.islink(folder)
        command += ["--symlink", os.readlink(folder), folder] if is_link else ["--ro-bind", folder, folder]
    mounts = {path: path for path in (*filter(os.path.exists, SYSTEM_FILES), *interpreter_folders())} | dict(files)
    parents = {str(parent) for path in mounts for parent in Path(path).parents} - {"/", "/tmp", "/usr"}
    for parent in sorted(parents):  # otherwise bubblewrap makes them for their owner alone
        command += ["--dir", parent]
    for inside, path in mounts.items():
        command += ["--ro-bind", path, inside]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in {"PATH": os.defpath, "HOME": "/tmp", "TMPDIR": "/tmp", **ONE_THREAD}.items():
        command += ["--setenv", name, value]
    return [*command, "--", *program]


def interpreter_folders() -> list[str]:
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
        *("--cap-drop=all", "--security-opt=no-new-privileges", f"--user={OTHER_USER}:{OTHER_USER}"),
        *(f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m", f"--pids-limit={processes}"),
        *(f"--ulimit=nofile={MAX_OPEN_FILES}:{MAX_OPEN_FILES}", f"--ulimit=nproc={processes}:{processes}"),
        *(f"--tmpfs=/tmp:rw,mode=1777,size={disk_mb}m", f"--shm-size={disk_mb}m", "--workdir=/tmp"),
        *(f"--volume={path}:{inside}:ro" for inside, path in files.items()),
        *("--env=HOME=/tmp", "--env=TMPDIR=/tmp", f"--entrypoint={program[0]}", image, *program[1:]),
    ]
