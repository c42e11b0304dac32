"""What went wrong with the hub, in a sentence that says what to do. No message ever has the token in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headrace.errors import BadInput, Failure

HttpError = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
"""What the HTTP library under the hub's client raises; which library that is differs between its versions."""
BUSY = {
    409: "was changed by someone else just now: try again",
    412: "was changed by someone else just now: try again",
    429: "the hub takes no more requests for now: wait a few minutes, then do the same again; what is done is kept",
}
"""Statuses that the same command gets past, a little later."""


class HubFailure(Failure):
    """The hub could not be reached, or did not do what it was asked. Doing the same again continues."""


@contextmanager
def explained(repo: str, kind: str, endpoint: str, token_var: str) -> Iterator[None]:
    """Turn errors of the hub's client into ours: `BadInput` for what the user can change, else `HubFailure`."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        ours = _Explainer(repo, kind, endpoint, token_var).explanation(error)
        if ours is None:
            raise
        raise ours from error


def not_a_name(repo: str) -> BadInput:
    return BadInput("not the name of a repository", key="OWNER/NAME", value=repo, fix="Write it as OWNER/NAME.")


class _Explainer(NamedTuple):
    repo: str
    kind: str
    endpoint: str
    token_var: str

    def explanation(self, error: BaseException) -> Failure | None:
        """None for what is not of the hub. What its client wraps in other errors is looked for below them."""
        if isinstance(error, OfflineModeIsEnabled):
            return BadInput("set, so nothing is asked of the hub", key="HF_HUB_OFFLINE", fix="Unset it, and try again.")
        if isinstance(error, HFValidationError):
            return not_a_name(self.repo)
        if isinstance(error, GatedRepoError):
            return self._of_repo("it is gated", f"Ask for access on its page, {self.endpoint}.")
        if isinstance(error, RevisionNotFoundError):
            return BadInput(f"{self.repo} has no such revision", key="--revision")
        if isinstance(error, RepositoryNotFoundError):
            return self._of_status(404, "")
        if isinstance(error, HfHubHTTPError):
            return self._of_status(error.response.status_code, error.server_message or _one_line(error))
        if isinstance(error, HttpError):
            return HubFailure(
                f"the hub at {self.endpoint} cannot be reached ({_one_line(error)}): check the network, and "
                "HF_ENDPOINT if it is set; the same command continues"
            )
        below = error.__cause__ or error.__context__
        if below is not None and isinstance(error, RuntimeError | LocalEntryNotFoundError):
            return self.explanation(below)
        return None

    def _of_status(self, status: int, message: str) -> Failure:
        if status == 401:
            fact = "the hub does not accept this token"
            return BadInput(fact, key=self.token_var, fix="Make a new one, which may write if you push.")
        if status == 403:
            fact = f"this token may not do this with the {self.kind} repository {self.repo}"
            return BadInput(fact, key=self.token_var, fix="Use one that may write there.")
        if status == 404:
            fact = f"the hub has no such {self.kind} repository, or the token in {self.token_var} may not see it"
            return self._of_repo(fact, None)
        if status in BUSY:
            return HubFailure(f"{self.repo}: {BUSY[status]}")
        return HubFailure(
            f"the hub at {self.endpoint} answered {status} about {self.repo}: {message}; the same command continues"
        )

    def _of_repo(self, fact: str, fix: str | None) -> BadInput:
        return BadInput(fact, key="OWNER/NAME", value=self.repo, fix=fix)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
