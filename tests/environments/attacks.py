"""Programs that attack the machine they run on, and print "breach" where they succeed.

They are bounded: where nothing stops one, it takes a few hundred processes or megabytes and gives them back. Names in
capitals are prepared outside of the sandbox, by a fixture; `WAIT` is the time in seconds that the limits have to act.
"""

from __future__ import annotations

from typing import NamedTuple

MEMORY_MB, DISK_MB, PROCESSES = 256, 16, 64
"""Limits that the attacks try to exceed."""


class Attack(NamedTuple):
    code: str
    named: str | None = None
    """The entry of the notice that names it, if the fallback does not stop it everywhere."""
    needs_root: bool = False
    """Only a superuser succeeds outside of a sandbox."""


def _succeeds_if(condition: str, setup: str = "") -> str:
    """Return a program that prints "breach" if the condition is true, and nothing if it raises."""
    lines = [f"    {line}" for line in [*setup.strip().splitlines(), f"if {condition}: print('breach')"]]
    return "\n".join(["import ctypes, os, socket, sys, time", "try:", *lines, "except Exception: pass"])


LIBC = "libc = ctypes.CDLL(None, use_errno=True)"
NETWORK_FILE = "link = socket.socket(socket.AF_UNIX); link.settimeout(2)"

ATTACKS = {
    # files
    "reads a secret": Attack(_succeeds_if("open(SECRET).read() == 'hunter2'"), "read files"),
    "reads the users of the machine": Attack(_succeeds_if("open('/etc/passwd').read()"), "read files"),
    "lists a directory outside": Attack(_succeeds_if("'secret' in os.listdir(OUTSIDE)"), "read files"),
    "reads a secret through a symbolic link": Attack(
        _succeeds_if("open('link').read() == 'hunter2'", "os.symlink(SECRET, 'link')"), "read files"
    ),
    "reads a secret through /proc": Attack(
        _succeeds_if("open(f'/proc/{VICTIM}/root{SECRET}').read() == 'hunter2'"), "read files"
    ),
    "writes outside of its directory": Attack(
        _succeeds_if("os.path.exists(OUTSIDE + '/x')", "open(OUTSIDE + '/x', 'w').close()"), "write files"
    ),
    "writes into the interpreter's libraries": Attack(
        _succeeds_if("True", "path = SITE_PACKAGES + '/attack.py'\nopen(path, 'w').close()\nos.remove(path)"),
        "write files",
        needs_root=True,
    ),
    "fills the disk outside": Attack(
        _succeeds_if(
            "True",
            "for n in range(6):\n    open(f'{OUTSIDE}/{n}', 'wb').write(bytes(8 << 20))\n"
            "for n in range(6): os.remove(f'{OUTSIDE}/{n}')",
        ),
        "fill the disk",
    ),
    "fills its own directory": Attack(
        _succeeds_if("True", "for n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(WAIT)")
    ),
    "fills /dev/shm": Attack(
        _succeeds_if(
            "True",
            "names = [f'/dev/shm/attack-{os.getpid()}-{n}' for n in range(5)]\n"
            "try:\n    for name in names: open(name, 'wb').write(bytes(8 << 20))\n"
            "finally:\n    for name in filter(os.path.exists, names): os.remove(name)",
        ),
        "fill the disk",
    ),
    "writes to one huge file": Attack(_succeeds_if("True", "open('huge', 'wb').write(bytes(40 << 20))")),
    # network
    "connects by TCP": Attack(
        _succeeds_if("link.recv(6) == b'breach'", "link = socket.create_connection(('127.0.0.1', TCP_PORT), 2)"),
        "network",
    ),
    "sends UDP": Attack(
        _succeeds_if(
            "link.recv(6) == b'breach'",
            "link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nlink.settimeout(1)\n"
            "link.sendto(b'hello', ('127.0.0.1', UDP_PORT))",
        ),
        "network",
    ),
    "connects to a local service": Attack(
        _succeeds_if("link.recv(6) == b'breach'", f"{NETWORK_FILE}\nlink.connect(UNIX_SOCKET)"), "unix sockets"
    ),
    "connects to an abstract socket": Attack(
        _succeeds_if("link.recv(6) == b'breach'", f"{NETWORK_FILE}\nlink.connect('\\0' + UNIX_SOCKET[-40:])"),
        "unix sockets",
    ),
    # memory
    "takes anonymous memory": Attack(
        _succeeds_if("len(block) and time.sleep(WAIT) is None", "block = bytearray(400 << 20)")
    ),
    "takes shared memory": Attack(
        _succeeds_if(
            "True",
            "import mmap\nblock = mmap.mmap(-1, 400 << 20)\n"
            "for n in range(0, 400 << 20, 4096): block[n] = 1\ntime.sleep(WAIT)",
        )
    ),
    "takes memory in files without a name": Attack(
        _succeeds_if(
            "True",
            "for n in range(40): os.write(os.memfd_create(str(n)), bytes(10 << 20))\ntime.sleep(WAIT)",
        ),
        "unmapped memory",
    ),
    "takes System V shared memory": Attack(
        _succeeds_if(
            "libc.shmctl(key, 0, None) == 0",
            f"{LIBC}\nlibc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]\n"
            "key = libc.shmget(0, 400 << 20, 0o600)",
        ),
        "unmapped memory",
    ),
    "takes memory in many processes": Attack(
        _succeeds_if(
            "os.getpid() == first",
            "first = os.getpid()\nfor n in range(5):\n    if os.fork() == 0: break\n"
            "block = bytearray(b'x' * (100 << 20))\ntime.sleep(WAIT)",
        )
    ),
    "opens thousands of files": Attack(_succeeds_if("len([os.open('/dev/null', 0) for n in range(1000)])")),
    # processes
    "starts hundreds of processes": Attack(
        _succeeds_if(
            "os.getpid() == first",
            "first = os.getpid()\nfor n in range(300):\n    if os.fork() == 0:\n        time.sleep(2 * WAIT)\n"
            "        os._exit(0)\ntime.sleep(WAIT)",
        )
    ),
    "doubles its processes": Attack(
        _succeeds_if(
            "os.getpid() == first and b'!' not in seen",
            "first, seen = os.getpid(), b''\nreading, writing = os.pipe()\nfor n in range(8):\n"
            "    try: os.fork()\n    except OSError: os.write(writing, b'!'), os._exit(0)\n"
            "os.write(writing, b'x')\nif os.getpid() != first: time.sleep(WAIT)\n"
            "while os.getpid() == first and b'!' not in seen and len(seen) < 256: seen += os.read(reading, 256)",
        )
    ),
    "leaves hundreds of zombies": Attack(
        _succeeds_if("time.sleep(WAIT) is None", "for n in range(300):\n    if os.fork() == 0: os._exit(0)")
    ),
    "starts hundreds of threads": Attack(
        _succeeds_if(
            "True",
            "import threading\nthreading.stack_size(1 << 18)\n"
            "for n in range(300): threading.Thread(target=time.sleep, args=(WAIT,), daemon=True).start()\n"
            "time.sleep(WAIT)",
        )
    ),
    "reads the command line of a process": Attack(
        _succeeds_if("SLEEP in open(f'/proc/{VICTIM}/cmdline').read()"), "see processes"
    ),
    "reads the variables of a process": Attack(
        _succeeds_if("'hunter2' in open(f'/proc/{VICTIM}/environ').read()"), "see processes"
    ),
    "signals a process": Attack(_succeeds_if("os.kill(VICTIM, 0) is None"), "signal processes"),
    "signals a process group": Attack(_succeeds_if("os.killpg(VICTIM, 0) is None"), "signal processes"),
    "traces a process": Attack(
        _succeeds_if("libc.ptrace(16, VICTIM, 0, 0) == 0", f"{LIBC}"),
        "trace processes",
    ),
    "traces its parent": Attack(_succeeds_if("libc.ptrace(16, os.getppid(), 0, 0) == 0", f"{LIBC}"), "trace processes"),
    "reads the memory of a process": Attack(
        _succeeds_if("libc.process_vm_readv(VICTIM, None, 0, None, 0, 0) == 0", LIBC), "trace processes"
    ),
    "opens the memory of a process": Attack(
        _succeeds_if("open(f'/proc/{VICTIM}/mem', 'rb+')"), "see processes", needs_root=True
    ),
    "opens the memory of its parent": Attack(_succeeds_if("open(f'/proc/{os.getppid()}/mem', 'rb+')"), needs_root=True),
    "writes where its parent writes": Attack(
        _succeeds_if("open(f'/proc/{os.getppid()}/fd/1', 'w')"),
    ),
    "lowers the limits of a process": Attack(
        _succeeds_if("resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0))", "import resource"), "signal processes"
    ),
    # privileges
    "gains rights by a setuid program": Attack(_succeeds_if("'NoNewPrivs:\\t0' in open('/proc/self/status').read()")),
    "has capabilities": Attack(
        _succeeds_if("'CapEff:\\t0000000000000000' not in open('/proc/self/status').read()"), needs_root=True
    ),
    "mounts": Attack(
        _succeeds_if("libc.mount(b'a', b'.', b'tmpfs', 0, None) == libc.umount2(b'.', 2) == 0", LIBC), needs_root=True
    ),
    "makes a namespace": Attack(_succeeds_if("libc.unshare(0x10000000) == 0", LIBC)),
    "changes its root": Attack(_succeeds_if("os.chroot('.') is None"), needs_root=True),
    "makes a device": Attack(_succeeds_if("os.mknod('disk', 0o60600, 0x801) is None"), needs_root=True),
    "raises its priority": Attack(_succeeds_if("os.nice(-5) < 0"), needs_root=True),
    "changes its user": Attack(_succeeds_if("os.setresuid(0, 0, 0) is None"), needs_root=True),
    "changes the system's settings": Attack(
        _succeeds_if("open('/proc/sys/kernel/hostname', 'w')"), "write files", needs_root=True
    ),
    "inherits descriptors": Attack(_succeeds_if("any(os.path.exists(f'/proc/self/fd/{n}') for n in range(3, 200))")),
    "inherits variables": Attack(_succeeds_if("os.environ['SECRET_KEY']")),
}
