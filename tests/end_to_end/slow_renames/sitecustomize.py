"""Python imports this at its start where it is on the path: it makes the moments before a rename long enough to hit.

Between a batch's writing and its announcement, and before a checkpoint or a version of the weights becomes visible,
there are otherwise a few milliseconds.
"""

import os
import time

MOMENT = 0.25
_replace = os.replace


def _slow_replace(source, target, **options):
    name = os.path.basename(os.fspath(source))
    if name.endswith(".prepared") or (name.startswith((".step-", ".v-")) and os.path.isdir(source)):
        time.sleep(MOMENT)
    _replace(source, target, **options)


os.replace = _slow_replace
