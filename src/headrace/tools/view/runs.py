"""The runs below a folder: their identifiers, and a row with state, progress and rewards for each.

A row is made from the ends of the run's files and a few places between, so that hundreds of runs open at once, and is
kept until one of these files changes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.config.files import read_toml
from headrace.errors import BadInput
from headrace.launch.run_directory import is_run
from headrace.observe.diagnosis import SILENT_S, diagnose
from headrace.observe.run_state import RunReader, read_heartbeat
from headrace.observe.status import ENDED, ObservedStatus
from headrace.observe.summary import Summary, summary_rows
from headrace.runfile.reading import leaves
from headrace.tools.compare.inputs import Settings, differences, settings_of
from headrace.tools.view.charts import REWARDS, read_page, suggest_charts
from headrace.tools.view.series import MetricsTable, find_records, read_lines, sample_records
from headrace.transport.run_dir import RolloutKind, RunDir

MAX_DEPTH = 4
"""Levels of folders below the given one that are searched for runs."""
MAX_RUNS = 2000
SCAN_INTERVAL_S = 2.0
SPARKLINE_POINTS = 24
SECONDS = "progress/seconds"
TAIL_BYTES = 64 << 10
MAX_CACHED = 32
"""Results about files that are kept; each is a list of a step's rollouts or smaller."""
DROPPED = "progress/dropped/"


class NotFound(BadInput):
    """A run, step, rollout or draw that is not on disk."""


class RunRow(msgspec.Struct):
    """A run in the list of runs."""

    id: str
    name: str
    state: str = "unknown"
    """`running`, `finished`, `stopped`, `failed`, `silent` (its launcher stopped writing) or `unknown`."""
    problem: str | None = None
    updated: float | None = None
    seconds: float = 0.0
    step: int = 0
    reward_name: str = ""
    reward_start: float | None = None
    reward_end: float | None = None
    sparkline: list[float] = []


