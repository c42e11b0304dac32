"""The files of a repository: where the parts of a run are, its configuration without local paths, and the manifest.

The final model is at the root, where tools look for a model; the rest of the run is below `run/`. Only files that are
named here are uploaded or downloaded, because a run directory also has servers' keys, logs and paths of its machine.
(`folder.py` selects the files of a dataset.)
"""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
import tomli_w

from headrace.config.base import Tree
from headrace.errors import BadInput
from headrace.machine import CACHE_VARIABLE
from headrace.runfile.reading import put
from headrace.runfile.run import SHARED
from headrace.tools.hub.repository import Repository, Snapshot

CARD, MANIFEST = "README.md", "headrace.json"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "*.py")
"""Files of a Hugging Face model directory."""
BASE = "base"
"""The folder of the model that a run began with, if it is not on a hub."""
RUN = "run/"
CONFIG, METRICS, JOURNAL = "config.toml", "metrics.jsonl", "journal.sqlite"
SCHEMA = 1
Kind = Literal["run", "model", "dataset"]

_STEP = re.compile(r"step-\d{8}")
_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")


def is_model_file(name: str) -> bool:
    is_listed = any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
    return is_listed and not name.startswith(".") and name not in (CARD, MANIFEST)


def is_part_of_run(path: PurePosixPath) -> bool:
    """Return whether a file of a run directory, given by its path in it, may be on the hub."""
    match path.parts:
        case (name,):
            return name in (CONFIG, METRICS, JOURNAL)
        case ("model" | "adapter" | "base", name):
            return is_model_file(name)
        case ("batches", name):
            return fnmatchcase(name, "step-*.safetensors")
        case ("reference", name):
            return fnmatchcase(name, "*.safetensors")
        case ("checkpoints", "permanent", step, *inner) | ("checkpoints", step, *inner):
            return _STEP.fullmatch(step) is not None and _is_part_of_checkpoint(inner)
    return False


def _is_part_of_checkpoint(parts: list[str]) -> bool:
    match parts:
        case [name]:
            return name in ("COMPLETE.json", "state.json")
        case ["model", name]:
            return is_model_file(name)
        case ["tensors", name]:
            return fnmatchcase(name, "*.safetensors")
    return False


def path_in_repo(path: PurePosixPath) -> str:
    """Return the repository path of a file of a run directory."""
    return path.name if path.parts[0] == "model" else f"{RUN}{path}"


def path_in_run(path: str) -> PurePosixPath | None:
    """Return the path in a run directory of a file of the repository; None if it is not part of a run."""
    inner = PurePosixPath(path.removeprefix(RUN)) if path.startswith(RUN) else PurePosixPath("model") / path
    return inner if is_part_of_run(inner) else None


def hub_name(model: str) -> str | None:
    """Return the hub name of a model in the hub's cache, or of a name itself; None for a local directory."""
    if match := _SNAPSHOT.search(model):
        return f"{match[1]}/{match[2]}"
    return model if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists() else None


def relocate_config(tree: Tree, output_dir: str, model: str | None) -> bytes:
    """Return a `config.toml` with another output directory and, if `model` is set, another model."""
    tree = copy.deepcopy(tree)
    shared = {} if "data" in tree else SHARED  # a supervised run has each key once
    for path in ("output_dir", *shared.get("output_dir", ())):
        put(tree, path.split("."), output_dir)
    for path in ("model", *shared.get("model", ())) if model is not None else ():
        put(tree, [*path.split("."), "name"], model)
    tree.get("wandb", {}).pop("dir", None)
    for variable in (CACHE_VARIABLE, "HF_HOME"):  # the storage root of one machine
        tree.get("launch", {}).get("env", {}).pop(variable, None)
    return tomli_w.dumps(tree).encode()


class HubManifest(msgspec.Struct):
    """`headrace.json`: what was pushed to a repository, so that a pull can check whether it is complete."""

    kind: Kind
    name: str
    """The name of the run, the model directory, the file or folder."""
    files: list[str]
    """All files that were pushed, without the card."""
    card: str = ""
    """The Git hash of the pushed card; a card that was edited since is kept."""
    schema: int = SCHEMA

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def read_manifest(repository: Repository, remote: Snapshot | None) -> HubManifest | None:
    """Return the manifest of a repository; None if it has none."""
    if remote is None or MANIFEST not in remote.files:
        return None
    where = f"{MANIFEST} of {repository.name}"
    try:
        manifest = msgspec.json.decode(repository.read(MANIFEST, remote.commit), type=HubManifest)
    except msgspec.DecodeError as error:
        raise BadInput(f"not written by Headrace: {error}", file=where) from error
    if manifest.schema != SCHEMA:
        raise BadInput(f"this version of Headrace reads {SCHEMA}", file=where, key="schema", value=manifest.schema)
    return manifest
