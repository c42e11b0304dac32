"""Create, continue, delete or fork a run directory.

`plan_directory` checks and refuses; only `DirectoryPlan.apply` changes files.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.config.files import read_toml
from headrace.config.trainer import PastWeightsConfig
from headrace.launch.errors import BadRequest
from headrace.observe.metrics import INCARNATIONS, Tail
from headrace.transport.epochs import (
    DRAFTS,
    EPOCHS,
    LAUNCHER_VAR,
    LEASE_S,
    Held,
    Holder,
    is_gone,
    is_held,
    newest_lease,
    take_epoch,
)
from headrace.transport.files import MARKER, STEP, link_tree, write_directory
from headrace.transport.lock import is_locked, lock
from headrace.transport.run_dir import RunDir

LATEST = "latest"
LAUNCHER = "launcher"
LOCK_END = ".lock"


@dataclass(frozen=True)
class DirectoryPlan:
    """The directory of a run, and what must be done with it before the run starts."""

    directory: Path
    resume: bool = False
    clean: bool = False
    fork_of: Path | None = None
    fork_step: int = 0
    restored: Path | None = None
    """The newest checkpoint, if only its permanent copy is left: a run continues from `checkpoints/step-N`."""

    @property
    def notice(self) -> str | None:
        if self.fork_of is None:
            return None
        return (
            f"step {self.fork_step} is not the newest checkpoint of {self.fork_of}: "
            f"continuing from it as a new run in {self.directory}"
        )

    def apply(self) -> None:
        if self.clean:
            with hold(self.directory):
                for path in self.directory.iterdir():
                    if not _is_kept(path):  # a process of the old run, paused somewhere, stays replaced
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self.fork_of is not None:
            source, step = RunDir(self.fork_of), self.fork_step
            write_directory(self.directory, lambda draft: _fork(source, RunDir(draft), step))
        if self.restored is not None:
            link_tree(self.restored, RunDir(self.directory).checkpoints / self.restored.name)
        self.directory.mkdir(parents=True, exist_ok=True)


def plan_directory(directory: Path, resume: str | None, clean: bool) -> DirectoryPlan:
    """Plan what to do with `output_dir`. Raises `BadRequest` with the alternatives."""
    if directory.exists() and not directory.is_dir():
        raise BadRequest("this is a file", key="output_dir", value=directory, fix="Choose a directory.")
    occupied = directory.is_dir() and any(not _is_kept(path) for path in directory.iterdir())
    if resume is not None:
        return _plan_resume(directory, resume)
    if not occupied:
        return DirectoryPlan(directory)
    if not is_run(directory):
        fact = "not empty and not a run directory (no config.toml, no metrics.jsonl)"
        raise BadRequest(fact, key="output_dir", value=directory, fix="Choose another with --output_dir, or empty it.")
    if not clean:
        fix = "Continue it with --resume, delete it and start over with --clean, or choose another --output_dir."
        raise BadRequest("already contains a run", key="output_dir", value=directory, fix=fix)
    return DirectoryPlan(directory, clean=True)


def _plan_resume(directory: Path, resume: str) -> DirectoryPlan:
    if not is_run(directory):
        raise BadRequest(f"{directory} contains no run", key="--resume", fix="Leave --resume out to start one.")
    if resume == LATEST:
        return DirectoryPlan(directory, resume=True)
    saved = checkpoints(directory)
    step = int(resume) if resume.isdecimal() else _step_of(Path(resume), directory)
    if step not in saved:
        fact = f"{directory} has no complete checkpoint of step {step}"
        raise BadRequest(fact, key="--resume", value=resume, fix=f"Available: {', '.join(map(str, saved)) or 'none'}.")
    if step == max(saved):
        is_permanent = saved[step].parent.name == "permanent"
        return DirectoryPlan(directory, resume=True, restored=saved[step] if is_permanent else None)
    target = directory.with_name(f"{directory.name}-from-{step}")
    if target.exists():
        fact = f"the new run from this step would be {target}, which exists"
        fix = f"Continue that run with --output_dir {target} --resume, or move it."
        raise BadRequest(fact, key="--resume", value=resume, fix=fix)
    return DirectoryPlan(target, resume=True, fork_of=directory, fork_step=step)


def _step_of(path: Path, directory: Path) -> int:
    """Return the step of a checkpoint directory of this run."""
    text = path.name.removeprefix("step-")
    if not path.is_dir() or not text.isdecimal():
        fix = "Give latest, a step, or a checkpoint directory (.../checkpoints/step-N)."
        raise BadRequest("neither a step nor a checkpoint directory", key="--resume", value=path, fix=fix)
    where = RunDir(directory).checkpoints.resolve()
    if path.resolve().parent not in (where, where / "permanent"):
        fact = f"not a checkpoint of {directory}"
        raise BadRequest(fact, key="--resume", value=path, fix="Set --output_dir to its run.")
    return int(text)


def refuse_shorter(directory: Path, max_steps: int | None) -> None:
    """Raise `BadInput` if a resumed run would end before the steps that it has completed, or its journal is damaged."""
    run, completed = RunDir(directory), max(checkpoints(directory), default=0)
    if run.journal.is_file():
        from headrace.transport.journal import Journal

        with closing(Journal(run.journal, read_only=True)) as journal:
            journal.refuse_damage()
            completed = max(completed, journal.last_step())
    if max_steps is not None and max_steps < completed:
        fix = f"Raise it to at least {completed}, or start a new run from an older checkpoint with --resume STEP."
        raise BadRequest(f"{directory} has completed {completed} steps", key="max_steps", value=max_steps, fix=fix)


def _lock_of(directory: Path) -> Path:
    """Return the file that is locked by the launcher of a run and by its processes on this host.

    Each host has its own: some network file systems share locks, and a launcher that is paused on another host must not
    keep this one out.
    """
    return directory / f".{socket.gethostname()}{LOCK_END}"


def _is_kept(path: Path) -> bool:
    """Whether a path is in a run directory before a run, and after it was emptied."""
    return path.name in (EPOCHS, DRAFTS) or (path.name.startswith(".") and path.name.endswith(LOCK_END))


@contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Take a run directory for this launcher. Yields a descriptor to be inherited by the processes of the run.

    The launcher's epoch keeps launchers on all hosts apart. On this host the processes of the run also hold the
    descriptor's lock, so that a run whose launcher was killed can start again only after they have ended.
    """

    def refuse(holder: object) -> NoReturn:
        fact = f"in use by another launcher ({holder or 'unknown process'})"
        fix = "Stop it first, or choose another directory with --output_dir."
        raise BadRequest(fact, key="output_dir", value=directory, fix=fix)

    def wait_for_processes() -> None:
        lease = newest_lease(directory, LAUNCHER)
        if lease is None or not (lease.released or is_gone(lease.holder)):
            refuse(lease and lease.holder)
        print(f"headrace: launcher {lease.holder.pid} has ended; waiting for its processes to end", file=sys.stderr)

    def watch(holder: Holder | None) -> None:
        print(f"headrace: waiting up to {LEASE_S:.0f} s to see whether the launcher ({holder}) lives", file=sys.stderr)

    with lock(_lock_of(directory), wait_for_processes) as descriptor:
        try:
            epoch = take_epoch(directory, LAUNCHER, on_wait=watch)
        except Held as error:
            refuse(error.holder)
        before = os.environ.get(LAUNCHER_VAR)
        os.environ[LAUNCHER_VAR] = str(epoch.number)
        try:
            yield descriptor
        finally:
            epoch.release()
            os.environ.pop(LAUNCHER_VAR)
            if before is not None:
                os.environ[LAUNCHER_VAR] = before


