"""What each path of the server answers: functions of the folder, the path's parameters and the query.

The same functions write the export, so that a page shows the same with and without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import BadInput
from headrace.tools.view import charts, comparisons, draws, evaluations, rollouts, runs
from headrace.tools.view.runs import RunFolder
from headrace.transport.run_dir import RolloutKind

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


def _over_steps(read: Callable[..., Any], buckets: int) -> Answer:
    """Return an answer about metrics between two steps, merged into at most as many ranges."""
    return lambda folder, path, query: read(
        folder.run(path["run"]).metrics,
        number(query, "buckets", buckets),
        number(query, "first", 0),
        number(query, "last", None),
    )


def _step(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return rollouts.list_step(folder.run(path["run"]), path["step"])


def _rollout(kind: RolloutKind) -> Answer:
    return lambda folder, path, query: rollouts.describe_rollout(
        folder.run(path["run"]), kind, path["step"], path["row"]
    )


def _credit(folder: RunFolder, path: Parameters, query: Query) -> Any:
    from headrace.tools.view.credit import describe_credit  # imports every algorithm

    return describe_credit(folder.run(path["run"]), path["step"], path["row"])


def _search(folder: RunFolder, path: Parameters, query: Query) -> Any:
    text = query.get("text", [""])[-1]
    return rollouts.search(folder.run(path["run"]), text, number(query, "limit", 100))


def _draws(folder: RunFolder, path: Parameters, query: Query) -> Any:
    filters = {column: query.get(name, [""])[-1] for name, column in DRAW_FILTERS.items()}
    return draws.list_draws(folder.run(path["run"]), number(query, "offset", 0), number(query, "limit", 200), filters)


def _draw(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return draws.describe_draw(folder.run(path["run"]), path["draw"])


def _evaluations(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return evaluations.list_evaluations(folder.run(path["run"]))


def _versions(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return evaluations.compare_versions(folder.run(path["run"]), path["before"], path["after"])


def _compare(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return comparisons.compare(folder, query.get("run", []), query.get("metric", [""])[-1])


DRAW_FILTERS = {"state": "state", "env": "env", "task": "task_key"}
"""Filters of draws: names in a query, and columns of the journal."""

ROUTES: dict[str, Answer] = {
    "/api/runs": lambda folder, path, query: runs.list_runs(folder),
    "/api/settings": lambda folder, path, query: runs.compare_settings(folder),
    "/api/runs/{run}": lambda folder, path, query: runs.describe_run(folder.run(path["run"])),
    "/api/runs/{run}/series": _over_steps(charts.read_series, 600),
    "/api/runs/{run}/lanes": _over_steps(charts.read_lanes, 200),
    "/api/runs/{run}/histograms": _over_steps(charts.read_histograms, 200),
    "/api/runs/{run}/steps/{step:int}": _step,
    "/api/runs/{run}/steps/{step:int}/rollouts/{row:int}": _rollout(RolloutKind.TRAIN),
    "/api/runs/{run}/steps/{step:int}/rollouts/{row:int}/credit": _credit,
    "/api/runs/{run}/evaluation/{step:int}/rollouts/{row:int}": _rollout(RolloutKind.EVAL),
    "/api/runs/{run}/search": _search,
    "/api/runs/{run}/draws": _draws,
    "/api/runs/{run}/draws/{draw:int}": _draw,
    "/api/runs/{run}/evaluation": _evaluations,
    "/api/runs/{run}/evaluation/{before:int}/{after:int}": _versions,
    "/api/compare": _compare,
}
