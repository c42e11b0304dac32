"""Failing and slow disks, kills at named points, a stopped process, a clock that jumps: the run continues as before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.config.files import has_digest
from headrace.transport.run_dir import RunDir
from headrace.transport.verification import verify
from tests.end_to_end.runs import finish, processes_of, start, wait_until, write_run_file
from tests.faults.injection import clock_jump, failing_calls, shim, stopped, truncate

pytestmark = [pytest.mark.faults, pytest.mark.skipif(shim() is None, reason="needs a C compiler and /proc")]

FAILING = {
    "a full disk while a batch is written": ("write", "step-00000003.prepared", "enospc"),
    "a full disk while a checkpoint is written": ("write", "step-00000002.tmp/tensors", "enospc"),
    "a full disk while the journal is written": ("write", "journal-1.sqlite-wal", "enospc", 40),
    "an error of the disk while a batch is synced": ("fsync", "step-00000003.prepared", "eio"),
    "an error of the disk while rollouts are written": ("write", "rollouts.step-00000002", "eio"),
    "a kill before a batch is announced": ("rename", ".step-00000003.prepared", "kill"),
    "a kill before a checkpoint appears": ("rename", ".step-00000004.tmp", "kill"),
    "a kill before a version is published": ("rename", ".v-0-3.tmp", "kill"),
}
SLOW = {
    "a slow disk": failing_calls("write", "/run/", "slow=3"),
    "a delayed fsync": failing_calls("fsync", "/run/", "slow=150"),
    "a clock that jumps by two days": clock_jump(172_800, delay_s=4),
    "a clock that jumps back": clock_jump(-86_400, delay_s=4),
}
OPTIONS = ("--orchestrator.max_async_level", 0, "--max_steps", 5)
NO_RESTART = ("--launch.max_restarts", 0)


class Reference:
    """A run file, and the model of an undisturbed run."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.file = write_run_file(directory, model)
        code, output, self.model = self.run(RunDir(directory / "reference"))
        assert code == 0, output

    def run(self, run: RunDir, *options: object, faults: dict[str, str] | None = None) -> tuple[int, str, object]:
        command = ("rl", self.file, *OPTIONS, "--output_dir", run.root, *options)
        code, output = finish(start(*command, env={**os.environ, **(faults or {})}), timeout=300)
        path = run.final_model / "model.safetensors"
        return code, output, load_file(path) if path.is_file() else None

    def check(self, run: RunDir, model: object) -> None:
        """The model is the same, and every file is whole."""
        assert isinstance(self.model, dict) and isinstance(model, dict)
        assert self.model.keys() == model.keys()
        assert all(np.array_equal(tensor, model[name]) for name, tensor in self.model.items())
        assert verify(run, has_digest).damages == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), tiny_model)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAILING)
def test_a_run_continues_once_the_fault_is_gone(fault: str, reference: Reference, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    code, output, _ = reference.run(run, *NO_RESTART, faults=failing_calls(*FAILING[fault]))
    assert code, output
    assert "Traceback" not in output
    code, output, model = reference.run(run, "--resume")
    assert code == 0, output
    reference.check(run, model)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", SLOW)
def test_a_slow_disk_and_a_wrong_clock_change_nothing(fault: str, reference: Reference, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    code, output, model = reference.run(run, faults=SLOW[fault])
    assert code == 0, output
    assert "no heartbeat" not in output
    reference.check(run, model)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["trainer", "orchestrator", "inference"])
def test_a_process_that_was_stopped_goes_on(victim: str, reference: Reference, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    launcher = start("rl", reference.file, *OPTIONS, "--output_dir", run.root)
    wait_until(lambda: victim in processes_of(run.root) and run.batches.steps(), "the first batch")
    with stopped(processes_of(run.root)[victim]):
        time.sleep(3)
    code, output = finish(launcher, timeout=300)
    assert code == 0, output
    reference.check(run, load_file(run.final_model / "model.safetensors"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_checkpoint_is_replaced_by_the_one_before(share: float, reference: Reference, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    code, output, _ = reference.run(run)
    assert code == 0, output
    (tensors,) = (run.checkpoints / "step-00000005").glob("tensors/*.safetensors")
    truncate(tensors, share)
    code, output, model = reference.run(run, "--resume")
    assert code == 0 and str(tensors) in output, output
    reference.check(run, model)
