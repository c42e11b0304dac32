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

from headrace.config.launch import LaunchConfig
from headrace.launch.driver import Driver
from headrace.launch.errors import LaunchError
from headrace.launch.hosts.base import Host
from headrace.launch.hosts.nodes import NodeHosts, open_driver
from headrace.launch.placement import Needs
from headrace.launch.process import GRACE_S
from headrace.launch.slurm_job import JOB_VAR, NODES_VAR, REQUEUE_VAR, RESTARTS_VAR, in_allocation
from headrace.transport.run_dir import RunDir

JOIN_TIMEOUT_S = 120.0
"""For srun, prologs of the site and file systems that wake up; an agent that fails ends the wait at once."""
AGENT_FAILED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: (Exited|Killed|Terminated|Segmentation)")
LAST_LINES = 20


class SlurmHosts(NodeHosts):
    """Implements `Hosts` on `count` hosts of this job."""

    def __init__(self, driver: Driver, *, needed: int, count: int, requeue: bool) -> None:
        super().__init__(driver, needed=needed, timeout_s=JOIN_TIMEOUT_S)
        self._count, self._agent_env = count, {REQUEUE_VAR: "1"} if requeue else {}
        self._srun: subprocess.Popen[str] | None = None
        self._is_ready = False
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    def wait_until_ready(self) -> Sequence[Host]:
        agent = [sys.executable, "-m", "headrace", "node", str(self._run.root.resolve())]
        self._srun = subprocess.Popen(
            [*srun_command(self._count), *agent],
            env={**os.environ, **self._agent_env, **self.driver.env},
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
        self.driver.close()
        if self._srun is not None:
            try:
                self._srun.wait(GRACE_S)
            except subprocess.TimeoutExpired:  # hosts that are lost
                self._srun.terminate()


def srun_command(count: int) -> list[str]:
    """Return the srun of one agent on each of `count` hosts, with all that the job has on them."""
    step = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--mem=0", "--cpu-bind=none", "--overlap"]
    keep = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--quiet"]
    return ["srun", *step, *keep]


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
    driver = open_driver(launch, run)
    driver.notify(f"job {os.environ[JOB_VAR]} of SLURM on {count} hosts, restart {os.environ.get(RESTARTS_VAR, '0')}")
    return SlurmHosts(driver, needed=needs.nodes, count=count, requeue=launch.slurm.requeue)
