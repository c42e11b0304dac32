"""What may happen to a run directory: made, continued, cleared, or forked from an older checkpoint.

Deciding and doing are separate: `decide` looks and refuses, and only `Plan.apply` changes anything.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.launch.errors import BadRequest
from headrace.observe.history import INCARNATIONS, Tail
from headrace.transport.files import MARKER, link_tree, write_directory
from headrace.transport.lock import is_held, lock
from headrace.transport.run_dir import RunDir

LATEST = "latest"
LOCK = ".lock"
"""Held by the launcher of the run."""


@dataclass(frozen=True)
class Plan:
    """Where the run will live and what must be done before it starts."""

    directory: Path
    resume: bool = False
    clean: bool = False
    fork_of: Path | None = None
    fork_step: int = 0
    brought_back: Path | None = None
    """The newest checkpoint, if it is left only among those that are kept for ever: the others are gone on from."""

    @property
    def notice(self) -> str | None:
        if self.fork_of is None:
            return None
        return (
            f"step {self.fork_step} is not the newest checkpoint of {self.fork_of}: "
            f"a new run continues from it in {self.directory}"
        )

    def apply(self) -> None:
        if self.clean:
            _delete(self.directory)
        if self.fork_of is not None:
            source, step = RunDir(self.fork_of), self.fork_step
            write_directory(self.directory, lambda draft: _fork(source, RunDir(draft), step))
        if self.brought_back is not None:
            link_tree(self.brought_back, RunDir(self.directory).checkpoints / self.brought_back.name)
        self.directory.mkdir(parents=True, exist_ok=True)


def decide(directory: Path, resume: str | None, clean: bool) -> Plan:
    """What to do with `output_dir`; `BadRequest` says why it cannot be done and what can."""
    if directory.exists() and not directory.is_dir():
        raise BadRequest("a file", key="output_dir", value=directory, fix="Name a directory.")
    occupied = directory.is_dir() and any(path.name != LOCK for path in directory.iterdir())
    if resume is not None:
        return _decide_resume(directory, resume)
    if not occupied:
        return Plan(directory)
    if not is_run(directory):
        raise BadRequest(
            "the directory is not empty, and is not a run (no config.toml, no metrics.jsonl)",
            key="output_dir",
            value=directory,
            fix="Choose another with --output_dir, or empty it yourself.",
        )
    if not clean:
        raise BadRequest(
            "the directory already has a run",
            key="output_dir",
            value=directory,
            fix="Continue it with --resume, start over with --clean (deletes it), or choose another with --output_dir.",
        )
    return Plan(directory, clean=True)


def _decide_resume(directory: Path, resume: str) -> Plan:
    if not is_run(directory):
        raise BadRequest(f"there is no run in {directory}", key="--resume", fix="Leave --resume out to start one.")
    if resume == LATEST:
        return Plan(directory, resume=True)
    found = checkpoints(directory)
    step = int(resume) if resume.isdecimal() else _step_of(Path(resume), directory)
    if step not in found:
        known = ", ".join(str(known) for known in found) or "none"
        raise BadRequest(
            f"{directory} has no complete checkpoint of step {step}",
            key="--resume",
            value=resume,
            fix=f"It has: {known}.",
        )
    if step == max(found):
        is_kept = found[step].parent.name == "permanent"
        return Plan(directory, resume=True, brought_back=found[step] if is_kept else None)
    target = directory.with_name(f"{directory.name}-from-{step}")
    if target.exists():
        raise BadRequest(
            f"this would make a new run in {target}, which exists",
            key="--resume",
            value=resume,
            fix=f"Continue that one with --output_dir {target} --resume, or move it away.",
        )
    return Plan(target, resume=True, fork_of=directory, fork_step=step)


def _step_of(path: Path, directory: Path) -> int:
    """The step of a checkpoint given by path."""
    text = path.name.removeprefix("step-")
    if not path.is_dir() or not text.isdecimal():
        raise BadRequest(
            "not a step and not a checkpoint",
            key="--resume",
            value=path,
            fix="Give `latest`, a step, or a checkpoint directory (.../checkpoints/step-N).",
        )
    where = RunDir(directory).checkpoints.resolve()
    if path.resolve().parent not in (where, where / "permanent"):
        raise BadRequest(
            f"not a checkpoint of {directory}",
            key="--resume",
            value=path,
            fix="Set --output_dir to the run that it belongs to.",
        )
    return int(text)


def refuse_shorter(directory: Path, max_steps: int | None) -> None:
    """A run that goes on cannot end before the steps that it has made: their draws would never be accounted for."""
    run, made = RunDir(directory), max(checkpoints(directory), default=0)
    if run.journal.is_file():
        from headrace.transport.journal import Journal

        with closing(Journal(run.journal, read_only=True)) as journal:
            made = max(made, journal.last_step())
    if max_steps is not None and max_steps < made:
        raise BadRequest(
            f"{directory} has made {made} steps",
            key="max_steps",
            value=max_steps,
            fix=f"Raise it to at least {made}; --resume STEP begins another run at an older checkpoint.",
        )


def _delete(directory: Path) -> None:
    with hold(directory):
        shutil.rmtree(directory)


@contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Be the only launcher of this run. Yields a descriptor to hand to its processes, which then hold it as well.

    So a run whose launcher was killed is not started again before the last of its processes has noticed and ended.
    """

    def on_wait(holder: int | None) -> None:
        if holder is None or _is_alive(holder):
            raise BadRequest(
                f"in use by another launcher (process {holder or 'unknown'})",
                key="output_dir",
                value=directory,
                fix="Stop that one first, or choose another with --output_dir.",
            )
        print(f"headrace: waiting for what launcher {holder}, now gone, had started to end", file=sys.stderr)

    with lock(directory / LOCK, on_wait) as descriptor:
        yield descriptor


