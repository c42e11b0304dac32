"""The files to upload of a run, a model or a dataset, by their path in the repository."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from headrace.config.files import read_toml
from headrace.errors import BadInput
from headrace.launch.run_directory import checkpoints, in_use
from headrace.launch.saved_config import read_run
from headrace.observe.summary import run_title
from headrace.rollout.schema import DamagedFile
from headrace.tools.hub.card import dataset_card, model_card, rollouts_card, run_card
from headrace.tools.hub.folder import Listing, list_folder, refuse_secrets, refuse_secrets_in
from headrace.tools.hub.layout import (
    BASE,
    CARD,
    CONFIG,
    JOURNAL,
    METRICS,
    RUN,
    Kind,
    hub_name,
    is_model_file,
    is_part_of_run,
    path_in_repo,
    relocate_config,
)
from headrace.tools.hub.repository import Content
from headrace.transport.checkpoint_files import check_checkpoint
from headrace.transport.digests import check_directory
from headrace.transport.files import MARKER, STEP
from headrace.transport.run_dir import RolloutKind, RunDir

ROOT = "./"
STATE_FOLDERS = ("batches", "reference")
"""Folders that a run needs to continue besides a checkpoint."""


class Contents(NamedTuple):
    """What is uploaded to a repository."""

    kind: Kind
    name: str
    files: dict[str, Content]
    """By path in the repository."""
    card: str | None
    """None if the files contain their own."""
    complete: Sequence[str]
    """Prefixes of paths under which other files on the hub are deleted; `ROOT` stands for files in no folder."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Files and folders of a dataset that are not uploaded, with the reason."""


class Parts(NamedTuple):
    """Parts of a run that are uploaded with its final model, configuration and metrics."""

    steps: Sequence[int] = ()
    """Steps of checkpoints."""
    permanent: bool = False
    """All permanent checkpoints."""
    resume_state: bool = False
    """All that is needed to continue: the newest checkpoint, the journal, batches, the base model, a reference."""


def contents_of_run(directory: Path, repo: str, parts: Parts) -> Contents:
    """Return the final model, configuration and metrics of a run, with further `parts`."""
    run, name = RunDir(directory), run_title(RunDir(directory))
    if parts.resume_state and in_use(directory):
        fact = "the run is at work: its files would be of two moments"
        raise BadInput(fact, key="PATH", value=str(directory), fix="Stop it first.")
    read_run(directory)  # checks its types, before the parts are read as they are
    tree = read_toml(run.config)
    refuse_secrets(tree, run.config, os.environ)
    base = str(tree.get("model", {}).get("name", ""))
    folders = ["model", "adapter", *_checkpoint_folders(run, parts)]
    _refuse_damage(directory, folders)
    files: dict[str, Content] = {path_in_repo(path): directory / path for path in _parts_in(directory, folders)}
    base_name = hub_name(base) or Path(base).name
    complete = [ROOT, *(f"{RUN}{folder}/" for folder in folders[1:])]
    if parts.resume_state:
        files |= _resume_state(run)
        complete += [f"{RUN}{folder}/" for folder in STATE_FOLDERS]
        if hub_name(base) is None:
            base_name = BASE
            files |= {f"{RUN}{BASE}/{path.name}": path for path in _model_files(Path(base))}
    files[f"{RUN}{CONFIG}"] = relocate_config(tree, name, base_name)
    if run.metrics.is_file():
        files[f"{RUN}{METRICS}"] = run.metrics
    if run.plot.is_file():
        files[run.plot.name] = run.plot
    card = run_card(run, repo, hub_name(base), Path(base).name, sorted(files))
    return Contents("run", name, files, card, complete)


def _refuse_damage(directory: Path, folders: Sequence[str]) -> None:
    """Raise the first damage of a model or a checkpoint, by its digests."""
    for folder in folders:
        check = check_checkpoint if folder.startswith("checkpoints") else check_directory
        for result in check(directory / folder):
            if isinstance(result, DamagedFile):
                result.fix = f"`headrace verify {directory}` shows what recovers."
                raise result


