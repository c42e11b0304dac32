"""Values that are drawn, each from a stream of its own: more points, or another key, leave the others as they were."""

from __future__ import annotations

import math
import random
from typing import Any

from headrace.config.base import ConfigError

DISTRIBUTIONS = ("uniform", "log_uniform", "integers", "choice")
DIGITS = 4
"""Of a drawn number, so that names stay short."""


def is_distribution(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)) in DISTRIBUTIONS


def check(key: str, given: Any) -> None:
    """Refuse what nothing can be drawn from."""
    where = f"random.keys.{key}"
    if not is_distribution(given):
        known = ", ".join(DISTRIBUTIONS)
        fix = f"Write one of {known}, as in {{uniform: [0, 1]}}."
        raise ConfigError("not a distribution", key=where, value=given, fix=fix)
    ((kind, values),) = given.items()
    if not isinstance(values, list) or not values:
        raise ConfigError("must be a list", key=f"{where}.{kind}", value=values)
    if kind == "choice":
        return
    wanted = int if kind == "integers" else (int, float)
    numbers = [value for value in values if isinstance(value, wanted) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ConfigError("must be two numbers, the lower first", key=f"{where}.{kind}", value=values)
    if kind == "log_uniform" and numbers[0] <= 0:
        raise ConfigError("the lower end has no logarithm", key=f"{where}.{kind}", value=values, fix="Begin above 0.")


def draw(given: dict[str, Any], key: str, seed: int, number: int) -> Any:
    """The value of point `number`; a number of a range is told in four digits."""
    ((kind, values),) = given.items()
    stream = random.Random(f"{seed} {number} {key}")
    if kind == "choice":
        return stream.choice(values)
    low, high = values
    if kind == "integers":
        return stream.randint(low, high)
    is_log = kind == "log_uniform"
    value = math.exp(stream.uniform(math.log(low), math.log(high))) if is_log else stream.uniform(low, high)
    return min(max(float(f"{value:.{DIGITS}g}"), float(low)), float(high))
