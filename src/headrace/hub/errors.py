"""What went wrong with the hub, in a sentence that says what to do. No message ever has the token in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
REASONS = {
    401: "the hub does not take the token in {token_var}: make a new one, with leave to write if you push",
    403: "the token in {token_var} may not do this with {repo}: it needs leave to write there",
    404: "the hub has no {repo}, or the token in {token_var} may not see it",
    409: "{repo} was changed by somebody else just now: try again",
    412: "{repo} was changed by somebody else just now: try again",
    429: "the hub takes no more requests for now: wait a few minutes, then do the same again; what is done is kept",
}


class HubFailure(Failure):
    """The hub could not be reached, or did not do what it was asked. Doing the same again continues."""


@contextmanager
def explained(repo: str, endpoint: str, token_var: str) -> Iterator[None]:
    """Errors of the hub's client leave as ours; `repo` is how the repository is called in them."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        ours = _explanation(error, repo, endpoint, token_var)
        if ours is None:
            raise
        raise ours from error


def _explanation(error: BaseException, repo: str, endpoint: str, token_var: str) -> Failure | None:
    """None for what is not of the hub. What its client wraps in other errors is looked for below them."""
    if isinstance(error, OfflineModeIsEnabled):
        return BadInput("HF_HUB_OFFLINE is set, so nothing is asked of the hub: unset it, and try again")
    if isinstance(error, HFValidationError):
        return BadInput(f"{repo} is no name of a repository: write OWNER/NAME")
    if isinstance(error, GatedRepoError):
        return BadInput(f"{repo} is gated: ask for access on its page, {endpoint}")
    if isinstance(error, RevisionNotFoundError):
        return BadInput(f"{repo} has no such revision")
    if isinstance(error, RepositoryNotFoundError):
        return BadInput(REASONS[404].format(repo=repo, token_var=token_var))
    if isinstance(error, HfHubHTTPError):
        return _of_status(error, repo, endpoint, token_var)
    if isinstance(error, HttpError):
        return HubFailure(
            f"the hub at {endpoint} cannot be reached ({_one_line(error)}): check the network, and HF_ENDPOINT if it "
            "is set; the same command continues"
        )
    below = error.__cause__ or error.__context__
    if below is not None and isinstance(error, RuntimeError | LocalEntryNotFoundError):
        return _explanation(below, repo, endpoint, token_var)
    return None


def _of_status(error: HfHubHTTPError, repo: str, endpoint: str, token_var: str) -> Failure:
    status = error.response.status_code
    if status in REASONS:
        sentence = REASONS[status].format(repo=repo, token_var=token_var)
        return BadInput(sentence) if status in (401, 403, 404) else HubFailure(sentence)
    said = error.server_message or _one_line(error)
    return HubFailure(f"the hub at {endpoint} answered {status} about {repo}: {said}; the same command continues")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
