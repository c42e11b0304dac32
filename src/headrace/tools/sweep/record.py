"""`sweep.json`, the record of a sweep: its runs, the settings of each, and how it ended.

A run is identified by what it sets, not by its name: a changed plan finds the runs that it still has, and runs that it
no longer has are kept. Everything else is read from the run directories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config.base import Config
from headrace.errors import BadInput
from headrace.launch.errors import BadRequest
from headrace.launch.run_directory import DirectoryPlan, in_use, is_run
from headrace.observe.run_state import HeartbeatContent
from headrace.tools.compare.inputs import differences, settings_of
from headrace.tools.sweep.plan import PlannedRun, folder_name
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir

SCHEMA = 1
FILE = "sweep.json"

State = Literal["waiting", "running", "unfinished", "failed", "finished"]


class RunRecord(msgspec.Struct):
    """A run of the sweep: what it sets, and how it ended."""

    name: str
    """The name of its folder."""
    variant: str
    values: dict[str, Any]
    seed: int | None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """The settings that are not default, without output directory and addresses."""
    max_steps: int | None = None
    outcome: Literal["", "finished", "failed"] = ""
    failure: str = ""


class SweepRecord(msgspec.Struct):
    """The content of `sweep.json`."""

    schema: int = SCHEMA
    files: list[str] = msgspec.field(default_factory=list)
    """The run files."""
    plan: list[str] = msgspec.field(default_factory=list)
    """The names of the planned runs, in order."""
    runs: dict[str, RunRecord] = msgspec.field(default_factory=dict)
    """By name; also runs of earlier plans."""

    @property
    def planned(self) -> list[RunRecord]:
        return [self.runs[name] for name in self.plan]


def read_record(directory: Path) -> SweepRecord:
    """Return the record of a sweep, or an empty one if there is none."""
    path = directory / FILE
    if not path.is_file():
        return SweepRecord()
    try:
        record = msgspec.json.decode(path.read_bytes(), type=SweepRecord)
    except msgspec.DecodeError as error:
        raise BadInput(f"not written by headrace sweep: {error}", file=path) from error
    if record.schema != SCHEMA:
        raise BadInput(f"written with schema {record.schema}, and this version reads {SCHEMA}", file=path)
    return record


def write_record(directory: Path, record: SweepRecord) -> None:
    write_atomically(directory / FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def name_runs(planned: Sequence[PlannedRun], previous: SweepRecord) -> dict[str, PlannedRun]:
    """Return the runs by the names of their folders; a known run keeps its name."""
    taken = set(previous.runs)
    by_name: dict[str, PlannedRun] = {}
    for run in planned:
        same = [name for name, old in previous.runs.items() if (old.values, old.seed) == (run.values, run.seed)]
        name = same[0] if same else folder_name(run.label, taken)
        taken.add(name)
        by_name[name] = run
    return by_name


def settings_of_run(config: Config) -> dict[str, Any]:
    """Return the settings that affect training, by dotted key, without defaults, which may change between versions."""
    settings = settings_of(config.model_dump(mode="json", exclude_defaults=True))
    return {key: value for key, value in settings.items() if not key.startswith("launch.")}


def revise_record(
    previous: SweepRecord, runs: Mapping[str, PlannedRun], configs: Mapping[str, Config], files: Sequence[Path]
) -> SweepRecord:
    """Return the record with a new plan."""
    records = dict(previous.runs)
    for name, run in runs.items():
        settings, max_steps = settings_of_run(configs[name]), getattr(configs[name], "max_steps", None)
        records[name] = RunRecord(name, run.variant, run.values, run.seed, settings, max_steps)
        if (before := previous.runs.get(name)) is not None:
            records[name].outcome, records[name].failure = before.outcome, before.failure
    return SweepRecord(files=[str(file) for file in files], plan=list(runs), runs=records)


def check_settings(directory: Path, previous: SweepRecord, revised: SweepRecord, *, clean: bool) -> None:
    """Raise `BadRequest` if a run directory was made with other settings; with `clean`, delete it instead."""
    for record in revised.planned:
        folder = directory / record.name
        if is_run(folder):
            before = previous.runs.get(record.name)
            changed = {} if before is None else differences([before.settings, record.settings])
            values = {key: ["default" if v is None else str(v) for v in pair] for key, pair in changed.items()}
            reason = ", ".join(f"{key} was {was}, now {new}" for key, (was, new) in values.items())
            reason = "it is not one that this sweep has started" if before is None else reason
            if not reason:
                continue
            if not clean:
                fix = "Choose another, or start such runs over with --clean (deletes them)."
                raise BadRequest(f"{folder} has a run, and {reason}", key="output_dir", value=folder.parent, fix=fix)
            DirectoryPlan(folder, clean=True).apply()
        record.outcome, record.failure = "", ""


def note_outcomes(directory: Path, record: SweepRecord) -> None:
    """Record how runs ended that were started elsewhere, as by SLURM: their heartbeats have it."""
    for run in record.planned:
        path = RunDir(directory / run.name).heartbeat
        if run.outcome != "finished" and path.is_file():
            content = msgspec.json.decode(path.read_bytes(), type=HeartbeatContent)
            if content.state in ("finished", "failed"):
                is_finished = content.state == "finished"
                run.outcome, run.failure = ("finished", "") if is_finished else ("failed", content.problem)


def state_of(record: RunRecord, directory: Path) -> State:
    """Return the state of a run, from its folder and its recorded outcome."""
    folder = directory / record.name
    if in_use(folder):
        return "running"
    if not is_run(folder):
        return "failed" if record.outcome == "failed" else "waiting"
    return record.outcome or "unfinished"
