"""Several ranks of the trainer on this machine, started by torch's own launcher.

Like the `torchrun` command, except for what is left to the caller at the end: the launcher of a run starts a process
again that a signal ended, and nothing that explained its failure. So this process ends as its ranks did. A rank whose
peer was killed fails, too, in the middle of talking to it; the kill is what counts.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `headrace ARGUMENTS` on every rank until the last has ended; returns the exit code."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # the launcher of the run decides that
    )
    try:
        elastic_launch(config, sys.executable)("-m", "headrace", *arguments)
    except ChildFailedError as error:
        return _end_like([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end_like(codes: Sequence[int]) -> int:
    """The exit code of the ranks; if one of them was killed, this process ends by the same signal."""
    killed = [-code for code in codes if code < 0 and -code not in ASKED_TO_END]
    if killed:
        os.kill(os.getpid(), killed[0])
    return max(code if code >= 0 else 128 - code for code in codes)
