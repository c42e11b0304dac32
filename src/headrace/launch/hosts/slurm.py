"""The hosts of a SLURM job: one `srun` starts a node agent on each of them.

The job keeps its other hosts when one is lost (`--no-kill`), and so does the step. The key of the driver is in the
environment that srun passes on. A host has the GPUs that SLURM gives to the step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.config.launch import LaunchConfig
from headrace.launch.driver import Driver
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.base import Host
from headrace.launch.hosts.nodes import NodeHosts, open_driver
from headrace.launch.placement import Needs
from headrace.launch.process import GRACE_S
from headrace.launch.slurm_job import JOB_VAR, NODES_VAR, REQUEUE_VAR, RESTARTS_VAR, in_allocation, time_until_down
from headrace.transport.run_dir import RunDir

AGENT_FAILED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: (Exited|Killed|Terminated|Segmentation)")
LAST_LINES = 20
REQUEUE_S = 60.0
"""Time in which an agent asks for a requeue after SLURM has found the first host to be down."""


class SlurmHosts(NodeHosts):
    """Implements `Hosts` on `count` hosts of this job."""

    def __init__(self, driver: Driver, *, count: int, **options: Any) -> None:
        super().__init__(driver, **options)
        self._count = count
        self._srun: subprocess.Popen[str] | None = None
        self._is_ready = False
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    def wait_until_ready(self) -> Sequence[Host]:
        # One agent on each host, with all that the job has on it.
        step = [f"--nodes={self._count}", f"--ntasks={self._count}", "--ntasks-per-node=1", "--mem=0"]
        keep = [
            "--cpu-bind=none",
            "--overlap",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--export=ALL",
            "--quiet",
        ]
        agent = [sys.executable, "-m", "headrace", "node", str(self._run.root.resolve())]
        self._srun = subprocess.Popen(
            ["srun", *step, *keep, *agent],
            env={**os.environ, **self.driver.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which stops the agents
        )
        threading.Thread(target=self._read_srun, args=(self._srun,), name="srun", daemon=True).start()
        hosts = super().wait_until_ready()
        self._is_ready = True
        return hosts

    def _read_srun(self, srun: subprocess.Popen[str]) -> None:
        """Show what srun says, and end the wait for the hosts when an agent or srun itself has failed."""
        assert srun.stdout is not None
        for line in srun.stdout:
            self._lines.append(line.rstrip())
            if line.startswith("srun: error"):
                self.driver.notify(line.rstrip())
            if AGENT_FAILED.match(line):
                self._refuse()
        if srun.wait():
            self._refuse()

    def _refuse(self) -> None:
        if not self._is_ready:
            with self.driver.locked():
                self.driver.refusals.setdefault(
                    "srun", "srun could not start all node agents:\n" + "\n".join(self._lines)
                )

    def close(self) -> None:
        super().close()
        if self._srun is not None:
            try:
                self._srun.wait(GRACE_S if self._is_ready else 0)
            except subprocess.TimeoutExpired:  # hosts that are lost, or have not found the driver yet
                self._srun.terminate()


def open_hosts(launch: LaunchConfig, run: RunDir, needs: Needs) -> SlurmHosts:
    """Return the hosts of the job in which this process runs."""
    if not in_allocation():
        raise LaunchError("launch.on = slurm: this is not a job. Submit the run, or allocate hosts with salloc.")
    count = int(os.environ[NODES_VAR])
    if count < needs.nodes:
        raise LaunchError(
            f"launch.on = slurm: the run needs {needs.nodes} hosts, and job {os.environ[JOB_VAR]} has {count}. "
            "Lower trainer_nodes, inference_nodes or spare_nodes of [launch], or allocate more hosts."
        )
    # The agents queue the job again if its first host is lost: they must not give up before.
    driver = open_driver(launch, run, time_until_down() + REQUEUE_S if REQUEUE_VAR in os.environ else 0.0)
    driver.notify(f"job {os.environ[JOB_VAR]} of SLURM on {count} hosts, restart {os.environ.get(RESTARTS_VAR, '0')}")
    return SlurmHosts(driver, count=count, needed=needs.nodes, needs=needs, timeout_s=launch.join_timeout)
