"""Keys of an algorithm on the command line of a command that is about one algorithm: `--algo.key value`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.base import ConfigError, Tree
from headrace.runfile.reading import parse_overrides, put


def put_algorithm_keys(section: Tree, overrides: Sequence[str]) -> None:
    """Set what `--algo.key value` says in an `algo` section."""
    for path, value in parse_overrides(overrides):
        if path[0] != "algo" or len(path) == 1:
            raise ConfigError("not a key of the algorithm", key=f"--{'.'.join(path)}", fix="Write --algo.key value.")
        if len(path) > 2 and isinstance(section.get(path[1]), str):
            section[path[1]] = _table(section[path[1]])
        put({"algo": section}, path, value)


def _table(short: str) -> Tree:
    """What a text stands for where keys are to be set: the policy gives way to another model, a type is one key."""
    return {} if short == "policy" else {"type": short}
