"""A pull: files come down beside their place, are checked, and move there when all of them are whole.

What a pull that was cut off has fetched is used by the next. A file that is there already is fetched only if it
differs, and then only if it may be overwritten.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from headrace.errors import BadInput
from headrace.tools.hub.checksums import Checksum
from headrace.tools.hub.errors import HubFailure
from headrace.tools.hub.manifest import Manifest
from headrace.tools.hub.places import BASE, CARD, CONFIG, MANIFEST, RUN, in_run
from headrace.tools.hub.portable import moved
from headrace.tools.hub.push import read_manifest, readable
from headrace.tools.hub.repository import Repository, Snapshot
from headrace.transport.files import draft_of, write_atomically

AT_ONCE = 4
"""Files that are fetched at the same time."""


class Wanted(NamedTuple):
    """A file of the repository, and where it goes."""

    path: str
    target: Path
    checksum: Checksum


class Plan(NamedTuple):
    kind: str
    fetched: list[Wanted]
    same: int
    config: bytes | None
    """The configuration of a run as it is in its new place."""

    @property
    def size(self) -> int:
        return sum(wanted.checksum.size for wanted in self.fetched)


def plan_pull(repository: Repository, revision: str, target: Path, *, overwrite: bool) -> tuple[Plan, Snapshot]:
    """Raises `BadInput` where something is missing there, or in the way here."""
    there = repository.snapshot(revision)
    if there is None:
        other = "without" if repository.kind == "dataset" else "with"
        raise BadInput(
            f"the hub has no such {repository.kind} repository with a revision {revision}, or you may not see it",
            key="OWNER/NAME",
            value=repository.name,
            fix=f"It may need a token; a repository of the other kind is pulled {other} --dataset.",
        )
    manifest = read_manifest(repository, there)
    if manifest is not None and (missing := sorted(set(manifest.files) - set(there.files))):
        raise HubFailure(f"{repository.name} lacks {missing[0]}: the push was cut off or undone; push it again")
    places = _places(there, manifest, target)
    config = None
    if manifest is not None and manifest.kind == "run":
        tree = tomllib.loads(repository.read(f"{RUN}{CONFIG}", there.commit).decode())
        has_base = any(path.startswith(f"{RUN}{BASE}/") for path in there.files)
        config = moved(tree, str(target.absolute()), str(target.absolute() / BASE) if has_base else None)
        places.pop(f"{RUN}{CONFIG}")
    fetched = [Wanted(path, place, there.files[path]) for path, place in places.items()]
    lacking = [wanted for wanted in fetched if not (wanted.target.is_file() and wanted.checksum.fits(wanted.target))]
    if not overwrite:
        _check_free(lacking, config, target)
    kind = manifest.kind if manifest is not None else repository.kind
    return Plan(kind, lacking, len(fetched) - len(lacking), config), there


def _places(there: Snapshot, manifest: Manifest | None, target: Path) -> dict[str, Path]:
    """Where each file goes that comes down. Of a run these are the parts of a run, and nothing else."""
    if manifest is not None and manifest.kind == "run":
        known = {path: in_run(path) for path in there.files if path in manifest.files}
        return {path: target / inner for path, inner in known.items() if inner is not None}
    for path in there.files:
        if path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise BadInput("a file of that name could be written anywhere; nothing is pulled", file=path)
    skipped = {MANIFEST, ".gitattributes"}
    if manifest is not None and manifest.kind == "dataset" and CARD not in manifest.files:
        skipped.add(CARD)  # it was made by the push: the folder had none
    return {path: target / path for path in there.files if path not in skipped}


def _check_free(lacking: list[Wanted], config: bytes | None, target: Path) -> None:
    differing = [str(wanted.target) for wanted in lacking if wanted.target.exists()]
    here = target / CONFIG
    if config is not None and here.exists() and here.read_bytes() != config:
        differing.append(str(here))
    if differing:
        more = f" (so do {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise BadInput(
            f"is there already, and differs from what would be pulled{more}",
            file=differing[0],
            fix="Choose another DIR, or --overwrite.",
        )


def pull(repository: Repository, plan: Plan, commit: str, target: Path, tell: Callable[[str], None]) -> None:
    draft = draft_of(target.absolute())
    draft.mkdir(parents=True, exist_ok=True)
    tell(described(plan))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(_fetch, repository, wanted, commit, draft) for wanted in plan.fetched]:
            future.result()
    for wanted in plan.fetched:
        wanted.target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / wanted.path, wanted.target)
    if plan.config is not None:
        write_atomically(target / CONFIG, plan.config)
    shutil.rmtree(draft)
    tell(f"{target} has the {plan.kind} of {repository.url}")


def _fetch(repository: Repository, wanted: Wanted, commit: str, draft: Path) -> None:
    """A file that an earlier pull fetched is taken if it is the right one."""
    place = draft / wanted.path
    if place.is_file() and wanted.checksum.fits(place):
        return
    place.unlink(missing_ok=True)
    repository.fetch(wanted.path, commit, draft)
    if not wanted.checksum.fits(place):
        place.unlink()
        raise HubFailure(f"{wanted.path} of {repository.name} did not arrive as it is there: pull again")


def described(plan: Plan) -> str:
    lines = [f"{readable(wanted.checksum.size):>10}  {wanted.path}" for wanted in plan.fetched]
    files = f"{len(plan.fetched)} file{'s' * (len(plan.fetched) != 1)}"
    return "\n".join([*lines, f"{files} to download, {readable(plan.size)}; {plan.same} here already"])
