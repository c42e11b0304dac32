"""Python imports this at its start where it is on the path: the process stops itself (SIGSTOP) right before one rename.

The variable `PAUSED_RENAME` has the end of the source's name. No pause of a machine or a network hits a worse moment.
"""

import os
import signal
import time

_replace = os.replace
_end = os.environ.get("PAUSED_RENAME", "")
_paused = False


def _pausing_replace(source, target, **options):
    global _paused
    if not _paused and os.fspath(source).endswith(_end):
        _paused = True
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # the signal may stop another thread of the process first
    _replace(source, target, **options)


if __name__ == "sitecustomize" and _end:
    os.replace = _pausing_replace
