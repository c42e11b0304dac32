"""Several ranks of the trainer on this machine, started by torch's own launcher.

Like the `torchrun` command, except for what is left to the caller at the end: the launcher of a run starts a process
again that a signal ended, and nothing that explained its failure. So this process ends as its ranks did. Of several
endings one is the cause: a rank whose peer was killed fails in the middle of talking to it, and ranks that do not end
when another has failed are killed by torch itself, half a minute later.
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

AT_ONCE = 10
"""Seconds after the first failure within which a killed rank was not killed by torch."""
NOT_A_KILL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Ending(NamedTuple):
    """How a rank ended: its exit code, negative if a signal ended it, and when."""

    code: int
    time: int


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `headrace ARGUMENTS` on every rank until the last has ended; returns the exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have said what is wrong
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
            max_restarts=0,  # the launcher of the run decides that
        )
        try:
            elastic_launch(config, sys.executable)("-m", "headrace", *arguments)
        except ChildFailedError as error:
            code = ended_like([Ending(f.exitcode, f.timestamp) for f in error.failures.values()])
        except SignalException as error:
            return 128 + int(error.sigval)
        else:
            return 0
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def ended_like(endings: Sequence[Ending]) -> int:
    """One exit code for all ranks; negative if what began it was that a signal killed one of them."""
    first = min(ending.time for ending in endings)
    killed = [e.code for e in endings if e.code < 0 and -e.code not in NOT_A_KILL and e.time - first < AT_ONCE]
    explained = [ending.code for ending in endings if 0 < ending.code < 128]
    if killed:
        return killed[0]
    return max(explained or [ending.code if ending.code > 0 else 128 - ending.code for ending in endings])
