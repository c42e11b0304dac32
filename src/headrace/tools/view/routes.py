"""What each path of the server answers: functions of the folder, the path's parameters and the query.

The same functions write the export, so that a page shows the same with and without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import BadInput
from headrace.tools.view import charts, runs
from headrace.tools.view.runs import RunFolder

Parameters = Mapping[str, Any]
Query = Mapping[str, list[str]]
Answer = Callable[[RunFolder, Parameters, Query], Any]


def number(query: Query, name: str, default: int | None) -> Any:
    """Return a number of the query."""
    texts = query.get(name, [])
    if not texts or texts[-1] == "":
        return default
    if not (texts[-1].isascii() and texts[-1].isdecimal() and len(texts[-1]) < 16):
        raise BadInput("not a whole number", key=name, value=texts[-1])
    return int(texts[-1])


def _run(folder: RunFolder, path: Parameters, query: Query) -> Any:
    described = runs.describe_run(folder.run(path["run"]))
    return described | {"charts": charts.suggest_charts(described["names"])}


def _series(folder: RunFolder, path: Parameters, query: Query) -> Any:
    chosen = number(query, "buckets", 600), number(query, "first", 0), number(query, "last", None)
    return charts.read_series(folder.run(path["run"]), query.get("name", []), *chosen)


def _lanes(folder: RunFolder, path: Parameters, query: Query) -> Any:
    chosen = number(query, "buckets", 200), number(query, "first", 0), number(query, "last", None)
    return charts.read_lanes(folder.run(path["run"]), *chosen)


ROUTES: dict[str, Answer] = {
    "/api/runs": lambda folder, path, query: runs.list_runs(folder),
    "/api/settings": lambda folder, path, query: runs.compare_settings(folder),
    "/api/runs/{run}": _run,
    "/api/runs/{run}/series": _series,
    "/api/runs/{run}/lanes": _lanes,
}
