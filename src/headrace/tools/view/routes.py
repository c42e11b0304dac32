"""What each path of the server answers: functions of the folder, the path's parameters and the query.

The same functions write the export, so that a page shows the same with and without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.errors import BadInput
from headrace.tools.view import charts, comparisons, credit, draws, evaluations, rollouts, runs
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


def _of_run(read: Callable[..., Any]) -> Answer:
    """Return an answer about a run; other parameters of the path are arguments of `read`."""
    return lambda folder, path, query: read(folder.run(path["run"]), **{n: path[n] for n in path if n != "run"})


def _over_steps(read: Callable[..., Any], buckets: int) -> Answer:
    """Return an answer about metrics between two steps, merged into at most as many ranges."""
    return lambda folder, path, query: read(
        folder.run(path["run"]).metrics,
        number(query, "buckets", buckets),
        number(query, "first", 0),
        number(query, "last", None),
    )


def _search(folder: RunFolder, path: Parameters, query: Query) -> Any:
    text = query.get("text", [""])[-1]
    return rollouts.search(folder.run(path["run"]), text, number(query, "limit", 100))


def _draws(folder: RunFolder, path: Parameters, query: Query) -> Any:
    columns = {"state": "state", "env": "env", "task": "task_key"}  # of the journal, by name in a query
    filters = {column: query.get(name, [""])[-1] for name, column in columns.items()}
    return draws.list_draws(folder.run(path["run"]), number(query, "offset", 0), number(query, "limit", 200), filters)


def _compare(folder: RunFolder, path: Parameters, query: Query) -> Any:
    return comparisons.compare(folder, query.get("run", []), query.get("metric", [""])[-1])


ROUTES: dict[str, Answer] = {
    "/api/runs": lambda folder, path, query: runs.list_runs(folder),
    "/api/settings": lambda folder, path, query: runs.compare_settings(folder),
    "/api/runs/{run}": _of_run(runs.describe_run),
    "/api/runs/{run}/series": _over_steps(charts.read_series, 600),
    "/api/runs/{run}/lanes": _over_steps(charts.read_lanes, 200),
    "/api/runs/{run}/histograms": _over_steps(charts.read_histograms, 200),
    "/api/runs/{run}/steps/{step:int}": _of_run(rollouts.list_step),
    "/api/runs/{run}/steps/{step:int}/rollouts/{row:int}": _of_run(rollouts.describe_rollout),
    "/api/runs/{run}/steps/{step:int}/rollouts/{row:int}/credit": _of_run(credit.describe_credit),
    "/api/runs/{run}/evaluation/{step:int}/rollouts/{row:int}": _of_run(
        partial(rollouts.describe_rollout, kind=RolloutKind.EVAL)
    ),
    "/api/runs/{run}/search": _search,
    "/api/runs/{run}/draws": _draws,
    "/api/runs/{run}/draws/{draw:int}": _of_run(draws.describe_draw),
    "/api/runs/{run}/evaluation": _of_run(evaluations.list_evaluations),
    "/api/runs/{run}/evaluation/{before:int}/{after:int}": _of_run(evaluations.compare_versions),
    "/api/compare": _compare,
}
