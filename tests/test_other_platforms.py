"""What macOS lacks is not needed to import the commands, run files, algorithms and data of a run.

Checked on Linux, by removing it in a process of its own. Processes of a run are not part of this: they need Linux.
"""

import subprocess
import sys

PACKAGES = ("cli", "config", "rollout", "algorithms", "text", "runfile", "observe", "api")
PROGRAM = """
import fcntl, importlib, mmap, os, pkgutil, resource, select, signal, socket, sys, sysconfig, types

LINUX_ONLY = {
    os: "O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd getrandom memfd_create pidfd_open posix_fadvise "
    "posix_fallocate sched_getaffinity sched_setaffinity setns splice unshare",
    select: "epoll",
    mmap: "MAP_POPULATE",
    resource: "prlimit",
    fcntl: "F_ADD_SEALS F_SETPIPE_SZ",
    signal: "SIGRTMIN SIGRTMAX pidfd_send_signal",
    socket: "AF_NETLINK SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_PEERCRED TCP_QUICKACK TCP_USER_TIMEOUT",
}

def refuse_linux_files(event, arguments):
    if event in ("open", "os.listdir", "ctypes.dlopen") and str(arguments[0]).startswith(("/proc", "/sys/", "libc.so")):
        raise OSError(f"{event} {arguments[0]}")

sysconfig.get_config_vars()  # of this Python, before the platform is another
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxy_settings=dict, _get_proxies=dict)  # of macOS, for urllib
sys.platform = "darwin"
sys.addaudithook(refuse_linux_files)
for package in sys.argv[1:]:
    root = importlib.import_module(f"headrace.{package}")
    for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        importlib.import_module(module.name)
"""


def test_commands_run_files_and_algorithms_import_without_what_only_linux_has() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *PACKAGES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
