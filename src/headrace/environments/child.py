"""How a child process of this room begins: one that runs episodes, or one that runs a single function.

Its arguments are two inherited descriptors: the socket on which the parent speaks, and the read end of a pipe to which
nobody writes, and which closes when the parent ends, however it does.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys


def parents_end() -> socket.socket:
    """The socket to the parent. From now on this process ends with it."""
    channel, lifeline = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)  # what is started from here must not hold them open
    _end_with_parent(lifeline)
    return socket.socket(fileno=channel)


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process group when the parent's end of the pipe closes.

    A thread that waits for it could not run while C code (a regular expression, a huge power) holds the interpreter.
    """
    if sys.platform == "linux":
        signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
    else:  # where the default is to ignore it
        signal.signal(signal.SIGIO, lambda number, frame: os._exit(1))
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before we asked
        os._exit(1)
