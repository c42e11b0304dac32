"""Which models are meant: a model, a run's final model or its permanent checkpoints, a folder of runs, an endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from headrace.errors import BadInput
from headrace.launch.run_directory import is_run
from headrace.text.hub import model_directory
from headrace.tools.names import short_names
from headrace.transport.files import MARKER
from headrace.transport.run_dir import RunDir


class Candidate(NamedTuple):
    """A model to evaluate. `source` is a model directory or hub name, a checkpoint, or addresses of servers."""

    name: str
    """Unlike all others of the evaluation; also the folder for what it says."""
    kind: Literal["model", "checkpoint", "endpoint"]
    source: str
    run: Path | None = None
    """The run that it is of."""

    @property
    def step(self) -> int | None:
        """Of a checkpoint of a run."""
        number = Path(self.source).name.removeprefix("step-")
        return int(number) if self.kind == "checkpoint" and number.isdecimal() else None


def find_models(targets: Sequence[str], *, permanent: bool) -> list[Candidate]:
    """In the order given; those of a folder by their names, with numbers in them by size."""
    found = [candidate for target in targets for candidate in _find(target, permanent)]
    unlike = list({(candidate.kind, candidate.source): candidate for candidate in found}.values())
    names = short_names([candidate.name for candidate in unlike])
    return [candidate._replace(name=name) for candidate, name in zip(unlike, names, strict=True)]


def _find(target: str, permanent: bool) -> list[Candidate]:
    """With long names: all of the path."""
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
            raise BadInput(
                "this directory is neither a model (no config.json) nor a run nor a checkpoint, and has no runs in it",
                key="CHECKPOINT",
                value=target,
                fix="Give a model, a run, a folder of runs, a checkpoint or http://HOST:PORT.",
            )
        return [candidate for run in sorted(runs, key=_by_numbers) for candidate in _of_run(run, permanent)]
    model_directory(target, "CHECKPOINT")  # it is there, or this says where it was looked for
    return [Candidate(_long_name(path) if path.is_dir() else target, "model", target)]


def _of_run(run: Path, permanent: bool) -> list[Candidate]:
    directory = RunDir(run)
    if not permanent:
        return [Candidate(_long_name(run), "model", str(directory.final_model), run)]
    whole = [path for path in directory.checkpoints.glob("permanent/step-*") if (path / MARKER).is_file()]
    if not whole:
        raise BadInput(
            "the run has no permanent checkpoint",
            key="CHECKPOINT",
            value=str(run),
            fix="ckpt.permanent_interval in its run file makes them; --checkpoints final takes its final model.",
        )
    return [
        Candidate(f"{_long_name(run)}/step-{int(path.name.removeprefix('step-'))}", "checkpoint", str(path), run)
        for path in sorted(whole, key=_by_numbers)
    ]


def _long_name(path: Path) -> str:
    return os.path.abspath(path).strip("/")  # a link's own name, not that of what it leads to


def _by_numbers(path: Path) -> list[tuple[float, str]]:
    pieces = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(float(piece), "") if number % 2 else (0.0, piece) for number, piece in enumerate(pieces)]
