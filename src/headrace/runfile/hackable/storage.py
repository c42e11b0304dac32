"""Where a relative path of the file leads, where the run goes, and which environment variables its processes get.

A relative path is what lies beside a run file, if there is something of that name; else it is under the storage root. A
model is also looked for in `models/` of the root, and data in `datasets/`. What is found nowhere may be a name on the
hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.launch import CACHE_VARIABLE
from headrace.runfile.hackable.sections import AuthConfig

MODELS, DATASETS = "models", "datasets"
MODEL_KWARG = "tokenizer_name"
HUB_KWARGS = ("source", "name")
"""Kwargs of data providers that may be a path or a name on the hub; so may those that end in `_source`."""


class Places(NamedTuple):
    """`folders` are those of the run files; `root` is None where no storage root is given."""

    folders: Sequence[Path]
    root: Path | None

    def existing(self, given: str, inside: str = "") -> Path | None:
        path = Path(given).expanduser()
        beside = [folder / path for folder in self.folders]
        found = [*beside, self._below_root(path), (self.root or Path.cwd()) / inside / path]
        return next((place.resolve() for place in found if given and place.exists()), None)

    def model(self, given: str) -> str:
        """A directory, or as it is: a name on the hub."""
        return str(self.existing(given, MODELS) or given)

    def under_root(self, given: str) -> str:
        return str(self._below_root(Path(given).expanduser()).resolve())

    def _below_root(self, path: Path) -> Path:
        """Join a path to the root, unless it names the root itself: under `cache`, `cache/models` is `models`."""
        here = Path.cwd()
        root = self.root or here
        return here / path if root.is_relative_to(here) and (here / path).is_relative_to(root) else root / path

    def in_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """With the paths among them resolved: those that are called so."""
        return {name: self._value(name, value) if isinstance(value, str) else value for name, value in kwargs.items()}

    def _value(self, name: str, value: str) -> str:
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
    """What every process of the run finds in its environment."""
    home = {} if root is None else {CACHE_VARIABLE: str(root), "HF_HOME": str(root / "hf")}
    return home | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def tokens(auth: AuthConfig) -> dict[str, str]:
    """By the name under which libraries look for a token, the variable that has it, where that is another."""
    named = {"HF_TOKEN": auth.hf_token, "WANDB_API_KEY": auth.wandb_api_key}
    return {standard: name for standard, name in named.items() if standard != name}
