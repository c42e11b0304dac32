"""Trainers that are killed before the N-th change to the disk: `killed_trainer.py DIRECTORY MODEL STRIDE INTERVAL`.

For every N that STRIDE leaves over, another trainer continues, and its outcome is compared with that of one that was
left alone. A process of its own that forks: torch must not have started threads before, and importing it takes seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch

from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.rollout.version import Version
from headrace.trainer import rl
from headrace.transport.epochs import DRAFTS, EPOCHS, hold_epoch
from headrace.transport.run_dir import RunDir
from tests.trainer.test_trainer_rl import settings, ship, tensors

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
STEPS = 3


def new_run(directory: Path) -> RunDir:
    run = RunDir(directory)
    ship(run, *range(1, STEPS + 1))
    run.weights.acknowledge(Version(9, 9))  # so that old versions are retired
    return run


def train(run: RunDir, model: Path, interval: int, *, resume: bool, kill_at: int) -> int:
    """Train in a process that is killed before its change number `kill_at`; return its exit status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    config = settings(run, model, STEPS, interval)
    config.ckpt.keep_last = 1
    status = Status(run.root / "status", "trainer", interval=1e6)
    with hold_epoch(run.root, "trainer"):
        sys.addaudithook(killer(kill_at))
        rl.RlTrainer(config, resume="latest" if resume else None, stopped=threading.Event(), status=status).run()
    os._exit(0)


def killer(kill_at: int):
    changes = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES) or not {"status", EPOCHS}.isdisjoint(Path(str(arguments[0])).parts):
            return
        changes += 1
        if changes == kill_at:
            print(f"killed before change {changes}: {event} {arguments[0]}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def leftovers(run: RunDir) -> list[Path]:
    """Files and directories that were neither finished nor removed."""
    places = (run.root, run.checkpoints, run.weights.directory)
    drafts = run.root / DRAFTS
    hidden = [path for place in places for path in place.iterdir() if path.name.startswith(".") and path != drafts]
    versions = [path for place in places[1:] for path in place.iterdir() if path.is_dir()]
    return [*hidden, *drafts.iterdir(), *(path for path in versions if not (path / "COMPLETE.json").exists())]


def main(directory: Path, model: Path, stride: int, interval: int) -> None:
    torch.set_num_threads(1)
    straight = new_run(directory / "straight")
    assert train(straight, model, interval, resume=False, kill_at=0) == 0
    wanted = tensors(straight.final_model)
    for moment in range(stride, 10_000, stride):
        run = new_run(directory / f"killed-{moment}")
        if train(run, model, interval, resume=False, kill_at=moment) == 0:
            break  # it was done before
        train(run, model, interval, resume=True, kill_at=max(1, moment // 2))  # the second one does not get far, either
        assert train(run, model, interval, resume=True, kill_at=0) == 0
        found = tensors(run.final_model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), "another model"
        assert {r["step"] for r in read_metrics(run.metrics) if "loss" in r} == set(range(1, STEPS + 1))
        assert not run.batches.steps()
        assert not leftovers(run)
        shutil.rmtree(run.root)
    assert moment > 60, f"only {moment} changes"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
