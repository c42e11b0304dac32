"""The file of `headrace sweep`: the run file, the keys that vary, how many runs at once, and what is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Config, ConfigError, Tree
from headrace.errors import InvalidValue
from headrace.runfile.reading import load

# Outside the class: one of its fields is called `list`.
Paths = list[Path]
Tables = list[Tree]
Numbers = list[int]
Names = tuple[str, ...]

WAYS = ("grid", "list", "random")


class RandomConfig(Config):
    """`random`: values that are drawn, the same under the same seed."""

    num: int = Field(ge=1)
    """How many points are drawn; a larger number keeps the first points."""
    seed: int = 0
    keys: Tree
    """By key of the run file: `{uniform: [a, b]}`, `{log_uniform: [a, b]}`, `{integers: [a, b]}`, `{choice: [...]}`."""


class SweepConfig(Config):
    """Exactly one of `grid`, `list` and `random` is given."""

    PATHS_OF_FILE = ("run",)

    run: Path | Paths
    """The run file, or several that are merged, relative to the file that names them."""
    output_dir: Path | None = None
    """The folder of the runs and the report; unset: `artifacts/sweeps/` of the run file's storage root."""
    overrides: Tree = Field(default_factory=dict)
    """Keys of the run file that are set in all runs."""
    grid: Tree | None = None
    """By key of the run file, a list of values; every combination is run."""
    list: Tables | None = None
    """Tables of overrides, each with an optional `name`."""
    random: RandomConfig | None = None
    seeds: Numbers | None = None
    """Every point is run with each seed; unset: with the run file's own."""
    parallel: int | Literal["auto"] = "auto"
    """Runs at once; auto: one per GPU, or without GPUs as many as have two cores and enough memory each."""
    gpus_per_run: int = Field(1, ge=1)
    metrics: Names = ()
    """Metrics with a curve in the report, the first of which ranks variants; unset: reward (or loss), and a length."""
    eval: Tree | None = None
    """Options of `headrace eval`, with underscores: how the finished models are evaluated at the end."""

    @property
    def files(self) -> Paths:
        """The run files."""
        return [self.run] if isinstance(self.run, Path) else self.run

    @field_validator("parallel")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise InvalidValue("must be at least 1, or auto", value=value)
        return value

    @model_validator(mode="after")
    def _check(self) -> SweepConfig:
        chosen = [way for way in WAYS if getattr(self, way) is not None]
        if len(chosen) != 1:
            key = chosen[-1] if chosen else "grid"
            raise InvalidValue(
                f"{len(chosen)} of {', '.join(WAYS)} are given", key=key, fix="Give exactly one of them."
            )
        if not getattr(self, chosen[0]):
            raise InvalidValue("is empty", key=chosen[0])
        if self.seeds is not None and (not self.seeds or len(set(self.seeds)) < len(self.seeds)):
            raise InvalidValue("must be distinct, and at least one", key="seeds", value=self.seeds)
        return self


def read_sweep(files: Sequence[Path], overrides: Sequence[str]) -> SweepConfig:
    """Read the files, merged left to right; raises `ConfigError` if a run file does not exist.

    `--launch.on slurm` sets a key of the run file: it is short for `--overrides.launch.on slurm`.
    """
    words = [f"--overrides.{word[2:]}" if word.startswith("--launch.") else word for word in overrides]
    config, _ = load(SweepConfig, files, words)
    where = " + ".join(map(str, files))
    if not config.files:
        raise ConfigError("required, and not set", key="run", file=where, fix="Name a run file.")
    for path in config.files:
        if not path.is_file():
            raise ConfigError("no such file", key="run", value=path, file=where)
    return config


def flatten(tree: Tree) -> dict[str, Any]:
    """Return the values of a table by dotted key; its keys may be dotted, nested or both, and the last one counts."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            values[str(key)] = value
    return values


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Return `--key=value` for each, which `headrace rl` parses to the same value."""
    return [f"--{key}={_toml(key, value)}" for key, value in overrides.items()]


def _toml(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(key, inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(key, inner) for inner in value) + "]"
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value, ensure_ascii=False)
    raise ConfigError("must be a text, number, boolean, list or table", key=key, value=value)
