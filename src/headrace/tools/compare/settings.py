"""What differs between the saved configurations of runs, and which runs differ in their seeds alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.runfile.leaves import leaves
from headrace.runfile.run import SHARED

Settings = dict[str, Any]
"""A configuration by dotted key, as overrides write them."""

NOT_COMPARED = ("output_dir", "wandb", "tensorboard", "inference.port", "trainer.weights.port")
"""Keys, or sections, that say where a run is kept, shown and reached, and nothing of what is trained."""
SEEDS = ("seed", *SHARED["seed"])
COPIES = {copy: source for source, copies in SHARED.items() for copy in copies}
"""Keys that a run fills from another."""
ENVIRONMENT_SEED = re.compile(r"orchestrator\.(train|eval)\.env\.\d+\.args\.seed")
"""An environment's own; it is the run's again where the run file has filled it."""


def settings_of(tree: Mapping[str, Any]) -> Settings:
    """A saved configuration as dotted keys, without what is not compared."""
    aside = (*NOT_COMPARED, *SHARED["output_dir"])
    return {key: value for key, value in leaves(tree).items() if not any(_inside(key, section) for section in aside)}


def _inside(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def differences(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """The keys in which any two runs differ, each with the value of every run; None where it is not set.

    A key that every run has filled from another, as `trainer.seed` from `seed`, is not told twice.
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    found = {key: [run.get(key) for run in runs] for key in keys}
    return {
        key: values
        for key, values in found.items()
        if any(value != values[0] for value in values) and found.get(_source(key)) != values
    }


def _source(key: str) -> str:
    """Where a copied key has its value from; of any other, nowhere."""
    if ENVIRONMENT_SEED.fullmatch(key):
        return "seed"
    copied = next((copy for copy in COPIES if _inside(key, copy)), None)
    return "" if copied is None else COPIES[copied] + key.removeprefix(copied)


def group_by_variant(runs: Sequence[Settings]) -> list[list[int]]:
    """The numbers of the runs, those together that differ in nothing but the seed, in the order in which they come."""
    groups: list[list[int]] = []
    for number, run in enumerate(runs):
        alike = (group for group in groups if _without_seed(runs[group[0]]) == _without_seed(run))
        group = next(alike, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _without_seed(run: Settings) -> Settings:
    seed = run.get("seed")
    return {
        key: value
        for key, value in run.items()
        if key not in SEEDS and not (ENVIRONMENT_SEED.fullmatch(key) and value == seed)
    }