def _checkpoint_folders(run: RunDir, parts: Parts) -> list[str]:
    """Return the folders of the chosen checkpoints, relative to the run."""
    by_step = checkpoints(run.root)
    for step in parts.steps:
        if step not in by_step:
            steps = ", ".join(map(str, by_step)) or "none"
            fact = f"{run.root} has no complete checkpoint of this step (it has: {steps})"
            raise BadInput(fact, key="--checkpoint", value=f"step-{step}")
    chosen = [by_step[step] for step in parts.steps]
    if parts.permanent:
        kept = [path for path in run.checkpoints.glob(f"permanent/{STEP}") if (path / MARKER).is_file()]
        if not kept:
            fix = "ckpt.permanent_interval makes them."
            raise BadInput(f"{run.root} has no permanent checkpoint", key="--permanent", fix=fix)
        chosen += kept
    if parts.resume_state:
        if not run.latest_checkpoint_step():
            raise BadInput(f"{run.root} has no checkpoint to continue from", key="--resume-state", fix="Leave it out.")
        chosen.append(run.checkpoints / f"step-{run.latest_checkpoint_step():08d}")
    return sorted({str(path.relative_to(run.root)) for path in chosen})


def _resume_state(run: RunDir) -> dict[str, Content]:
    """Return the journal, the batches that no checkpoint covers, and the logprobs of a reference."""
    if run.journal.with_name(f"{run.journal.name}-wal").exists():  # left by a killed orchestrator
        with closing(sqlite3.connect(run.journal)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files: dict[str, Content] = {path_in_repo(path): run.root / path for path in _parts_in(run.root, STATE_FOLDERS)}
    if run.journal.is_file():
        files[path_in_repo(PurePosixPath(JOURNAL))] = run.journal
    return files


def _parts_in(directory: Path, folders: Sequence[str]) -> Iterator[PurePosixPath]:
    for folder in folders:
        for path in sorted((directory / folder).rglob("*")):
            inner = PurePosixPath(path.relative_to(directory))
            if path.is_file() and is_part_of_run(inner):
                yield inner


def contents_of_model(directory: Path, name: str, repo: str) -> Contents:
    files: dict[str, Content] = {path.name: path for path in _model_files(directory)}
    own = directory / CARD
    card = None if own.is_file() else model_card(name, repo)
    if card is None:
        files[CARD] = own
    return Contents("model", name, files, card, [ROOT])


def _model_files(directory: Path) -> list[Path]:
    if not (directory / "config.json").is_file():
        raise BadInput("not a model directory: it has no config.json", key="PATH", value=str(directory))
    return sorted(path for path in directory.iterdir() if path.is_file() and is_model_file(path.name))


def contents_of_dataset(source: Path, repo: str, exclude: Sequence[str] = ()) -> Contents:
    """Return a file, or all files of a folder."""
    name = source.resolve().name
    if source.is_dir():
        for place in (source, *(path.parent for path in source.rglob("config.toml"))):
            if in_use(place):  # its files would be of two moments
                fix = "Stop it, or wait for its end."
                raise BadInput("a run is at work there", key="PATH", value=str(place), fix=fix)
        listing = list_folder(source, exclude)
    else:
        listing = Listing({name: source}, {})
    if not listing.files:
        raise BadInput("there is no file that may go up", key="PATH", value=str(source))
    refuse_secrets_in(listing.files, source, os.environ)
    card = None if CARD in listing.files else dataset_card(name, repo)
    return Contents("dataset", name, dict(listing.files), card, [""] if source.is_dir() else [], listing.left_out)


def contents_of_rollouts(directory: Path, repo: str) -> Contents:
    """Return the saved rollouts of a run: a file per step, and one per evaluated version."""
    run = RunDir(directory)
    paths = [path for kind in RolloutKind for path in kind.files(run.rollouts).values()]
    if not paths:
        raise BadInput("this run has saved no rollouts", file=directory)
    files: dict[str, Content] = {f"data/{path.name}": path for path in paths}
    name = f"{run_title(run)}-rollouts"
    return Contents("dataset", name, files, rollouts_card(run_title(run), repo, sorted(files)), ["data/"])
