"""The file of `headrace sweep`: the run file, the keys that vary, how many runs at once, what is told at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
OWN_KEYS = ("output_dir",)
"""Keys of a run that a sweep sets itself."""


class RandomConfig(Config):
    """`random`: values that are drawn, the same under the same seed."""

    num: int = Field(ge=1)
    """How many points are drawn; more of them leave the first ones as they were."""
    seed: int = 0
    keys: Tree
    """By key of the run file: `{uniform: [a, b]}`, `{log_uniform: [a, b]}`, `{integers: [a, b]}`, `{choice: [...]}`."""


class SweepConfig(Config):
    """Exactly one of `grid`, `list` and `random`."""

    PATHS_OF_FILE = ("run",)

    run: Path | Paths
    """The run file, or several that are merged, relative to the file that names them."""
    output_dir: Path | None = None
    """Where the runs go, a folder each, and the report; unset: `artifacts/sweeps/` of the run file's storage root."""
    overrides: Tree = Field(default_factory=dict)
    """Keys of the run file that are set in all runs."""
    grid: Tree | None = None
    """By key of the run file, a list of values; every combination is run."""
    list: Tables | None = None
    """Tables of overrides, each with a `name` if it likes."""
    random: RandomConfig | None = None
    seeds: Numbers | None = None
    """Every point is run with each; unset: with the run file's own."""
    parallel: int | Literal["auto"] = "auto"
    """Runs at once; auto: one on each GPU, or without any as many as have two cores and memory to themselves."""
    gpus_per_run: int = Field(1, ge=1)
    metrics: Names = ()
    """Those with a curve in the report, the first of which decides; unset: the reward (the loss), and a length."""
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
    def _one_way(self) -> SweepConfig:
        given = [way for way in WAYS if getattr(self, way) is not None]
        if len(given) != 1:
            key = given[-1] if given else "grid"
            raise InvalidValue(f"{len(given)} of {', '.join(WAYS)} are given", key=key, fix="Give exactly one of them.")
        if not getattr(self, given[0]):
            raise InvalidValue("is empty", key=given[0])
        return self

    @model_validator(mode="after")
    def _seeds_are_distinct(self) -> SweepConfig:
        if self.seeds is not None and (not self.seeds or len(set(self.seeds)) < len(self.seeds)):
            raise InvalidValue("must be distinct, and at least one", key="seeds", value=self.seeds)
        return self


def read_sweep(files: Sequence[Path], overrides: Sequence[str]) -> SweepConfig:
    """The files, merged left to right; the run files that they name exist."""
    config, _ = load(SweepConfig, files, overrides)
    where = " + ".join(map(str, files))
    if not config.files:
        raise ConfigError("required, and not set", key="run", file=where, fix="Name a run file.")
    for path in config.files:
        if not path.is_file():
            raise ConfigError("no such file", key="run", value=path, file=where)
    return config


def flat(tree: Tree, is_value: Callable[[Any], bool] = lambda value: not isinstance(value, dict)) -> dict[str, Any]:
    """A table in which keys are dotted, nested or both, by dotted keys alone; of one that is there twice the later."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if is_value(value) or not isinstance(value, dict):
            found[str(key)] = value
        else:
            found |= {f"{key}.{inner}": leaf for inner, leaf in flat(value, is_value).items()}
    return found
