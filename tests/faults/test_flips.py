"""Single flipped bits in a finished and an interrupted run are found or harmless, and never a silent difference."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from headrace.config.files import has_digest
from headrace.rollout.batch import read_batch
from headrace.transport.run_dir import RunDir
from headrace.transport.verification import verify
from tests.end_to_end.runs import finish, headrace, processes_of, start, wait_until, write_run_file
from tests.faults.conftest import show
from tests.faults.injection import Flip, flip_bit, flipped, random_flips
from tests.faults.test_kills import command_of

pytestmark = pytest.mark.faults

MAX_STEPS = 8
KL = ("--orchestrator.algo.kl.coef", 0.5, "--orchestrator.algo.kl.reference.every", 2)
"""So that checkpoints have a reference policy, which differs from the policy."""
REPRODUCIBLE = ("--orchestrator.max_async_level", 0, "--max_steps", MAX_STEPS, "--trainer.ckpt.interval", 3, *KL)


class Runs:
    """The same run, once to its end and once killed with batches that no checkpoint covers; and a run of DPO."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.file = write_run_file(directory, model)
        self.finished, self.interrupted = RunDir(directory / "finished"), RunDir(directory / "interrupted")
        code, output = headrace("rl", self.file, *REPRODUCIBLE, "--output_dir", self.finished.root)
        assert code == 0, output
        launcher = start("rl", self.file, *REPRODUCIBLE, "--output_dir", self.interrupted.root)
        batches, covered = self.interrupted.batches, self.interrupted.latest_checkpoint_step
        wait_until(lambda: covered() >= 6 and batches.steps(), "a batch after the second checkpoint")
        for pid in (launcher.pid, *processes_of(self.interrupted.root).values()):
            os.kill(pid, signal.SIGKILL)
        finish(launcher)
        assert self.interrupted.batches.steps()
        self.dpo = RunDir(directory / "dpo")
        code, output = headrace(*command_of("dpo", directory, model), "--output_dir", self.dpo.root)
        assert code == 0 and any(self.dpo.reference.iterdir()), output

    def resume(self, flip: Flip, run: RunDir) -> tuple[str, str]:
        """Resume a copy of the interrupted run with a flipped bit; return the outcome, and what it printed."""
        shutil.copytree(self.interrupted.root, run.root)
        path = run.root / flip.file
        flip_bit(path, flip.bit)
        try:
            code, output = headrace("rl", self.file, *REPRODUCIBLE, "--output_dir", run.root, "--resume", timeout=300)
            # Engines name the directory of damaged weights.
            is_named = str(path) in output or (flip.file.parts[0] == "weights" and str(path.parent) in output)
            if code:
                return "error with the file" if is_named else "ERROR WITHOUT THE FILE", output
            models = (load_file(each.final_model / "model.safetensors") for each in (run, self.finished))
            if not equal(*models):
                return "SILENT DIFFERENCE", output
            return "repaired with a notice" if is_named else "identical", output
        finally:
            shutil.rmtree(run.root)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), tiny_model)


@pytest.mark.timeout(3600)
def test_every_flipped_bit_is_found_or_harmless(runs: Runs, seed: int, tmp_path: Path, pytestconfig: pytest.Config):
    count, table = pytestconfig.getoption("--flips") // 3, Counter[tuple[str, str]]()
    missed: list[tuple[Path, Flip]] = []
    for run in (runs.finished, runs.interrupted, runs.dpo):
        assert verify(run, has_digest).damages == []
        for flip in random_flips(run, count, seed):
            path = run.root / flip.file
            before = content(path)
            with flipped(path, flip.bit):
                if any(str(path) in damage.problem for damage in verify(run, has_digest).damages):
                    outcome = "found"
                elif same(before, path):
                    outcome = "harmless"
                else:
                    outcome = "MISSED"
            # SQLite drops a last transaction whose checksum is wrong: the state of a run that was killed before it.
            if outcome == "MISSED" and run is runs.interrupted and path.suffix == ".sqlite-wal":
                is_same = runs.resume(flip, RunDir(tmp_path / "resumed"))[0] == "identical"
                outcome = "harmless" if is_same else "MISSED"
            if outcome == "MISSED":
                missed.append((run.root, flip))
            table[kind_of(flip.file), outcome] += 1
    show(pytestconfig, "\n".join(rows(table, ("found", "harmless", "MISSED"))))
    assert not missed


@pytest.mark.timeout(7200)
def test_a_resume_after_a_flip_is_identical_or_repaired_or_an_error_with_the_file(
    runs: Runs, seed: int, tmp_path: Path, pytestconfig: pytest.Config
):
    table = Counter[tuple[str, str]]()
    for flip in random_flips(runs.interrupted, pytestconfig.getoption("--resumes"), seed + 1):
        outcome, output = runs.resume(flip, RunDir(tmp_path / "run"))
        table[kind_of(flip.file), outcome] += 1
        if outcome.isupper():
            show(pytestconfig, f"{flip}: {outcome}\n{output}")
    outcomes = ("identical", "repaired with a notice", "error with the file", "ERROR WITHOUT THE FILE")
    show(pytestconfig, "\n".join(rows(table, (*outcomes, "SILENT DIFFERENCE"))))
    assert not any(outcome.isupper() for _, outcome in table)


def kind_of(file: Path) -> str:
    return file.parts[0] if len(file.parts) == 1 else f"{file.parts[0]}/ {file.suffix}"


def rows(table: Counter[tuple[str, str]], outcomes: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table: kinds of files by outcomes."""
    kinds = sorted({kind for kind, _ in table})
    yield " | ".join([f"{'file':24}", *outcomes])
    for kind in kinds:
        yield " | ".join([f"{kind:24}", *(f"{table[kind, name]:{len(name)}}" for name in outcomes)])
    totals = [sum(table[kind, name] for kind in kinds) for name in outcomes]
    yield " | ".join([f"{'all':24}", *(f"{total:{len(name)}}" for total, name in zip(totals, outcomes, strict=True))])


def content(path: Path) -> Any:
    """What a reader gets from the file, its digest left out."""
    if path.name.startswith("journal"):
        journal = path.with_name(f"{path.name.partition('.')[0]}.sqlite")  # also of its log
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
            return list(database.iterdump())
    if path.suffix == ".json":
        tree = msgspec.json.decode(path.read_bytes())
        tree.pop("digest", None)
        return tree
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text())
    if path.suffix == ".parquet":
        return pq.read_table(path)
    if path.parent.name in ("batches", "probes"):
        return msgspec.json.encode(read_batch(path), enc_hook=np.ndarray.tolist)
    return path.read_bytes()


def same(before: Any, path: Path) -> bool:
    """Whether a reader gets the same from the damaged file; one that it cannot read is not the same."""
    try:
        after = content(path)
    except Exception:
        return False
    if isinstance(before, dict):  # the flip may have made another key of the digest's, which readers ignore
        after = {key: value for key, value in after.items() if key in before}
    return bool(before == after)


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
