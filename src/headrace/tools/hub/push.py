"""A push: what the repository lacks of the contents goes up, and nothing that it has already."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import BadInput
from headrace.tools.hub.checksums import Checksum, Content, git_of, size_of
from headrace.tools.hub.contents import ROOT, Contents
from headrace.tools.hub.manifest import Manifest, decode, encode
from headrace.tools.hub.places import CARD, MANIFEST
from headrace.tools.hub.repository import Repository, Snapshot

UNLISTED = frozenset({".gitattributes", CARD, MANIFEST})
INNOCENT = frozenset({".gitattributes", CARD, "LICENSE"})
"""Files of a repository that somebody has made, and put nothing into yet."""


class Plan(NamedTuple):
    """What a push would do."""

    uploads: dict[str, Content]
    deleted: list[str]
    same: int
    """Files that are there already."""
    card_kept: bool
    """Somebody has edited the card."""

    @property
    def size(self) -> int:
        return sum(map(size_of, self.uploads.values()))


def push(
    repository: Repository,
    contents: Contents,
    revision: str,
    *,
    private: bool,
    replace: bool,
    tell: Callable[[str], None],
) -> None:
    there = repository.snapshot(revision)
    if there is None:
        repository.create(revision, private=private)
        tell(f"made {repository.url}, {'private' if private else 'for everybody to read'}")
        there = repository.snapshot(revision)
    plan = plan_push(contents, there, read_manifest(repository, there), repository.name, replace=replace)
    tell(described(plan))
    if plan.uploads or plan.deleted:
        message = f"{contents.kind} {contents.name}"
        parent = there.commit if there is not None else None
        repository.commit(plan.uploads, plan.deleted, message, revision, parent)
    tell(f"{repository.url} has {contents.kind} {contents.name}")


def read_manifest(repository: Repository, there: Snapshot | None) -> Manifest | None:
    """What was pushed there before."""
    if there is None or MANIFEST not in there.files:
        return None
    return decode(repository.read(MANIFEST, there.commit), f"{MANIFEST} of {repository.name}")


def plan_push(contents: Contents, there: Snapshot | None, before: Manifest | None, repo: str, *, replace: bool) -> Plan:
    """`there` is what the repository holds, `before` what its manifest says."""
    remote = {} if there is None else there.files
    if not replace:
        _check_owner(contents, remote, before, repo)
    was = None if replace else before
    owned = set(remote) - UNLISTED if replace else {path for path in (was.files if was else ()) if path in remote}
    gone = owned - set(contents.files)
    deleted = sorted(gone if replace else (path for path in gone if _is_whole(path, contents)))
    card = _card(contents, remote, was)
    name = contents.name if contents.whole or was is None else was.name
    listed = sorted({*owned, *contents.files} - set(deleted))
    sum_of_card = git_of(card) if card is not None else was.card if was is not None else ""
    # First, so that whoever finds a push that was cut off sees what is missing.
    files: dict[str, Content] = {MANIFEST: encode(Manifest(contents.kind, name, listed, sum_of_card))}
    files |= contents.files | ({} if card is None else {CARD: card})
    uploads = {path: content for path, content in files.items() if not _is_there(path, content, remote)}
    return Plan(uploads, deleted, len(files) - len(uploads), card_kept=card is None and contents.card is not None)


def _card(contents: Contents, remote: dict[str, Checksum], was: Manifest | None) -> bytes | None:
    """None: what is pushed brings its own, or somebody has edited the one that is there."""
    if contents.card is None or (was is not None and CARD in remote and remote[CARD].git != was.card):
        return None
    return contents.card.encode()


def _check_owner(contents: Contents, remote: dict[str, Checksum], before: Manifest | None, repo: str) -> None:
    fix = "Choose another repository, or --replace what is there."
    if before is None:
        strange = sorted(set(remote) - INNOCENT)
        if strange:
            named = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
            fact = f"it has content that no push of Headrace put there ({named})"
            raise BadInput(fact, key="OWNER/NAME", value=repo, fix=fix)
    elif before.kind != contents.kind or (contents.whole and before.name != contents.name):
        fact = f"it has {before.title}, not the {contents.kind} {contents.name}"
        raise BadInput(fact, key="OWNER/NAME", value=repo, fix=fix)


def _is_whole(path: str, contents: Contents) -> bool:
    return any("/" not in path if prefix == ROOT else path.startswith(prefix) for prefix in contents.whole)


def _is_there(path: str, content: Content, remote: dict[str, Checksum]) -> bool:
    return path in remote and remote[path].fits(content)


def described(plan: Plan) -> str:
    """The plan for people: every file with its size, then all of them."""
    lines = [f"{readable(size_of(content)):>10}  {path}" for path, content in plan.uploads.items()]
    lines += [f"{'deleted':>10}  {path}" for path in plan.deleted]
    if plan.card_kept:
        lines.append(f"{CARD} was edited on the hub: it stays as it is")
    files = f"{len(plan.uploads)} file{'s' * (len(plan.uploads) != 1)}"
    return "\n".join([*lines, f"{files} to upload, {readable(plan.size)}; {plan.same} there already"])


def readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
