"""A repository on the hub, through the hub's own client: what is in it, and putting files there and getting them.

Which hub is `HF_ENDPOINT`'s affair, as everywhere. Left out on purpose: a login that was stored on this machine; only
the variable that was named counts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from headrace import __version__
from headrace.errors import BadInput
from headrace.tools.hub.checksums import Checksum, Content
from headrace.tools.hub.errors import explained, not_a_name

RepoType = Literal["model", "dataset"]
MAIN = "main"
AT_ONCE = 500
"""Files of one commit."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Snapshot(NamedTuple):
    """What a repository holds at one commit."""

    commit: str
    files: dict[str, Checksum]


class Repository:
    def __init__(self, name: str, kind: RepoType, token: str | None, token_var: str) -> None:
        for variable in OFFLINE:
            if os.environ.get(variable, "").upper() in constants.ENV_VARS_TRUE_VALUES:
                raise BadInput("set, so nothing is asked of the hub", key=variable, fix="Unset it, and try again.")
        if name.count("/") != 1:
            raise not_a_name(name)
        self.name, self.kind, self._token_var = name, kind, token_var
        endpoint = os.environ.get("HF_ENDPOINT") or None
        self._api = HfApi(endpoint, token or False, library_name="headrace", library_version=__version__)

    @property
    def url(self) -> str:
        return f"{self._api.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    def snapshot(self, revision: str) -> Snapshot | None:
        """None where there is no such repository, or no such branch in it."""
        with self._explained():
            try:
                commit = self._api.repo_info(self.name, revision=revision, repo_type=self.kind).sha
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                if isinstance(error, GatedRepoError):
                    raise
                return None
            assert commit is not None  # of a repository's own page there always is one
            tree = self._api.list_repo_tree(self.name, recursive=True, revision=commit, repo_type=self.kind)
            found = [entry for entry in tree if isinstance(entry, RepoFile)]
        sums = {file.path: Checksum(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None) for file in found}
        return Snapshot(commit, sums)

    def create(self, revision: str, *, private: bool) -> None:
        """Make the repository, and the branch in it, as far as they are not there."""
        with self._explained():
            self._api.create_repo(self.name, repo_type=self.kind, private=private, exist_ok=True)
            if revision != MAIN:
                self._api.create_branch(self.name, branch=revision, repo_type=self.kind, exist_ok=True)

    def commit(
        self, files: Mapping[str, Content], deleted: Sequence[str], message: str, revision: str, parent: str | None
    ) -> str:
        """Put files there, in one commit unless they are many. Refused by the hub if `parent` is no more the newest."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationDelete(path) for path in deleted),
            *(CommitOperationAdd(path, content) for path, content in files.items()),
        ]
        with self._explained():
            for start in range(0, len(operations), AT_ONCE):
                done = self._api.create_commit(
                    self.name,
                    operations[start : start + AT_ONCE],
                    commit_message=message,
                    repo_type=self.kind,
                    revision=revision,
                    parent_commit=parent,
                )
                parent = done.oid
        assert parent is not None
        return parent

    def fetch(self, path: str, commit: str, folder: Path) -> Path:
        """One file, below `folder`. A download that was cut off is continued."""
        with self._explained():
            return Path(
                self._api.hf_hub_download(
                    self.name, path, repo_type=self.kind, revision=commit, local_dir=folder, etag_timeout=30
                )
            )

    def read(self, path: str, commit: str) -> bytes:
        """The content of a small file."""
        with tempfile.TemporaryDirectory(prefix="headrace-hub-") as folder:
            return self.fetch(path, commit, Path(folder)).read_bytes()

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.name, self.kind, self._api.endpoint, self._token_var)


def token_in(variable: str) -> str | None:
    """What the environment has there; unset or empty is none."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise BadInput("holds a line break or a character beyond ASCII, which no token has", key=variable)
    return token or None
