"""Checks of all files of a run directory against their digests, for `headrace verify`.

Each damage is returned with a way to recover from it. Left out on purpose: whether the contents agree with each other,
which `headrace audit` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headrace.errors import BadInput
from headrace.rollout.batch import read_batch
from headrace.rollout.schema import DamagedFile
from headrace.transport.checkpoint_files import check_checkpoint
from headrace.transport.digests import DIGESTS, check_directory, check_file, check_parquet, check_sealed
from headrace.transport.epochs import EPOCHS
from headrace.transport.files import MARKER, check_regular
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import FileRecord
from headrace.transport.journal_files import journals, wal_path
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import ACKNOWLEDGED, checksum, read_marker

Check = Path | DamagedFile
"""The path of an intact file, or the damage of one."""


class Damage(NamedTuple):
    """A damaged or missing file, and how to recover from it."""

    problem: str
    recovery: str


class Verification(NamedTuple):
    """The result of a verification."""

    damages: list[Damage]
    whole: set[Path]
    """Files that match their digests."""
    without_digest: list[Path]
    """All other files, such as logs and those of older versions, by their path in the run directory."""


def verify(run: RunDir, check_config: Callable[[Path], bool]) -> Verification:
    """Read all files of a run. `check_config` returns whether the configuration has a digest, or raises `BadInput`."""
    damages, whole, damaged = [], set(), set()
    for check, recovery in _check_all(run, check_config):
        if isinstance(check, BadInput):
            damages.append(Damage(str(check), recovery))
            damaged.add(Path(str(check.file)))
        elif check is not None and check.exists():
            whole.add(check)
    files = (path for path in sorted(run.root.rglob("*")) if path.is_file() and path not in whole | damaged)
    return Verification(damages, whole, [path.relative_to(run.root) for path in files])


def _check_all(run: RunDir, check_config: Callable[[Path], bool]) -> Iterator[tuple[Path | BadInput | None, str]]:
    """Yield the path or damage of each file, None for a file without a digest, and how to recover if it is damaged."""
    recorded: dict[str, FileRecord] = {}
    if run.journal.is_file():
        journal, recorded = _check_journal(run.journal, run)
        yield journal, ""
        if journal == run.journal:  # the check of the journal reads these files, too
            yield from ((run.journal.with_name(f"{run.journal.name}{end}"), "") for end in ("-wal", "-shm"))
        for path in list(journals(run.root).values())[:-1]:
            yield _check_journal(path)[0], "It is a copy from before the last start: the run does not need it."
    if run.config.is_file():
        try:
            yield run.config if check_config(run.config) else None, ""
        except BadInput as error:
            yield error, ""
    sealed = (run.code_folders, run.driver, run.platform, run.weights.directory / ACKNOWLEDGED)
    for path in (*sealed, *sorted(run.endpoints.glob("*.json")), *sorted((run.root / EPOCHS).glob("*/*.json"))):
        if path.is_file():
            yield check_sealed(path), "Start the run with its run file and --resume: it is written again."
    yield from _check_batches(run, recorded)
    lost = "The run continues without it; its rollouts are lost."
    yield from ((check_parquet(path), lost) for path in sorted(run.rollouts.glob("*.parquet")))
    for name, record in recorded.items():
        path = run.root / name
        if path.parent == run.rollouts and not isinstance(check_parquet(path) if path.exists() else None, DamagedFile):
            yield check_file(path, record.digest), lost
    for step in run.tokens.steps():
        yield from ((check, "The run continues without it.") for check in check_directory(run.tokens.path(step)))
    yield from _check_checkpoints(run)
    for version in run.weights.published():
        again = "The trainer publishes its weights again with --resume."
        yield from ((check, again) for check in _check_weights(run.weights.path(version)))
    lost = "It cannot be computed again: start a new run."
    yield from ((check, lost) for check in check_directory(run.reference))
    for directory in (run.final_model, run.final_adapter):
        export = f"Export the model again: headrace export {run.root} DIR."
        yield from ((check, export) for check in check_directory(directory))


def lost_commits(run: RunDir, last: int, newest: int) -> BadInput:
    """Return the error for a journal that ends at step `last` although a batch or checkpoint of `newest` exists."""
    what = path if (path := run.batches.path(newest)).exists() else f"a checkpoint of step {newest}"
    older = f", or continue from a checkpoint of step {last} or before with --resume STEP" if last else ""
    return BadInput(
        f"the journal ends at step {last}, but there is {what}. The commits between them are lost: "
        f"{wal_path(run.journal)} was deleted or damaged, or the journal is an older copy",
        file=run.journal,
        fix=f"Restore a newer copy of both files{older}. `headrace export` exports the newest checkpoint.",
    )


def _check_journal(path: Path, run: RunDir | None = None) -> tuple[Path | BadInput | None, dict[str, FileRecord]]:
    """Return the path of a journal or its damage, and the files that it records; `run`: if it is the newest one."""
    newest = run.newest_step() if run is not None else 0  # before the journal: a run may go on
    try:
        with closing(Journal(path, read_only=True)) as journal:
            journal.refuse_damage()
            if run is not None and (last := journal.last_step()) < newest:
                raise lost_commits(run, last, newest)
            return path if journal.has_checksums else None, journal.files()
    except BadInput as error:
        return error, {}


def _check_batches(run: RunDir, recorded: dict[str, FileRecord]) -> Iterator[tuple[Check, str]]:
    covered = run.latest_checkpoint_step()
    again = "With --resume its prompts are sampled again, and those of the steps after it."
    for step in run.batches.steps():
        path = run.batches.path(step)
        record = recorded.get(f"{path.parent.name}/{path.name}")
        recovery = again if step > covered else "A checkpoint covers it: the next --resume deletes it."
        yield _check_batch(path) if record is None else check_file(path, record.digest), recovery
    for name in recorded:
        path = run.root / name
        if path.parent != run.batches.directory:
            continue
        step = int(path.stem.removeprefix("step-"))
        if step > covered and not run.batches.is_committed(step):
            yield DamagedFile("missing", file=path), again
    for version in run.probes.versions():
        yield _check_batch(run.probes.path(version)), "The run continues without it."


def _check_batch(path: Path) -> Check:
    try:
        check_regular(path)
        read_batch(path)
    except DamagedFile as damage:
        return damage
    return path


def _check_checkpoints(run: RunDir) -> Iterator[tuple[Check, str]]:
    steps = sorted(path.parent.name for path in run.checkpoints.glob(f"step-*/{MARKER}"))
    for marker in sorted(run.checkpoints.rglob(f"step-*/{MARKER}")):
        checkpoint = marker.parent
        older = [name for name in steps if name < checkpoint.name]
        if checkpoint.parent != run.checkpoints or checkpoint.name != steps[-1]:
            recovery = "The run does not need it to continue."
        elif older:
            recovery = f"With --resume the run continues from {older[-1]}."
        else:
            recovery = "There is no checkpoint before it: restore it from a copy, or start the run again."
        for check in check_checkpoint(checkpoint):
            yield check, recovery


def _check_weights(directory: Path) -> Iterator[Check]:
    path = directory / MARKER
    try:
        marker = read_marker(directory)
    except DamagedFile as damage:
        yield damage
    else:
        yield path
        if not (directory / DIGESTS).is_file() and checksum(directory) != marker.checksum:  # of an older version
            yield DamagedFile("damaged: its files do not match its checksum", file=directory)
    yield from check_directory(directory)
