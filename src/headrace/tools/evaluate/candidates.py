"""The models to evaluate, and the environment of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from headrace.errors import BadInput
from headrace.launch.run_directory import is_run
from headrace.launch.saved_config import read_run
from headrace.runfile.run import RunConfig
from headrace.text.hub import model_directory
from headrace.tools.common import short_names
from headrace.transport.files import MARKER, STEP
from headrace.transport.run_dir import RunDir


class Candidate(NamedTuple):
    """A model to evaluate. `source` is a model directory or hub name, a checkpoint, or addresses of servers."""

    name: str
    """Unique within the evaluation; also the name of the model's folder."""
    kind: Literal["model", "checkpoint", "endpoint"]
    source: str
    run: Path | None = None
    """The directory of the model's run."""

    @property
    def step(self) -> int | None:
        """The optimizer step of a run's checkpoint."""
        number = Path(self.source).name.removeprefix("step-")
        return int(number) if self.kind == "checkpoint" and number.isdecimal() else None

    @property
    def on_disk(self) -> tuple[str, int | None]:
        """The resolved path of a source on disk, else the source, and the newest modification time of its weights."""
        path = Path(self.source)
        files = path.glob(MARKER if self.kind == "checkpoint" else "*.safetensors")
        newest = max((file.stat().st_mtime_ns for file in files), default=None)
        return str(path.resolve()) if path.exists() else self.source, newest


def find_models(targets: Sequence[str], *, permanent: bool) -> list[Candidate]:
    """Return the models of all targets in order, without duplicates; runs of a folder in natural sort order."""
    candidates = [candidate for target in targets for candidate in _find(target, permanent)]
    unique = list({(candidate.kind, candidate.source): candidate for candidate in candidates}.values())
    names = short_names([candidate.name for candidate in unique])
    return [candidate._replace(name=name) for candidate, name in zip(unique, names, strict=True)]


def _find(target: str, permanent: bool) -> list[Candidate]:
    """Return the models of one target, named by their absolute path."""
    if "://" in target:
        urls = target.split(",")
        return [Candidate("+".join(urlsplit(url).netloc.replace(":", "-") for url in urls), "endpoint", target)]
    path = Path(target).expanduser()
    if is_run(path):
        return _of_run(path, permanent)
    if (path / MARKER).is_file():
        run = next((parent for parent in path.resolve().parents if is_run(parent)), None)
        return [Candidate(_long_name(path), "checkpoint", str(path), run)]
    if path.is_dir() and not (path / "config.json").is_file():
        runs = [*filter(is_run, path.glob("*"))] or [*filter(is_run, path.glob("*/*"))]
        if not runs:
            fact = "this directory is not a model (no config.json), a run or a checkpoint, and contains no runs"
            fix = "Name a model, a run, a folder of runs, a checkpoint or http://HOST:PORT."
            raise BadInput(fact, key="CHECKPOINT", value=target, fix=fix)
        return [candidate for run in sorted(runs, key=_by_numbers) for candidate in _of_run(run, permanent)]
    model_directory(target, "CHECKPOINT")  # raises if the model does not exist
    return [Candidate(_long_name(path) if path.is_dir() else target, "model", target)]


def _of_run(run: Path, permanent: bool) -> list[Candidate]:
    directory = RunDir(run)
    if not permanent:
        return [Candidate(_long_name(run), "model", str(directory.final_model), run)]
    whole = [path for path in directory.checkpoints.glob(f"permanent/{STEP}") if (path / MARKER).is_file()]
    if not whole:
        fix = "Set ckpt.permanent_interval in its run file, or use --checkpoints final."
        raise BadInput("the run has no permanent checkpoint", key="CHECKPOINT", value=str(run), fix=fix)
    return [
        Candidate(f"{_long_name(run)}/step-{int(path.name.removeprefix('step-'))}", "checkpoint", str(path), run)
        for path in sorted(whole, key=_by_numbers)
    ]


def _long_name(path: Path) -> str:
    return os.path.abspath(path).strip("/")  # does not resolve links


def _by_numbers(path: Path) -> list[tuple[float, str]]:
    pieces = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(piece), "") if number % 2 else (0.0, piece) for number, piece in enumerate(pieces)]


class RunEnvironment(NamedTuple):
    id: str
    name: str
    args: dict[str, Any]
    run: Path
    """The run that has this environment."""


def run_environment(candidates: Sequence[Candidate]) -> RunEnvironment:
    """Return the evaluation environment of the first run, or else its training environment, for all models.

    Runs of a sweep may have different rewards, so one environment is used for all.
    """
    run = next((candidate.run for candidate in candidates if candidate.run is not None), None)
    if run is None:
        raise BadInput("the models have no run with an environment", key="--env", fix="Set --env ID.")
    config = read_run(run)
    if isinstance(config, RunConfig):
        listed = config.orchestrator.eval.env or config.orchestrator.train.env
    else:
        listed = config.eval.env
    if len(listed) != 1:
        names = ", ".join(env.name for env in listed) or "none"
        raise BadInput(f"{run} has {names}", key="--env", fix="Set --env ID.")
    [env] = listed
    return RunEnvironment(env.id, env.name, dict(env.args), run)
