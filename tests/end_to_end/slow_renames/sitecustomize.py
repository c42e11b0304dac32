"""Python imports this at its start where it is on the path: it makes the moments around a rename long enough to hit.

Between a batch's writing, its commit and its announcement, and before a checkpoint or a version of the weights becomes
visible, there are otherwise a few milliseconds.
"""

import os
import time

LENGTH = 0.25
"""Seconds that each of them takes."""

_replace = os.replace


def _slow_replace(source, target, **options):
    name = os.path.basename(os.fspath(source))
    if name.endswith(".prepared") or (name.startswith(("checkpoints.step-", "weights.v-")) and os.path.isdir(source)):
        time.sleep(LENGTH)
    _replace(source, target, **options)
    if os.fspath(target).endswith(".prepared"):
        time.sleep(LENGTH)


if __name__ == "sitecustomize":  # not where a test reads it
    os.replace = _slow_replace
