"""A run's configuration without the places of one machine: where the run is, and where its base model is."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import tomli_w

from headrace.config.base import Tree
from headrace.config.launch import CACHE_VARIABLE
from headrace.runfile.reading import put
from headrace.runfile.run import SHARED

_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")


def hub_name(model: str) -> str | None:
    """The name on the hub of a model that lies in the hub's cache, or is called by its name; None for any other."""
    if found := _SNAPSHOT.search(model):
        return f"{found[1]}/{found[2]}"
    return model if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists() else None


def moved(tree: Tree, output_dir: str, model: str | None) -> bytes:
    """A `config.toml` as it is elsewhere; without a `model`, its model is called as before."""
    tree = copy.deepcopy(tree)
    shared = {} if "data" in tree else SHARED  # as a supervised run has them once
    for path in ("output_dir", *shared.get("output_dir", ())):
        put(tree, path.split("."), output_dir)
    for path in ("model", *shared.get("model", ())) if model is not None else ():
        put(tree, [*path.split("."), "name"], model)
    tree.get("wandb", {}).pop("dir", None)
    for variable in (CACHE_VARIABLE, "HF_HOME"):  # the storage root of one machine
        tree.get("launch", {}).get("env", {}).pop(variable, None)
    return tomli_w.dumps(tree).encode()
