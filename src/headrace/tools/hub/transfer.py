"""Push and pull: only files that differ are transferred.

A pull downloads files beside their place, checks them, and moves them when all are complete; what an interrupted pull
has downloaded is used by the next one.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from headrace.errors import BadInput
from headrace.tools.hub.contents import ROOT, Contents
from headrace.tools.hub.layout import (
    BASE,
    CARD,
    CONFIG,
    JOURNAL,
    MANIFEST,
    RUN,
    HubManifest,
    path_in_run,
    read_manifest,
    relocate_config,
)
from headrace.tools.hub.repository import Checksum, Content, HubFailure, Repository, Snapshot, git_hash_of, size_of
from headrace.transport.files import draft_of, write_atomically
from headrace.transport.journal_files import newest_journal

UNLISTED = frozenset({".gitattributes", CARD, MANIFEST})
INITIAL_FILES = frozenset({".gitattributes", CARD, "LICENSE"})
"""Files of a repository that was created by hand and has no content yet."""
PARALLEL_DOWNLOADS = 4

Print = Callable[[str], None]


class PushPlan(NamedTuple):
    """What a push uploads and deletes."""

    uploads: dict[str, Content]
    deleted: list[str]
    unchanged: int
    card_kept: bool
    """Whether the card was edited on the hub."""

    def __str__(self) -> str:
        files = [(format_size(size_of(content)), path) for path, content in self.uploads.items()]
        lines = [f"{size:>10}  {path}" for size, path in (*files, *(("deleted", path) for path in self.deleted))]
        if self.card_kept:
            lines.append(f"{CARD} was edited on the hub: it stays as it is")
        total = _total(list(map(size_of, self.uploads.values())), "upload")
        return "\n".join([*lines, f"{total}; {self.unchanged} there already"])


def push(
    repository: Repository, contents: Contents, revision: str, *, private: bool, replace: bool, report: Print
) -> None:
    """Upload what the repository lacks, and create the repository if it does not exist."""
    remote = repository.snapshot(revision)
    if remote is None:
        repository.create(revision, private=private)
        report(f"made {repository.url}, {'private' if private else 'for everybody to read'}")
        remote = repository.snapshot(revision)
    plan = plan_push(contents, remote, read_manifest(repository, remote), repository.name, replace=replace)
    report(str(plan))
    title = f"{contents.kind} {contents.name}"
    if plan.uploads or plan.deleted:
        repository.commit(plan.uploads, plan.deleted, title, revision, remote.commit if remote is not None else None)
    report(f"{repository.url} has {title}")


def plan_push(
    contents: Contents, remote: Snapshot | None, manifest: HubManifest | None, repo: str, *, replace: bool
) -> PushPlan:
    """Return what a push does; `manifest` is that of the earlier push. With `replace`, all other files are deleted."""
    there = {} if remote is None else remote.files
    if replace:
        manifest, owned = None, set(there) - UNLISTED
    else:
        _check_owner(contents, there, manifest, repo)
        owned = {path for path in (manifest.files if manifest else ()) if path in there}
    gone = owned - set(contents.files)
    if not replace:  # other files may still be wanted where the contents are not complete
        gone = {
            path
            for path in gone
            if any("/" not in path if prefix == ROOT else path.startswith(prefix) for prefix in contents.complete)
        }
    deleted = sorted(gone)
    edited = manifest is not None and CARD in there and there[CARD].git != manifest.card
    card = None if contents.card is None or edited else contents.card.encode()
    name = contents.name if contents.complete or manifest is None else manifest.name
    card_hash = git_hash_of(card) if card is not None else manifest.card if manifest is not None else ""
    listed = sorted({*owned, *contents.files} - set(deleted))
    # The manifest is uploaded first, so that an interrupted push can be recognized.
    files: dict[str, Content] = {MANIFEST: HubManifest(contents.kind, name, listed, card_hash).encode()}
    files |= contents.files | ({} if card is None else {CARD: card})
    uploads = {path: content for path, content in files.items() if not (path in there and there[path].fits(content))}
    return PushPlan(uploads, deleted, len(files) - len(uploads), card_kept=card is None and contents.card is not None)


def _check_owner(contents: Contents, there: dict[str, Checksum], manifest: HubManifest | None, repo: str) -> None:
    """Raise `BadInput` if the repository has other contents."""
    fix = "Choose another repository, or --replace what is there."
    if manifest is None:
        foreign = sorted(set(there) - INITIAL_FILES)
        if foreign:
            some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            fact = f"it has content that no push of Headrace put there ({some})"
            raise BadInput(fact, key="OWNER/NAME", value=repo, fix=fix)
    elif manifest.kind != contents.kind or (contents.complete and manifest.name != contents.name):
        fact = f"it has the {manifest.kind} {manifest.name}, not the {contents.kind} {contents.name}"
        raise BadInput(fact, key="OWNER/NAME", value=repo, fix=fix)


class Download(NamedTuple):
    """A file of a repository, and where it is written."""

    path: str
    target: Path
    checksum: Checksum

    @property
    def is_done(self) -> bool:
        return self.target.is_file() and self.checksum.fits(self.target)


class PullPlan(NamedTuple):
    """What a pull downloads."""

    kind: str
    commit: str
    downloads: list[Download]
    unchanged: int
    config: bytes | None
    """The configuration of a run, with the paths of its new place."""

    def __str__(self) -> str:
        sizes = [download.checksum.size for download in self.downloads]
        lines = [f"{format_size(size):>10}  {each.path}" for size, each in zip(sizes, self.downloads, strict=True)]
        return "\n".join([*lines, f"{_total(sizes, 'download')}; {self.unchanged} here already"])


def plan_pull(repository: Repository, revision: str, target: Path, *, overwrite: bool) -> PullPlan:
    """Raise `BadInput` if the repository is missing, or if local files differ and may not be overwritten."""
    remote = repository.snapshot(revision)
    if remote is None:
        other = "without" if repository.kind == "dataset" else "with"
        fact = f"the hub has no such {repository.kind} repository with a revision {revision}, or you may not see it"
        fix = f"It may need a token; a repository of the other kind is pulled {other} --dataset."
        raise BadInput(fact, key="OWNER/NAME", value=repository.name, fix=fix)
    manifest = read_manifest(repository, remote)
    if manifest is not None and (missing := sorted(set(manifest.files) - set(remote.files))):
        raise HubFailure(f"{repository.name} lacks {missing[0]}: the push was cut off or undone; push it again")
    targets = _targets(remote, manifest, target)
    config = None
    if manifest is not None and manifest.kind == "run":
        tree = tomllib.loads(repository.read(f"{RUN}{CONFIG}", remote.commit).decode())
        has_base = any(path.startswith(f"{RUN}{BASE}/") for path in remote.files)
        config = relocate_config(tree, str(target.absolute()), str(target.absolute() / BASE) if has_base else None)
        targets.pop(f"{RUN}{CONFIG}")
    files = [Download(path, place, remote.files[path]) for path, place in targets.items()]
    downloads = [file for file in files if not file.is_done]
    if not overwrite:
        _refuse_overwriting(downloads, config, target)
    kind = manifest.kind if manifest is not None else repository.kind
    return PullPlan(kind, remote.commit, downloads, len(files) - len(downloads), config)


def _targets(remote: Snapshot, manifest: HubManifest | None, target: Path) -> dict[str, Path]:
    """Return the local path of each file to download. Of a run, only its known parts are downloaded."""
    if manifest is not None and manifest.kind == "run":
        inner = {path: path_in_run(path) for path in remote.files if path in manifest.files}
        journal = newest_journal(target)
        return {
            path: journal if place == PurePosixPath(JOURNAL) else target / place
            for path, place in inner.items()
            if place is not None
        }
    for path in remote.files:
        if path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise BadInput("a file of that name could be written anywhere; nothing is pulled", file=path)
    skipped = {MANIFEST, ".gitattributes"}
    if manifest is not None and manifest.kind == "dataset" and CARD not in manifest.files:
        skipped.add(CARD)  # generated by the push
    return {path: target / path for path in remote.files if path not in skipped}


def _refuse_overwriting(downloads: Sequence[Download], config: bytes | None, target: Path) -> None:
    differing = [str(download.target) for download in downloads if download.target.exists()]
    here = target / CONFIG
    if config is not None and here.exists() and here.read_bytes() != config:
        differing.append(str(here))
    if differing:
        more = f" (so do {len(differing) - 1} more)" if len(differing) > 1 else ""
        fact = f"is there already, and differs from what would be pulled{more}"
        raise BadInput(fact, file=differing[0], fix="Choose another DIR, or --overwrite.")


def pull(repository: Repository, plan: PullPlan, target: Path, report: Print) -> None:
    draft = draft_of(target.absolute())
    draft.mkdir(parents=True, exist_ok=True)
    report(str(plan))
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        drafts = [download._replace(target=draft / download.path) for download in plan.downloads]
        for future in [pool.submit(_fetch, repository, file, plan.commit, draft) for file in drafts]:
            future.result()
    for download in plan.downloads:
        download.target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / download.path, download.target)
    if plan.config is not None:
        write_atomically(target / CONFIG, plan.config)
    shutil.rmtree(draft)
    report(f"{target} has the {plan.kind} of {repository.url}")


def _fetch(repository: Repository, file: Download, commit: str, draft: Path) -> None:
    """Download a file, unless an earlier pull has."""
    if file.is_done:
        return
    file.target.unlink(missing_ok=True)
    repository.fetch(file.path, commit, draft)
    if not file.is_done:
        file.target.unlink()
        raise HubFailure(f"{file.path} of {repository.name} did not arrive as it is there: pull again")


def _total(sizes: Sequence[int], verb: str) -> str:
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)} to {verb}, {format_size(sum(sizes))}"


def format_size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
