"""docs/reference/metrics.md as a test reads it: the names in its tables, and whether what a run wrote is among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "reference/metrics.md").read_text()
ANY = "{}"
"""What a word in capitals stands for: a name that only a run has."""
NOT_METRICS = {"step", "time", "process"}


def first_cells(column: str) -> Iterator[tuple[str, str]]:
    """The heading and the first cell of every row of the tables whose first column is called so."""
    heading, wanted = "", False
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cell = line.split(" | ")[0].removeprefix("| ")
        if not line.startswith("|"):
            wanted = False
        elif wanted and not line.startswith("|---"):
            yield heading, cell
        wanted = wanted or cell == column


def names_in(cell: str) -> list[str]:
    """The names in a cell, with what differs from run to run as `{}`; `/max` is the name before it with another end."""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        names.append(names[-1].rpartition("/")[0] + name if name.startswith("/") else name)
    return [re.sub(r"\b[A-Z]+\b", ANY, name) for name in names]


@cache
def documented() -> frozenset[str]:
    """Every name that the page explains; those of losses also by environment."""
    found = {(heading, name) for heading, cell in first_cells("name") for name in names_in(cell)}
    return frozenset({name for _, name in found} | {f"{name}/{ANY}" for heading, name in found if heading == "Losses"})


@cache
def _pattern() -> re.Pattern[str]:
    """At its end a name may have whatever a run, an environment or an algorithm chose to call it."""
    open_ended = (re.escape(re.sub(r"{}$", "", name)) + ".+" * name.endswith(ANY) for name in documented())
    return re.compile("|".join(known.replace(re.escape(ANY), "[^/]+") for known in open_ended))


def undocumented(records: Iterable[dict[str, Any]]) -> list[str]:
    """The names in records of a `metrics.jsonl` that the page does not explain."""
    written = {name for record in records for name in record} - NOT_METRICS
    return sorted(name for name in written if not _pattern().fullmatch(name))