def in_use(directory: Path) -> bool:
    """Whether a launcher, or something that it has started, is at work on this run."""
    return is_held(directory / LOCK)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_run(directory: Path) -> bool:
    run = RunDir(directory)
    return run.config.is_file() or run.metrics.is_file()


def find_run(path: Path) -> Path:
    """Return the directory of a run that is given by it or by its config.toml; `BadRequest` where there is no run."""
    directory = path.parent if path.is_file() and path.name == RunDir(path).config.name else path
    if is_run(directory):
        return directory
    if path.is_file():
        fix = "Start it with `headrace rl` or `headrace sft`, then give the directory that output_dir names."
        raise BadRequest("a file, and not the directory of a run", key="RUN", value=path, fix=fix)
    if not path.exists():
        raise BadRequest("no such directory", key="RUN", value=path, fix="Give the directory of a run.")
    fix = "Give the directory that output_dir of the run names."
    raise BadRequest("no config.toml and no metrics.jsonl in it: not a run", key="RUN", value=path, fix=fix)


def checkpoints(directory: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, oldest first."""
    where = RunDir(directory).checkpoints
    found = [*where.glob("permanent/step-*"), *where.glob("step-*")]
    whole = {int(path.name.removeprefix("step-")): path for path in found if (path / MARKER).is_file()}
    return dict(sorted(whole.items()))


def _fork(source: RunDir, target: RunDir, step: int) -> None:
    """Give `target` what `source` knew at `step`: the checkpoint, the metrics so far, the journal."""
    checkpoint = checkpoints(source.root)[step]
    link_tree(checkpoint, target.checkpoints / checkpoint.name)
    with open(target.metrics, "wb") as file:
        for record in Tail(source.metrics).read():
            if record["step"] <= step:
                for name in INCARNATIONS:  # the fork counts its own: an old one must not look newer than those
                    record.pop(name, None)
                file.write(msgspec.json.encode(record) + b"\n")
    if source.journal.is_file():
        from headrace.transport.journal import fork

        fork(source.journal, target.journal, step)
