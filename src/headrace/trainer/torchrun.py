"""Start several ranks of the trainer on this machine with torch's launcher.

Like the `torchrun` command, except for the exit code: the launcher of a run restarts a process that was killed by a
signal, but not one that failed with an error. So this process ends as its ranks did. One of several failures is the
cause: a rank whose peer was killed fails in a collective, and torch kills the remaining ranks half a minute later.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

TORCH_KILL_DELAY_S = 10
"""A rank killed within this time after the first failure was not killed by torch."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RankExit(NamedTuple):
    """Exit code of a rank, negative for a signal, and its time in seconds."""

    code: int
    time: int


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `headrace ARGUMENTS` on every rank until the last has ended; return the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks log their errors
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,  # the launcher of the run restarts
        )
        try:
            elastic_launch(config, sys.executable)("-m", "headrace", *arguments)
        except ChildFailedError as error:
            code = joint_exit_code([RankExit(f.exitcode, f.timestamp) for f in error.failures.values()])
        except SignalException as error:
            return 128 + int(error.sigval)
        else:
            return 0
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def joint_exit_code(exits: Sequence[RankExit]) -> int:
    """Return one exit code for all ranks; negative if the cause was a signal that killed one of them."""
    first = min(exit_.time for exit_ in exits)
    killed = [
        e.code
        for e in exits
        if e.code < 0 and -e.code not in TERMINATION_SIGNALS and e.time - first < TORCH_KILL_DELAY_S
    ]
    explained = [exit_.code for exit_ in exits if 0 < exit_.code < 128]
    if killed:
        return killed[0]
    return max(explained or [exit_.code if exit_.code > 0 else 128 - exit_.code for exit_ in exits])
