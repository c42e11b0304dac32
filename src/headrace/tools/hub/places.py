"""Where the files of a run are in a repository, and which of a run's files may be there at all.

The final model is at the root, where everybody looks for a model; the rest of the run is below `run/`. Only what is
named here goes up or comes down: a run directory also has servers' keys, logs, and paths of the machine that it is on.
(A folder that goes up as a dataset is `folder.py`'s.)
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

CARD, MANIFEST = "README.md", "headrace.json"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "*.py")
"""Of a Hugging Face model directory."""
BASE = "base"
"""The model that a run began with, where no hub has it."""
RUN = "run/"
CONFIG, METRICS, JOURNAL = "config.toml", "metrics.jsonl", "journal.sqlite"

_STEP = re.compile(r"step-\d{8}")


def is_model_file(name: str) -> bool:
    return _fits(name, MODEL_FILES) and name not in (CARD, MANIFEST)


def is_part_of_run(path: PurePosixPath) -> bool:
    """Whether a file of a run directory, given by its path in there, may be on the hub."""
    match path.parts:
        case (name,):
            return name in (CONFIG, METRICS, JOURNAL)
        case ("model" | "adapter" | "base", name):
            return is_model_file(name)
        case ("batches", name):
            return fnmatchcase(name, "step-*.safetensors")
        case ("checkpoints", "permanent", step, *inner):
            return _is_part_of_checkpoint(step, inner)
        case ("checkpoints", step, *inner):
            return _is_part_of_checkpoint(step, inner)
    return False


def _is_part_of_checkpoint(step: str, inner: list[str]) -> bool:
    match inner:
        case [name]:
            known = name in ("COMPLETE.json", "state.json")
        case ["model", name]:
            known = is_model_file(name)
        case ["tensors", name]:
            known = fnmatchcase(name, "*.safetensors")
        case _:
            known = False
    return known and _STEP.fullmatch(step) is not None


def in_repo(path: PurePosixPath) -> str:
    """Where a file of a run directory is in the repository."""
    return path.name if path.parts[0] == "model" else f"{RUN}{path}"


def in_run(path: str) -> PurePosixPath | None:
    """The other way round; None for what is not of a run directory."""
    inner = PurePosixPath(path.removeprefix(RUN)) if path.startswith(RUN) else PurePosixPath("model") / path
    return inner if is_part_of_run(inner) else None


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not name.startswith(".") and any(fnmatchcase(name, pattern) for pattern in patterns)