def in_use(directory: Path) -> bool:
    """Whether a launcher on any host, or a process that it has started on this host, holds this run."""
    return is_locked(_lock_of(directory)) or is_held(directory, LAUNCHER)


def is_run(directory: Path) -> bool:
    run = RunDir(directory)
    return run.config.is_file() or run.metrics.is_file()


def find_run(path: Path) -> Path:
    """Return the run directory of a path to it or to its config.toml. Raises `BadRequest` if there is no run."""
    directory = path.parent if path.is_file() and path.name == RunDir(path).config.name else path
    if is_run(directory):
        return directory
    fact, fix = "not a run directory (no config.toml, no metrics.jsonl)", "Give the output_dir of a run."
    if path.is_file():
        fact = "a file, not a run directory"
        fix = "Start the run with headrace rl or headrace sft, then give its output_dir."
    elif not path.exists():
        fact = "no such directory"
    raise BadRequest(fact, key="RUN", value=path, fix=fix)


def checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step, oldest first."""
    where = RunDir(directory).checkpoints
    paths = [*where.glob(f"permanent/{STEP}"), *where.glob(STEP)]
    whole = {int(path.name.removeprefix("step-")): path for path in paths if (path / MARKER).is_file()}
    return dict(sorted(whole.items()))


def _fork(source: RunDir, target: RunDir, step: int) -> None:
    """Copy the state of a run at `step`: checkpoint, metrics up to it, journal."""
    checkpoint = checkpoints(source.root)[step]
    link_tree(checkpoint, target.checkpoints / checkpoint.name)
    with open(target.metrics, "wb") as file:
        for record in Tail(source.metrics).read():
            if record["step"] <= step:
                for name in INCARNATIONS:  # the fork counts its own from 0
                    record.pop(name, None)
                file.write(msgspec.json.encode(record) + b"\n")
    if source.reference.is_dir():
        link_tree(source.reference, target.reference)
    trainer = read_toml(source.config).get("trainer", {}) if source.config.is_file() else {}
    if "past_weights" in trainer:
        for version in map(source.weights.of_step, PastWeightsConfig(**trainer["past_weights"]).needed_after(step)):
            if version is not None:
                link_tree(source.weights.path(version), target.weights.path(version))
    if source.journal.is_file():
        from headrace.transport.journal import fork

        fork(source.journal, target.journal, step)
