"""Resolve the relative paths of a short run file, its run directory and the environment variables of its processes.

A relative path is resolved beside the run files if it exists there, else under the storage root. Models are also looked
up in `models/` of the root, and data in `datasets/`. A name that exists nowhere may be one on the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.machine import CACHE_VARIABLE
from headrace.runfile.hackable.sections import AuthConfig

MODELS, DATASETS = "models", "datasets"
MODEL_KWARG = "tokenizer_name"
HUB_KWARGS = ("source", "name")
"""Kwargs of data providers that may be a path or a name on the hub; so may those that end in `_source`."""


class PathResolver(NamedTuple):
    folders: Sequence[Path]
    """The folders of the run files."""
    root: Path | None
    """The storage root; None where it is not set."""

    def existing(self, name: str, inside: str = "") -> Path | None:
        path = Path(name).expanduser()
        beside = [folder / path for folder in self.folders]
        candidates = [*beside, self._below_root(path), (self.root or Path.cwd()) / inside / path]
        return next((candidate.resolve() for candidate in candidates if name and candidate.exists()), None)

    def model(self, name: str) -> str:
        """Return the model's directory, or the name unchanged: one on the hub."""
        return str(self.existing(name, MODELS) or name)

    def under_root(self, path: str) -> str:
        return str(self._below_root(Path(path).expanduser()).resolve())

    def _below_root(self, path: Path) -> Path:
        """Join a path to the root, unless it names the root itself: under `cache`, `cache/models` is `models`."""
        here = Path.cwd()
        root = self.root or here
        return here / path if root.is_relative_to(here) and (here / path).is_relative_to(root) else root / path

    def resolve_kwarg(self, name: str, value: Any) -> Any:
        """Return the value of a kwarg; a path, which is recognized by the name, is resolved."""
        if not isinstance(value, str):
            return value
        if name == MODEL_KWARG:
            return self.model(value)
        if may_be_on_the_hub(name):
            return str(self.existing(value, DATASETS) or value)
        if name == "path" or name.endswith(("_path", "_dir")):
            return str(self.existing(value, DATASETS) or self.under_root(value))
        return value

    def run_directory(self, name: str) -> Path:
        return Path("outputs") / name if self.root is None else self.root / "artifacts" / "runs" / name


def may_be_on_the_hub(kwarg: str) -> bool:
    return kwarg in (*HUB_KWARGS, MODEL_KWARG) or kwarg.endswith("_source")


def variables(root: Path | None, *, offline: bool) -> dict[str, str]:
    """Return the environment variables of every process of the run."""
    home = {} if root is None else {CACHE_VARIABLE: str(root), "HF_HOME": str(root / "hf")}
    return home | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def tokens(auth: AuthConfig) -> dict[str, str]:
    """Map the variables in which libraries look for a token to those of the run file, where they differ."""
    named = {"HF_TOKEN": auth.hf_token, "WANDB_API_KEY": auth.wandb_api_key}
    return {standard: name for standard, name in named.items() if standard != name}
