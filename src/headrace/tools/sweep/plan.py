"""The runs of a sweep: its points, each with every seed, and their names. Pure functions."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count, product
from typing import Any, NamedTuple

from headrace.config.base import ConfigError
from headrace.tools.common import short_names
from headrace.tools.sweep.config import RandomConfig, SweepConfig, Tables, flatten

Values = dict[str, Any]
"""What a point sets, by dotted key of the run file."""
DISTRIBUTIONS = ("uniform", "log_uniform", "integers", "choice")
DRAWN_DIGITS = 4
"""Significant digits of a drawn number, so that names stay short."""
DRAWS_PER_POINT = 1000
"""Draws after which a sweep is refused because there are not enough different points."""
BASE = "base"
"""The name of a point that sets nothing."""
MAX_LABEL_CHARS = 60
MAX_FOLDER_CHARS = 100
RESERVED = frozenset({"eval", "logs"})
"""Folders of the sweep itself."""


class PlannedRun(NamedTuple):
    """A point of a sweep with one of its seeds."""

    variant: str
    """The name of its point; runs of one variant differ only in their seeds."""
    values: Values
    seed: int | None
    """None: the run file's own."""

    @property
    def label(self) -> str:
        return self.variant if self.seed is None else f"{self.variant},seed={self.seed}"

    def overrides(self, common: Mapping[str, Any]) -> Values:
        """Return all that it sets; `common` are the overrides of all runs."""
        return {**common, **self.values, **({} if self.seed is None else {"seed": self.seed})}


def plan_runs(config: SweepConfig) -> list[PlannedRun]:
    """Return the runs in the order of the file, the seeds of a point next to each other."""
    names: list[str | None] = []
    if config.list is not None:
        names, points = _listed(config.list)
    elif config.grid is not None:
        points = _combinations(flatten(config.grid))
    else:
        assert config.random is not None  # one of the three is given
        points = _drawn(config.random)
    _check_keys(points, flatten(config.overrides), has_seeds=config.seeds is not None)
    labels = _labels(points, names or [None] * len(points))
    seeds = config.seeds if config.seeds is not None else [None]
    return [PlannedRun(name, point, seed) for name, point in zip(labels, points, strict=True) for seed in seeds]


def _combinations(grid: Values) -> list[Values]:
    """Return every combination; the last key varies fastest."""
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
        point = flatten({key: value for key, value in table.items() if key != "name"})
        if point in points:
            fact = f"sets the same as list.{points.index(point)}"
            raise ConfigError(fact, key=f"list.{number}", fix="Use seeds to repeat a run.")
        names.append(name)
        points.append(point)
    return names, points


def _drawn(config: RandomConfig) -> list[Values]:
    """Return `num` different points. Each value has its own random stream: more points or keys keep the others."""
    distributions: dict[str, tuple[str, list[Any]]] = {}
    for path, values in flatten(config.keys).items():
        key, _, kind = path.rpartition(".")
        _check_distribution(f"random.keys.{path}", kind, values)
        if not key or key in distributions:
            raise ConfigError("must be the only distribution of a key", key=f"random.keys.{path}", value=values)
        distributions[key] = kind, values
    points: list[Values] = []
    for number in count():
        if number == DRAWS_PER_POINT * config.num:
            raise ConfigError(f"there are only {len(points)} different points", key="random.num", value=config.num)
        point = {
            key: draw(kind, values, random.Random(f"{config.seed} {number} {key}"))
            for key, (kind, values) in distributions.items()
        }
        if point not in points:
            points.append(point)
        if len(points) == config.num:
            break
    return points


def _check_distribution(path: str, kind: str, values: Any) -> None:
    if kind not in DISTRIBUTIONS:
        fix = f"Write one of {', '.join(DISTRIBUTIONS)}, as in {{uniform: [0, 1]}}."
        raise ConfigError("not a distribution", key=path, value=values, fix=fix)
    if not isinstance(values, list) or not values:
        raise ConfigError("must be a list", key=path, value=values)
    if kind == "choice":
        return
    wanted = int if kind == "integers" else (int, float)
    numbers = [value for value in values if isinstance(value, wanted) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ConfigError("must be two numbers, the lower first", key=path, value=values)
    if kind == "log_uniform" and numbers[0] <= 0:
        raise ConfigError("the lower end has no logarithm", key=path, value=values, fix="Begin above 0.")


def draw(kind: str, values: list[Any], stream: random.Random) -> Any:
    """Draw from a distribution; real numbers are rounded to `DRAWN_DIGITS`."""
    if kind == "choice":
        return stream.choice(values)
    low, high = values
    if kind == "integers":
        return stream.randint(low, high)
    is_log = kind == "log_uniform"
    value = math.exp(stream.uniform(math.log(low), math.log(high))) if is_log else stream.uniform(low, high)
    return min(max(float(f"{value:.{DRAWN_DIGITS}g}"), float(low)), float(high))


def _check_keys(points: list[Values], common: Values, *, has_seeds: bool) -> None:
    varied = dict.fromkeys(key for point in points for key in point)
    if "output_dir" in varied or "output_dir" in common:
        fact = "every run has a folder of its own"
        raise ConfigError(fact, key="output_dir", fix="Set output_dir of the sweep.")
    for key in varied:
        if key in common:
            raise ConfigError("varied, and set in overrides, too", key=key, fix="Leave it out there.")
    if has_seeds and ("seed" in varied or "seed" in common):
        raise ConfigError("set by seeds", key="seed", fix="Leave it out elsewhere.")
    for values in (*points, common):
        if unset := [key for key, value in values.items() if value is None]:
            raise ConfigError("has no value", key=unset[0], fix="Leave the key out to keep it as it is.")


def _labels(points: Sequence[Values], names: Sequence[str | None]) -> list[str]:
    """Return `lr=0.001,batch_size=64` for each point, with the shortest distinct keys, or the name it was given.

    A label that is too long, or equals another (as of 1 and "1"), ends with a digest of the point.
    """
    keys = list(dict.fromkeys(key for point in points for key in point))
    shorter = [name.replace("/", ".") for name in short_names([key.replace(".", "/") for key in keys])]
    short = dict(zip(keys, shorter, strict=True))
    # A folder's name has a list without its brackets.
    as_lists = [{key: v if isinstance(v, list) else [v] for key, v in point.items()} for point in points]
    labels = [
        name or ",".join(f"{short[key]}={'+'.join(map(format_value, each))}" for key, each in lists.items()) or BASE
        for lists, name in zip(as_lists, names, strict=True)
    ]
    return [
        label if len(label) <= MAX_LABEL_CHARS and labels.count(label) == 1 else f"{label[:51]}-{_digest(point)}"
        for label, point in zip(labels, points, strict=True)
    ]


def folder_name(label: str, taken: Collection[str]) -> str:
    """Return a folder name for a label that differs from those `taken`, also on file systems that ignore case."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", label).strip("-.") or BASE
    occupied = {name.lower() for name in (*taken, *RESERVED)}
    if len(safe) <= MAX_FOLDER_CHARS and safe.lower() not in occupied:
        return safe
    return f"{safe[: MAX_FOLDER_CHARS - 9]}-{_digest(label)}"


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
