"""A minimal run file for tests, and how they load it."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config.base import ConfigError, Tree
from headrace.errors import BadInput
from headrace.runfile.reading import load, merge, validate
from headrace.runfile.run import RunConfig


def minimal(**changes: Any) -> Tree:
    """The smallest tree that is a valid run; `changes` are merged over it."""
    tree: Tree = {
        "output_dir": "outputs/test",
        "max_steps": 10,
        "seq_len": 64,
        "model": {"name": "models/tiny"},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    }
    merge(tree, changes)
    return tree


def run(**changes: Any) -> RunConfig:
    """The minimal run with changes, validated."""
    return validate(RunConfig, minimal(**changes), "run.toml")[0]


def refusals(**changes: Any) -> tuple[BadInput, ...]:
    """The problems of the minimal run with changes."""
    with pytest.raises(ConfigError) as refused:
        run(**changes)
    return refused.value.problems


def refusal(**changes: Any) -> BadInput:
    """The only problem of the minimal run with changes."""
    (problem,) = refusals(**changes)
    return problem


def algo(given: Any, **orchestrator: Any) -> Any:
    """The algorithm that `[orchestrator.algo]` becomes."""
    return run(orchestrator={"algo": given, **orchestrator}).orchestrator.algo


MINIMAL = """
output_dir = "outputs/test"
max_steps = 10
seq_len = 64
model.name = "models/tiny"
[[orchestrator.train.env]]
id = "reverse-text"
"""


def load_text(directory: Path, text: str, *overrides: str) -> tuple[RunConfig, list[str]]:
    """Load `text` as a run file."""
    path = directory / "run.toml"
    path.write_text(text)
    return load(RunConfig, [path], overrides)
