"""What goes up: the files of a run, a model or a dataset, each under its path in the repository."""

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
from headrace.observe.summary import title
from headrace.tools.hub import places
from headrace.tools.hub.card import dataset_card, model_card, rollouts_card, run_card
from headrace.tools.hub.checksums import Content
from headrace.tools.hub.folder import Listing, list_folder, refuse_running, refuse_secrets_in
from headrace.tools.hub.manifest import Kind
from headrace.tools.hub.places import BASE, CONFIG, METRICS, RUN, in_repo, is_model_file, is_part_of_run
from headrace.tools.hub.portable import hub_name, moved
from headrace.tools.hub.secrets import refuse_secrets
from headrace.transport.files import MARKER
from headrace.transport.run_dir import RolloutKind, RunDir

ROOT = "./"


class Contents(NamedTuple):
    kind: Kind
    name: str
    files: dict[str, Content]
    """By path in the repository."""
    card: str | None
    """None: what is pushed has one of its own, among the files."""
    whole: Sequence[str]
    """Where a push has all there is, so that what an earlier one left there is deleted: paths begin with this; `ROOT`
    stands for files in no folder. Nothing: files are added to those that are there."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Files and folders of a dataset that stay here, each with the reason."""


class Parts(NamedTuple):
    """What of a run goes up beside its final model, its configuration and its metrics."""

    steps: Sequence[int] = ()
    """Checkpoints as they are."""
    permanent: bool = False
    resume_state: bool = False
    """All that it takes to continue: the newest checkpoint, the journal, batches, the base model."""


def contents_of_run(directory: Path, repo: str, parts: Parts) -> Contents:
    run, name = RunDir(directory), title(RunDir(directory))
    if parts.resume_state and in_use(directory):
        fact = "the run is at work: its files would be of two moments"
        raise BadInput(fact, key="PATH", value=str(directory), fix="Stop it first.")
    tree = read_toml(run.config)
    refuse_secrets(tree, run.config, os.environ)
    base = str(tree.get("model", {}).get("name", ""))
    folders = ["model", "adapter", *_checkpoint_folders(run, parts)]
    files: dict[str, Content] = {in_repo(path): directory / path for path in _parts_in(directory, folders)}
    base_name = hub_name(base) or Path(base).name
    whole = [ROOT, *(f"{RUN}{folder}/" for folder in folders[1:])]
    if parts.resume_state:
        files |= _resume_state(run)
        whole.append(f"{RUN}batches/")
        if hub_name(base) is None:
            base_name = BASE
            files |= {f"{RUN}{BASE}/{path.name}": path for path in _model_files(Path(base))}
    files[f"{RUN}{CONFIG}"] = moved(tree, name, base_name)
    if run.metrics.is_file():
        files[f"{RUN}{METRICS}"] = run.metrics
    if run.plot.is_file():
        files[run.plot.name] = run.plot
    return Contents("run", name, files, run_card(run, repo, hub_name(base), Path(base).name, sorted(files)), whole)


def _checkpoint_folders(run: RunDir, parts: Parts) -> list[str]:
    found = checkpoints(run.root)
    known = ", ".join(map(str, found)) or "none"
    for step in parts.steps:
        if step not in found:
            fact = f"{run.root} has no complete checkpoint of this step (it has: {known})"
            raise BadInput(fact, key="--checkpoint", value=f"step-{step}")
    chosen = [found[step] for step in parts.steps]
    if parts.permanent:
        kept = [path for path in run.checkpoints.glob("permanent/step-*") if (path / MARKER).is_file()]
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
    """The journal, and the batches that no checkpoint covers."""
    _merge_log(run.journal)
    journal = [PurePosixPath(run.journal.name)] if run.journal.is_file() else []
    return {in_repo(path): run.root / path for path in (*_parts_in(run.root, ["batches"]), *journal)}


def _parts_in(directory: Path, folders: Sequence[str]) -> Iterator[PurePosixPath]:
    for folder in folders:
        for path in sorted((directory / folder).rglob("*")):
            inner = PurePosixPath(path.relative_to(directory))
            if path.is_file() and is_part_of_run(inner):
                yield inner


def _merge_log(journal: Path) -> None:
    """What a killed orchestrator left in SQLite's log belongs in the file itself."""
    if journal.with_name(f"{journal.name}-wal").exists():
        with closing(sqlite3.connect(journal)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def contents_of_model(directory: Path, name: str, repo: str, base: str | None = None) -> Contents:
    """`base` is what the hub calls the model that it was made of."""
    files: dict[str, Content] = {path.name: path for path in _model_files(directory)}
    own = directory / places.CARD
    card = None if own.is_file() else model_card(name, repo, base)
    if card is None:
        files[places.CARD] = own
    return Contents("model", name, files, card, [ROOT])


def _model_files(directory: Path) -> list[Path]:
    if not (directory / "config.json").is_file():
        raise BadInput("not a model directory: it has no config.json", key="PATH", value=str(directory))
    return sorted(path for path in directory.iterdir() if path.is_file() and is_model_file(path.name))


def contents_of_dataset(source: Path, repo: str, exclude: Sequence[str] = ()) -> Contents:
    """A file, or a folder with all its folders: data, or a sweep."""
    name = source.resolve().name
    if source.is_dir():
        refuse_running(source)
        found = list_folder(source, exclude)
    else:
        found = Listing({name: source}, {})
    if not found.files:
        raise BadInput("there is no file that may go up", key="PATH", value=str(source))
    refuse_secrets_in(found.files, source, os.environ)
    card = None if places.CARD in found.files else dataset_card(name, repo)
    return Contents("dataset", name, dict(found.files), card, [""] if source.is_dir() else [], found.left_out)


def contents_of_rollouts(directory: Path, repo: str) -> Contents:
    """What a run has sampled: a file per step, and one per evaluated version."""
    run = RunDir(directory)
    found = [path for kind in RolloutKind for path in kind.files(run.rollouts).values()]
    if not found:
        raise BadInput("this run has saved no rollouts", file=directory)
    files: dict[str, Content] = {f"data/{path.name}": path for path in found}
    name = f"{title(run)}-rollouts"
    return Contents("dataset", name, files, rollouts_card(title(run), repo, sorted(files)), ["data/"])
