"""Runs on the SLURM cluster of the tests: submitted as a user does it, watched through their files, then checked."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.cluster.hosts import HostSet, NamespacedHost, wait_for
from tests.cluster.slurm import SlurmCluster
from tests.end_to_end.runs import headrace
from tests.faults.independent_check import check_journal

HEADRACE = (sys.executable, "-m", "headrace")
LAST_CHARS = 4000
FINISHED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


class SlurmRun:
    """A run in `directory`, which is submitted when this is made."""

    def __init__(
        self,
        cluster: SlurmCluster,
        hosts: HostSet,
        directory: Path,
        file: Path,
        *options: object,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.run, self._cluster, self._hosts = RunDir(directory), cluster, hosts
        words = ("rl", file, "--output_dir", directory, "--launch.on", "slurm", "--inference.port", 0, *options)
        output = cluster.run("env", *(f"{k}={v}" for k, v in (env or {}).items()), *HEADRACE, *words, timeout=240)
        self.job = int(output.partition("submitted job ")[2].split()[0])

    def log(self) -> str:
        path = self.run.logs / "slurm.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def info(self) -> dict[str, str]:
        return self._cluster.job(self.job)

    def state(self) -> str:
        return self.info()["JobState"]

    def trained_steps(self) -> list[int]:
        """Return the steps that the trainer has recorded, with repetitions, in order."""
        files = [path for path in (self.run.metrics, *self.run.root.glob("metrics/*.jsonl")) if path.exists()]
        return sorted(record["step"] for path in files for record in read_metrics(path) if "loss" in record)

    def step(self) -> int:
        """Return the last step that the trainer has recorded."""
        return max(self.trained_steps(), default=0)

    def servers(self) -> int:
        """Return the number of servers whose endpoints are published."""
        return len(list(self.run.endpoints.glob("*.json")))

    def wait_for_quiet_hosts(self) -> None:
        """Wait until no process of Headrace is left on the nodes."""
        for host in self._hosts.hosts:
            wait_for(lambda host=host: not host.send_signal(0, containing="-m headrace"), f"{host.name} to be quiet")

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 240, poll_s: float = 0.1) -> None:
        """Wait for a condition while the job runs or is queued; raises `AssertionError` with the end of its log."""
        deadline, asked = time.monotonic() + timeout, 0.0
        while not condition():
            if (now := time.monotonic()) - asked > 1:
                asked, state = now, self.state()
                if state in FINISHED or now > deadline:
                    raise AssertionError(f"{what}: not within {timeout:g} s; job {state}:\n{self.log()[-LAST_CHARS:]}")
            time.sleep(poll_s)

    def wait_for_step(self, step: int, timeout: float = 240) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}", timeout)

    def host_of(self, process: str) -> NamespacedHost:
        """Return the host on which a process was started last, by the log."""
        name = re.findall(rf"\b{re.escape(process)} on (host\d+)", self.log())[-1]
        return next(host for host in self._hosts.hosts if host.name == name)

    def wait_for_restart(self, timeout: float = 240) -> None:
        """Wait until the job has been queued again and runs, without SLURM's delay of two minutes."""

        def runs_again() -> bool:
            info = self.info()
            if info["Restarts"] != "0" and info["JobState"] == "PENDING":
                self._cluster.run("scontrol", "update", f"JobId={self.job}", "StartTime=now", check=False)
            return info["Restarts"] != "0" and info["JobState"] == "RUNNING"

        self.wait_until(runs_again, "the job to run again", timeout)

    def wait_for_end(self, timeout: float = 300) -> str:
        """Wait for the end of the job and return its state."""
        deadline = time.monotonic() + timeout
        while (state := self.state()) not in FINISHED:
            assert time.monotonic() < deadline, f"did not end within {timeout:g} s:\n{self.log()[-LAST_CHARS:]}"
            time.sleep(0.2)
        return state

    def check_finished(self, max_steps: int, timeout: float = 300) -> int:
        """Wait for the end, check the run by `headrace audit` and independently of it; return the number of draws."""
        state = self.wait_for_end(timeout)
        assert state == "COMPLETED", f"{state}:\n{self.log()[-LAST_CHARS:]}"
        draws = check_journal(self.run, max_steps)
        code, output = headrace("audit", self.run.root)
        assert code == 0, output
        return draws
