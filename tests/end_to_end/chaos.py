"""Kills the processes of a real run, and keeps evidence of what the trainer was given to train on."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.observe.metrics import read_metrics
from headrace.rollout.batch import Batch, read_batch
from headrace.transport.epochs import DRAFTS
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import is_alive, processes_of, wait_until
from tests.end_to_end.slow_renames.sitecustomize import LENGTH


class Moment(NamedTuple):
    """When a process is killed: once a file is there that becomes another by a rename, and a little later."""

    process: str
    directory: Callable[[RunDir], Path]
    pattern: str
    delay: float = 0.0


MOMENTS = {
    "when a batch is written, before its commit": Moment(
        "orchestrator", lambda run: run.batches.directory, ".step-*.prepared"
    ),
    "between the commit of a batch and its announcement": Moment(
        "orchestrator", lambda run: run.batches.directory, ".step-*.prepared", delay=1.4 * LENGTH
    ),
    "in the middle of a checkpoint": Moment(
        "trainer", lambda run: run.root / DRAFTS, "trainer-*/checkpoints.step-*.tmp"
    ),
    "in the middle of publishing weights": Moment(
        "trainer", lambda run: run.root / DRAFTS, "trainer-*/weights.v-*.tmp"
    ),
}
LAUNCHER = "launcher"


class Chaos:
    """Kills by a seed. Every kill waits for the run to have come a little further, so that they are spread over it."""

    def __init__(
        self, run: RunDir, seed: int, kills: int, max_steps: int, victims: Sequence[str], moments: Sequence[str]
    ) -> None:
        self.run = run
        self.launcher: subprocess.Popen[str] | None = None
        self.rng = random.Random(seed)
        self.max_steps = max_steps
        rest: list[str] = [self.rng.choice(victims) for _ in range(kills - len(moments))]
        self.plan = [*moments, *rest]
        self.rng.shuffle(self.plan)
        self.done: list[str] = []

    def carry_out(self) -> None:
        for number, what in enumerate(self.plan):
            goal = number * (self.max_steps - 4) // len(self.plan)
            wait_until(lambda goal=goal: self.step() >= goal, f"step {goal}, to kill: {what}", timeout=240)
            if what in MOMENTS:
                self._kill_at(what)
            elif what == LAUNCHER:
                self._kill_launcher()
            else:
                self._kill(what, self.rng.uniform(0, 1.5))

    def step(self) -> int:
        """How far the trainer has ever come."""
        if not self.run.metrics.exists():
            return -1
        records = [r for r in read_metrics(self.run.metrics) if r["process"] == "trainer"]
        return max((r["step"] for r in records), default=0)

    def _kill(self, name: str, delay: float) -> None:
        wait_until(lambda: name in processes_of(self.run.root), f"{name} to kill", timeout=120)
        time.sleep(delay)
        pid = processes_of(self.run.root).get(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.done.append(f"{name} after step {self.step()}")
            wait_until(lambda: processes_of(self.run.root).get(name) not in (None, pid), f"{name} again", timeout=120)

    def _kill_launcher(self) -> None:
        """And with it, by their lifelines, everything that it had started."""
        before, launcher = processes_of(self.run.root), self.launcher
        assert launcher is not None
        launcher.kill()
        self.done.append(f"{LAUNCHER} after step {self.step()}")
        wait_until(lambda: not any(is_alive(pid) for pid in before.values()), "the end of what it had started")
        wait_until(lambda: self.launcher is not launcher, "another launcher")

    def _kill_at(self, moment: str) -> None:
        """Wait for the moment, kill, and see that it was in time: the rename has not happened."""
        name, directory, pattern, delay = MOMENTS[moment]
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            pid, found = processes_of(self.run.root).get(name), list(directory(self.run).glob(pattern))
            if pid is None or not found:
                time.sleep(0.005)
                continue
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_alive(pid), f"the end of {name}")
            in_time = not self._is_renamed(found[0])
            wait_until(lambda pid=pid: processes_of(self.run.root).get(name) not in (None, pid), f"{name} again")
            if in_time:
                self.done.append(moment)
                return
        raise AssertionError(f"never seen: {moment}")

    def _is_renamed(self, hidden: Path) -> bool:
        """`.step-N.prepared` becomes `step-N.safetensors`, `weights.v-0-3.tmp` becomes `weights/v-0-3`."""
        folder, _, name = hidden.stem.rpartition(".")
        return any((self.run.root / folder if folder else hidden.parent).glob(f"{name}*"))


class Evidence:
    """A second name for every batch that was ever announced, by step and content."""

    def __init__(self, run: RunDir, directory: Path) -> None:
        self._run, self._directory = run, directory
        directory.mkdir()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._collect)

    def __enter__(self) -> Evidence:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _collect(self) -> None:
        seen: set[tuple[int, int]] = set()
        while not self._ended.is_set():
            for step in self._run.batches.steps():
                try:
                    inode = self._run.batches.path(step).stat().st_ino
                    if (step, inode) not in seen:
                        os.link(self._run.batches.path(step), self._directory / f"{step}-{inode}")
                        seen.add((step, inode))
                except FileNotFoundError:  # a checkpoint covers it, and it is gone
                    continue
            time.sleep(0.01)

    def batches(self) -> dict[int, Batch]:
        """The batch of every step. There must be one of each, whatever was killed."""
        contents: dict[int, dict[str, Path]] = {}
        for path in self._directory.iterdir():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            contents.setdefault(int(path.name.split("-")[0]), {})[digest] = path
        for step, versions in contents.items():
            assert len(versions) == 1, f"step {step} was announced with {len(versions)} different contents"
        return {step: read_batch(*contents[step].values()) for step in sorted(contents)}