class ViewedRun:
    """A run directory with what is kept of it between requests."""

    def __init__(self, id: str, name: str, root: Path) -> None:
        self.id, self.name, self.dir = id, name, RunDir(root)
        self.metrics = MetricsTable(self.dir.metrics)
        self.reader = RunReader(self.dir)
        self._lock = threading.Lock()
        self._row: tuple[Any, RunRow] | None = None
        self._settings: tuple[Any, dict[str, Any], Settings] | None = None

    def row(self) -> RunRow:
        seen = (identity(self.dir.metrics), identity(self.dir.heartbeat))
        with self._lock:
            if self._row is None or self._row[0] != seen:
                self._row = (seen, self._make_row())
            row = self._row[1]
        state, problem = run_state(self.dir)
        return msgspec.structs.replace(row, state=state, problem=problem)

    def _make_row(self) -> RunRow:
        row = RunRow(self.id, self.name)
        if not self.dir.metrics.is_file():
            return row
        row.updated = self.dir.metrics.stat().st_mtime
        records = sample_records(self.dir.metrics, REWARDS, SPARKLINE_POINTS)
        for index, name in enumerate(REWARDS):
            values = [value for record in records if (value := getattr(record, f"f{index}")) is not None]
            if values:
                row.reward_name, row.reward_start, row.reward_end = name, values[0], values[-1]
                row.sparkline = values[:: max(1, -(-len(values) // SPARKLINE_POINTS))]
                break
        row.step = max((record.step for record in records), default=0)
        tail = read_lines(self.dir.metrics, max(0, self.dir.metrics.stat().st_size - TAIL_BYTES), TAIL_BYTES)
        row.seconds = next((record.f0 for record in find_records(tail, (SECONDS,), newest_first=True)), 0.0)
        return row

    def settings(self) -> dict[str, Any]:
        """Return the configuration as a tree."""
        return self._read_settings()[1]

    def compared_settings(self) -> Settings:
        """Return the configuration by dotted key, without what does not affect training."""
        return self._read_settings()[2]

    def _read_settings(self) -> tuple[Any, dict[str, Any], Settings]:
        seen = identity(self.dir.config)
        with self._lock:
            if self._settings is None or self._settings[0] != seen:
                tree = read_toml(self.dir.config) if self.dir.config.is_file() else {}
                self._settings = (seen, tree, settings_of(tree))
            return self._settings


def identity(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


_cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_cache_lock = threading.Lock()


def cached(path: Path, what: str, make: Callable[[], Any]) -> Any:
    """Return what was made of a file, and make it again once the file has changed; the newest few are kept."""
    key = (path, what, identity(path))
    with _cache_lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    made = make()
    with _cache_lock:
        _cache[key] = made
        while len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    return made


def run_state(run: RunDir) -> tuple[str, str | None]:
    """Return the state of a run from its heartbeat, and its problem."""
    heartbeat = read_heartbeat(run.heartbeat)
    if heartbeat is None:
        return ("finished" if run.final_model.is_dir() or run.final_adapter.is_dir() else "unknown"), None
    silent_s = time.time() - run.heartbeat.stat().st_mtime
    if heartbeat.state == "running" and silent_s > SILENT_S:
        return "silent", heartbeat.problem or f"its launcher has not written its heartbeat for {silent_s:.0f} s"
    return heartbeat.state, heartbeat.problem or None


class RunFolder:
    """The runs below a path, found again at most every two seconds. Raises `BadInput` if there is none."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.name == "config.toml":
            path = path.parent
        if not path.is_dir():
            raise BadInput("no such directory", key="RUN", value=path, fix="Give a run directory or a folder of runs.")
        self.root = path.resolve()
        self.single = is_run(self.root)
        self._lock = threading.Lock()
        self._scanned_at = float("-inf")
        self._runs: dict[str, ViewedRun] = {}
        if not self.runs():
            fix = "Give the output_dir of a run, or a folder that contains such directories."
            raise BadInput("contains no run directory", key="RUN", value=path, fix=fix)

    @property
    def name(self) -> str:
        return self.root.name

    def runs(self) -> dict[str, ViewedRun]:
        """Return the runs by identifier, in the order of their names."""
        with self._lock:
            if time.monotonic() - self._scanned_at > SCAN_INTERVAL_S:
                listed = {}
                for root in [self.root] if self.single else _run_directories(self.root, MAX_DEPTH):
                    name = self.name if self.single else root.relative_to(self.root).as_posix()
                    id = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
                    listed[id] = self._runs.get(id) or ViewedRun(id, os.fsencode(name).decode(errors="replace"), root)
                    if len(listed) == MAX_RUNS:
                        break
                self._runs, self._scanned_at = listed, time.monotonic()
            return self._runs

    def run(self, id: str) -> ViewedRun:
        if id not in self.runs():
            raise NotFound("no such run", key="run", value=id)
        return self._runs[id]


def _run_directories(folder: Path, depth: int) -> Iterator[Path]:
    """Yield run directories in the order of their names; those inside of a run or behind a link are left out."""
    with os.scandir(folder) as entries:
        children = sorted(
            Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        )
    for child in children:
        if is_run(child):
            yield child
        elif depth > 1 and os.access(child, os.R_OK | os.X_OK):
            yield from _run_directories(child, depth - 1)


def list_runs(folder: RunFolder) -> dict[str, Any]:
    return {"folder": folder.name, "single": folder.single, "runs": [run.row() for run in folder.runs().values()]}


def compare_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the settings in which runs of the folder differ, and the main ones of each."""
    runs = folder.runs()
    differing = differences([run.compared_settings() for run in runs.values()]) if len(runs) > 1 else {}
    return {
        "keys": list(differing),
        "values": {id: [values[n] for values in differing.values()] for n, id in enumerate(runs)},
        "runs": {id: main_settings(run.settings()) for id, run in runs.items()},
    }


def main_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a list of runs shows."""
    orchestrator = tree.get("orchestrator", {})
    envs = {slot: orchestrator.get(slot, {}).get("env", []) for slot in ("train", "eval")}
    default = orchestrator.get("algo", {}).get("type", "grpo")
    algorithms = {env.get("name", env.get("id")): env.get("algo", {}).get("type", default) for env in envs["train"]}
    return {
        "kind": "rl" if "orchestrator" in tree else "sft",
        "model": tree.get("model", {}).get("name"),
        "algorithm": ", ".join(dict.fromkeys(algorithms.values())) or None,
        "algorithms": algorithms,
        "environments": {slot: [env.get("name", env.get("id")) for env in entries] for slot, entries in envs.items()},
        "max_steps": tree.get("max_steps"),
        "seed": tree.get("seed"),
    }


def describe_run(run: ViewedRun) -> dict[str, Any]:
    """Return everything about a run but its series."""
    points = read_page(run.metrics)
    end = run.metrics.end  # before the rest is read, so that events from there on leave no gap
    tree, row, names = run.settings(), run.row(), run.metrics.names()
    summary = _summary(row, {name: values[-1] for name, (_, values) in points.items() if len(values)})
    return {
        **main_settings(tree),
        **msgspec.to_builtins(row),
        "path": str(run.dir.root),
        "summary": summary_rows(summary),
        "dropped": summary.dropped,
        "names": names,
        "charts": suggest_charts(names),
        "offset": end,
        "settings": leaves(tree),
        "journal": run.dir.journal.is_file(),
        **status_of(run),
        **saved_files(run),
    }


def _summary(row: RunRow, last: dict[str, Any]) -> Summary:
    """Return the numbers of `headrace summary` that need no other file than the metrics; `last` are the last values."""
    is_reward = row.reward_name == REWARDS[0]
    dropped = {name.removeprefix(DROPPED): int(n) for name, n in last.items() if name.startswith(DROPPED) and n}
    return Summary(
        steps=row.step,
        reward_start=row.reward_start if is_reward else None,
        reward_end=row.reward_end if is_reward else None,
        reward_from="train",
        loss_end=last.get("loss"),
        seconds=row.seconds,
        rollouts=int(last.get("progress/rollouts", 0)),
        tokens_sampled=int(last.get("progress/tokens_sampled", 0)),
        tokens_trained=int(last.get("progress/tokens_trained", 0)),
        dropped=dropped,
    )


def status_of(run: ViewedRun) -> dict[str, Any]:
    """Return the state of the run and of its processes, as the page and its live updates show it."""
    state, problem = run_state(run.dir)
    seen = run.reader.read()
    return {
        "state": state,
        "problem": problem,
        "doctor": diagnose(seen),
        "processes": [_process(status) for status in seen.statuses.values()],
        "notices": [notice for status in seen.statuses.values() for notice in _notices(run, status)],
    }


def _notices(run: ViewedRun, status: ObservedStatus) -> Iterator[dict[str, Any]]:
    """Yield the notices of a process, with the step whose last record came after each."""
    for text, at in zip_longest(status.notices, status.notice_times):
        step = None
        if at is not None:
            steps, times = run.metrics.points(["time"])["time"]
            step = int(steps[min(int(np.searchsorted(times, at)), len(steps) - 1)]) if len(steps) else None
        yield {"process": status.process, "text": text, "time": at, "step": step}


def _process(status: ObservedStatus) -> dict[str, Any]:
    return {
        "process": status.process,
        "pid": status.pid,
        "state": status.state,
        "waiting_for": status.waiting_for,
        "waiting_s": status.age(status.waiting_since) if status.waiting_for else 0.0,
        "silent_s": None if status.state in ENDED else status.silent_s,
        "problem": status.problem,
        "problem_s": status.age(status.problem_since) if status.problem else 0.0,
        "progress": "" if status.progress is None else str(status.progress),
        "gauges": status.gauges,
    }


def saved_files(run: ViewedRun) -> dict[str, list[int]]:
    """Return the steps and versions of which files are on disk."""
    return {
        "steps": list(RolloutKind.TRAIN.files(run.dir.rollouts)),
        "eval_steps": list(RolloutKind.EVAL.files(run.dir.rollouts)),
        "token_steps": run.dir.tokens.steps(),
    }
