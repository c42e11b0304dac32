"""The system calls that untrusted code may not make, as a program for Linux's seccomp.

A list of refused calls, not of allowed ones: a solution may use any library. Refused is what reaches other processes,
changes the user, mounts or namespaces, takes memory that no limit counts, or has been a way out of sandboxes; such a
call fails with EPERM. The filter needs no privilege and no library, and holds for all children.
"""

from __future__ import annotations

import errno
import platform
import struct
from pathlib import Path

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word; jump if equal, not less, or any bit is set; return."""
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW... flags that `clone` takes."""
X32_CALLS = 0x40000000
"""The first number of x86_64's second set of system calls."""

_COMMON = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429},
    **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438},
    **{"mount_setattr": 442, "memfd_secret": 447},
}
NUMBERS = {
    "x86_64": (
        0xC000003E,
        {
            **{"shmget": 29, "socket": 41, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "personality": 135},
            **{
                "setuid": 105,
                "setreuid": 113,
                "setresuid": 117,
                "pivot_root": 155,
                "chroot": 161,
                "mount": 165,
                "umount2": 166,
                "mq_open": 240,
                "add_key": 248,
            },
            **{"request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300},
            **{"open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
            **{"memfd_create": 319, "bpf": 321, "userfaultfd": 323},
            **_COMMON,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "personality": 92, "unshare": 97},
            **{
                "ptrace": 117,
                "setreuid": 145,
                "setuid": 146,
                "setresuid": 147,
                "mq_open": 180,
                "msgget": 186,
                "semget": 190,
                "shmget": 194,
                "socket": 198,
            },
            **{"add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "perf_event_open": 241},
            **{"fanotify_init": 262, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270},
            **{"process_vm_writev": 271, "kcmp": 272, "memfd_create": 279, "bpf": 280, "userfaultfd": 282},
            **_COMMON,
        },
    ),
}
"""By machine, the kernel's number of the architecture and those of the calls that the filter names, as Linux 6.1 has
them in its headers."""


def is_available() -> bool:
    """Return whether this system has filters, and the filter the numbers of this machine."""
    return platform.machine() in NUMBERS and Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def filter_program(machine: str, *, sockets: bool) -> bytes:
    """Return the BPF program for a machine; without `sockets`, none can be opened (pairs of sockets can)."""
    architecture, numbers = NUMBERS[machine]
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
