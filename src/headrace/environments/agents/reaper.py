"""A program that outlives the process that started it and then kills the process groups that are left.

It reads process groups from its standard input: `+1234` for a started one, `-1234` for one that has ended. When the
input closes it kills the rest. It imports nothing of Headrace, so that it starts quickly.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the reaper ends when its input closes
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    for group in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
