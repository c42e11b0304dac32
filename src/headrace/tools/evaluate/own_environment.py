"""What a run is evaluated on where nobody says: its own evaluation environment, or else what it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import BadInput
from headrace.launch.saved_config import read_run
from headrace.runfile.run import RunConfig
from headrace.tools.evaluate.models import Candidate


class OwnEnvironment(NamedTuple):
    id: str
    name: str
    args: dict[str, Any]
    run: Path
    """Whose it is: runs of a sweep may differ in what they reward, and are held to one standard."""


def own_environment(candidates: Sequence[Candidate]) -> OwnEnvironment:
    """That of the first run among them."""
    run = next((candidate.run for candidate in candidates if candidate.run is not None), None)
    if run is None:
        raise BadInput("only a run has an environment of its own", key="--env", fix="Name one with --env ID.")
    config = read_run(run)
    if isinstance(config, RunConfig):
        listed = config.orchestrator.eval.env or config.orchestrator.train.env
    else:
        listed = config.eval.env
    if len(listed) != 1:
        names = ", ".join(env.name for env in listed) or "none"
        raise BadInput(f"{run} has {names}", key="--env", fix="Name one with --env ID.")
    [env] = listed
    return OwnEnvironment(env.id, env.name, dict(env.args), run)
