"""Which runs a sweep is made of: its points, each with every seed. Pure: nothing is read or started."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, product
from typing import Any, NamedTuple

from headrace.config.base import ConfigError
from headrace.tools.sweep.draws import check, draw, is_distribution
from headrace.tools.sweep.file import OWN_KEYS, RandomConfig, SweepConfig, Tables, flat
from headrace.tools.sweep.names import labels

Values = dict[str, Any]
"""What a point sets, by dotted key of the run file."""
TRIES = 1000
"""Draws for every point that is wanted, before there are taken to be no more."""


class Planned(NamedTuple):
    variant: str
    """Its point, in a word; runs of one variant differ in their seeds alone."""
    values: Values
    seed: int | None
    """None: the run file's own."""

    @property
    def label(self) -> str:
        return self.variant if self.seed is None else f"{self.variant},seed={self.seed}"

    def overrides(self, common: Mapping[str, Any]) -> Values:
        """All that it sets; `common` are those of all runs."""
        return {**common, **self.values, **({} if self.seed is None else {"seed": self.seed})}


def planned(config: SweepConfig) -> list[Planned]:
    """In the order of the file: the seeds of a point beside each other."""
    names, points = _points(config)
    common = flat(config.overrides)
    _check_keys(points, common, has_seeds=config.seeds is not None)
    given = labels(points, names)
    seeds = config.seeds if config.seeds is not None else [None]
    return [Planned(name, point, seed) for name, point in zip(given, points, strict=True) for seed in seeds]


def _points(config: SweepConfig) -> tuple[list[str | None], list[Values]]:
    """With the names that were given to them."""
    if config.list is not None:
        return _listed(config.list)
    points = _combinations(flat(config.grid)) if config.grid is not None else _drawn(config.random)
    return [None] * len(points), points


def _combinations(grid: Values) -> list[Values]:
    """The last key varies fastest."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError("must be a list of values", key=f"grid.{key}", value=values)
        if twice := [value for number, value in enumerate(values) if value in values[:number]]:
            raise ConfigError("a value is given twice", key=f"grid.{key}", value=twice[0])
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def _listed(tables: Tables) -> tuple[list[str | None], list[Values]]:
    names: list[str | None] = []
    points: list[Values] = []
    for number, table in enumerate(tables):
        name = table.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ConfigError("must be a text", key=f"list.{number}.name", value=name)
        if name is not None and name in names:
            raise ConfigError(f"the name of list.{names.index(name)}, too", key=f"list.{number}.name", value=name)
        point = flat({key: value for key, value in table.items() if key != "name"})
        if point in points:
            raise ConfigError(
                f"sets the same as list.{points.index(point)}", key=f"list.{number}", fix="Use seeds to repeat a run."
            )
        names.append(name)
        points.append(point)
    return names, points


def _drawn(config: RandomConfig | None) -> list[Values]:
    assert config is not None  # one of the three ways is given
    keys = flat(config.keys, is_distribution)
    for key, given in keys.items():
        check(key, given)
    points: list[Values] = []
    for number in count():
        if number == TRIES * config.num:
            raise ConfigError(f"there are only {len(points)} different points", key="random.num", value=config.num)
        point = {key: draw(given, key, config.seed, number) for key, given in keys.items()}
        if point not in points:
            points.append(point)
        if len(points) == config.num:
            return points
    raise AssertionError("counting does not end")


def _check_keys(points: list[Values], common: Values, *, has_seeds: bool) -> None:
    varied = dict.fromkeys(key for point in points for key in point)
    for key in (*varied, *common):
        if key in OWN_KEYS:
            raise ConfigError("every run has a folder of its own", key=key, fix="Set output_dir of the sweep.")
    for key in varied:
        if key in common:
            raise ConfigError("varied, and set in overrides, too", key=key, fix="Leave it out there.")
    if has_seeds and ("seed" in varied or "seed" in common):
        raise ConfigError("set by seeds", key="seed", fix="Leave it out elsewhere.")
    for values in (*points, common):
        if unset := [key for key, value in values.items() if value is None]:
            raise ConfigError("has no value", key=unset[0], fix="Leave the key out to keep it as it is.")
