"""A repository of the Hugging Face hub, through the hub's client.

The hub is that of `HF_ENDPOINT`. Left out on purpose: the login that is stored on this machine; the token is that of
the variable that the user names. No error message contains the token.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headrace import __version__
from headrace.errors import BadInput, Failure

Content = Path | bytes
"""A file, or its content."""
RepoType = Literal["model", "dataset"]
MAIN = "main"
MAX_COMMIT_FILES = 500
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ETAG_TIMEOUT_S = 30
HttpError = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
"""The base error of the hub client's HTTP library, which differs between versions of the client."""
BUSY = {
    409: "was changed by someone else just now: try again",
    412: "was changed by someone else just now: try again",
    429: "the hub takes no more requests for now: wait a few minutes, then do the same again; what is done is kept",
}
"""By HTTP status: errors after which the same command succeeds later."""


class HubFailure(Failure):
    """The hub could not be reached, or failed. The same command continues."""


class Checksum(NamedTuple):
    """Size and checksums of a file on the hub."""

    size: int
    git: str
    """Hash of the Git blob; for a large file, that of its pointer."""
    sha256: str | None
    """Only of large files."""

    def fits(self, content: Content) -> bool:
        """Return whether the content is the same; a file of another size is not read."""
        if size_of(content) != self.size:
            return False
        if self.sha256 is not None:
            return _digest(content, hashlib.sha256()) == self.sha256
        return git_hash_of(content) == self.git


def size_of(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def git_hash_of(content: Content) -> str:
    """Return the hash of a Git blob."""
    return _digest(content, hashlib.sha1(b"blob %d\0" % size_of(content), usedforsecurity=False))


def _digest(content: Content, hasher: hashlib._Hash) -> str:
    if isinstance(content, bytes):
        hasher.update(content)
        return hasher.hexdigest()
    with open(content, "rb") as file:
        return hashlib.file_digest(file, lambda: hasher).hexdigest()


class Snapshot(NamedTuple):
    """The files of a repository at one commit."""

    commit: str
    files: dict[str, Checksum]


class Repository:
    """A model or dataset repository of the hub."""

    def __init__(self, name: str, kind: RepoType, token_var: str) -> None:
        for variable in OFFLINE_VARIABLES:
            if os.environ.get(variable, "").upper() in constants.ENV_VARS_TRUE_VALUES:
                raise _offline(variable)
        self.name, self.kind, self._token_var = name, kind, token_var
        if name.count("/") != 1:
            raise self._not_a_name()
        endpoint = os.environ.get("HF_ENDPOINT") or None
        token = read_token(token_var) or False
        self._api = HfApi(endpoint, token, library_name="headrace", library_version=__version__)

    @property
    def url(self) -> str:
        return f"{self._api.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    def snapshot(self, revision: str) -> Snapshot | None:
        """Return the newest commit of a branch; None if the repository or the branch does not exist."""
        with self._explain_errors():
            try:
                commit = self._api.repo_info(self.name, revision=revision, repo_type=self.kind).sha
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                if isinstance(error, GatedRepoError):
                    raise
                return None
            assert commit is not None  # a repository's own page has one
            tree = self._api.list_repo_tree(self.name, recursive=True, revision=commit, repo_type=self.kind)
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
        sums = {file.path: Checksum(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None) for file in files}
        return Snapshot(commit, sums)

    def create(self, revision: str, *, private: bool) -> None:
        """Create the repository and the branch, unless they exist."""
        with self._explain_errors():
            self._api.create_repo(self.name, repo_type=self.kind, private=private, exist_ok=True)
            if revision != MAIN:
                self._api.create_branch(self.name, branch=revision, repo_type=self.kind, exist_ok=True)

    def commit(
        self, files: Mapping[str, Content], deleted: Sequence[str], message: str, revision: str, parent: str | None
    ) -> None:
        """Upload files, in one commit per `MAX_COMMIT_FILES`. The hub refuses if `parent` is not the newest commit."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationDelete(path) for path in deleted),
            *(CommitOperationAdd(path, content) for path, content in files.items()),
        ]
        with self._explain_errors():
            for start in range(0, len(operations), MAX_COMMIT_FILES):
                parent = self._api.create_commit(
                    self.name,
                    operations[start : start + MAX_COMMIT_FILES],
                    commit_message=message,
                    repo_type=self.kind,
                    revision=revision,
                    parent_commit=parent,
                ).oid

    def fetch(self, path: str, commit: str, folder: Path) -> Path:
        """Download one file into `folder`; an interrupted download is continued."""
        with self._explain_errors():
            file = self._api.hf_hub_download(
                self.name, path, repo_type=self.kind, revision=commit, local_dir=folder, etag_timeout=ETAG_TIMEOUT_S
            )
        return Path(file)

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of a small file."""
        with tempfile.TemporaryDirectory(prefix="headrace-hub-") as folder:
            return self.fetch(path, commit, Path(folder)).read_bytes()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn errors of the client into `BadInput`, for what the user can change, or `HubFailure`."""
        try:
            yield
        except Failure:
            raise
        except Exception as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: BaseException) -> Failure | None:
        """Return the error to raise, or None if the cause is not the hub. The client may have wrapped the cause."""
        if isinstance(error, OfflineModeIsEnabled):
            return _offline("HF_HUB_OFFLINE")
        if isinstance(error, HFValidationError):
            return self._not_a_name()
        if isinstance(error, GatedRepoError):
            fix = f"Ask for access on its page, {self._api.endpoint}."
            return BadInput("it is gated", key="OWNER/NAME", value=self.name, fix=fix)
        if isinstance(error, RevisionNotFoundError):
            return BadInput(f"{self.name} has no such revision", key="--revision")
        if isinstance(error, RepositoryNotFoundError):
            return self._explain_status(404, "")
        if isinstance(error, HfHubHTTPError):
            return self._explain_status(error.response.status_code, error.server_message or _one_line(error))
        if isinstance(error, HttpError):
            return HubFailure(
                f"the hub at {self._api.endpoint} cannot be reached ({_one_line(error)}): check the network, and "
                "HF_ENDPOINT if it is set; the same command continues"
            )
        below = error.__cause__ or error.__context__
        if below is not None and isinstance(error, RuntimeError | LocalEntryNotFoundError):
            return self._explain(below)
        return None

    def _explain_status(self, status: int, message: str) -> Failure:
        if status == 401:
            fact = "the hub does not accept this token"
            return BadInput(fact, key=self._token_var, fix="Make a new one, which may write if you push.")
        if status == 403:
            fact = f"this token may not do this with the {self.kind} repository {self.name}"
            return BadInput(fact, key=self._token_var, fix="Use one that may write there.")
        if status == 404:
            fact = f"the hub has no such {self.kind} repository, or the token in {self._token_var} may not see it"
            return BadInput(fact, key="OWNER/NAME", value=self.name)
        if status in BUSY:
            return HubFailure(f"{self.name}: {BUSY[status]}")
        answer = f"the hub at {self._api.endpoint} answered {status} about {self.name}"
        return HubFailure(f"{answer}: {message}; the same command continues")

    def _not_a_name(self) -> BadInput:
        fix = "Write it as OWNER/NAME."
        return BadInput("not the name of a repository", key="OWNER/NAME", value=self.name, fix=fix)


def read_token(variable: str) -> str | None:
    """Return the token in an environment variable; None if it is unset or empty."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise BadInput("holds a line break or a character beyond ASCII, which no token has", key=variable)
    return token or None


def _offline(variable: str) -> BadInput:
    return BadInput("set, so nothing is asked of the hub", key=variable, fix="Unset it, and try again.")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
