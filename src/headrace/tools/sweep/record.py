"""What a sweep remembers of its runs, in `sweep.json`: which there are, what each was started with, how it ended.

The rest is read off the run directories. A run is known by what it sets, not by its name: a changed plan finds the runs
that it still has, wherever their names would be now, and those that it no longer has are left alone.
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
from headrace.tools.compare.inputs import differences, settings_of
from headrace.tools.sweep.names import folder_name
from headrace.tools.sweep.plan import Planned
from headrace.transport.files import write_atomically

SCHEMA = 1
FILE = "sweep.json"
PLACE = "launch"
"""A section that says how a run uses the machine, and nothing of what is trained."""

State = Literal["waiting", "running", "unfinished", "failed", "finished"]


class RunRecord(msgspec.Struct):
    name: str
    """Its folder."""
    variant: str
    values: dict[str, Any]
    seed: int | None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """What is not default in its configuration, but for where it is kept and reached."""
    max_steps: int | None = None
    outcome: Literal["", "finished", "failed"] = ""
    failure: str = ""

    def is_of(self, planned: Planned) -> bool:
        return self.values == planned.values and self.seed == planned.seed


class SweepRecord(msgspec.Struct):
    schema: int = SCHEMA
    files: list[str] = msgspec.field(default_factory=list)
    """The run files."""
    plan: list[str] = msgspec.field(default_factory=list)
    """The names of the runs that are asked for, in order."""
    runs: dict[str, RunRecord] = msgspec.field(default_factory=dict)
    """By name; also those that no longer are."""

    @property
    def asked(self) -> list[RunRecord]:
        return [self.runs[name] for name in self.plan]


def read_record(directory: Path) -> SweepRecord:
    """An empty one where there is none."""
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


def named(planned: Sequence[Planned], known: SweepRecord) -> dict[str, Planned]:
    """The runs by the names of their folders: a run that is known keeps its own."""
    taken = set(known.runs)
    found: dict[str, Planned] = {}
    for run in planned:
        name = next((name for name, record in known.runs.items() if record.is_of(run)), None)
        if name is None:
            name = folder_name(run.label, taken)
            taken.add(name)
        found[name] = run
    return found


def settings(config: Config) -> dict[str, Any]:
    """What shapes a run, by dotted key, without defaults: those of a later version are no change."""
    found = settings_of(config.model_dump(mode="json", exclude_defaults=True))
    return {key: value for key, value in found.items() if not key.startswith(f"{PLACE}.")}


def revised(
    known: SweepRecord, runs: Mapping[str, Planned], configs: Mapping[str, Config], files: Sequence[Path]
) -> SweepRecord:
    """The record with this plan."""
    records = dict(known.runs)
    for name, run in runs.items():
        before = known.runs.get(name)
        asked, max_steps = settings(configs[name]), getattr(configs[name], "max_steps", None)
        record = RunRecord(name, run.variant, run.values, run.seed, asked, max_steps)
        if before is not None:
            record.outcome, record.failure = before.outcome, before.failure
        records[name] = record
    return SweepRecord(files=[str(file) for file in files], plan=list(runs), runs=records)


def check_settings(directory: Path, known: SweepRecord, asked: SweepRecord, *, clean: bool) -> None:
    """Runs that are there were started with what is asked for now; with `clean` others are deleted, else refused."""
    for record in asked.asked:
        folder = directory / record.name
        if not is_run(folder):
            record.outcome, record.failure = "", ""
            continue
        before = known.runs.get(record.name)
        reason = "it is not one that this sweep has started" if before is None else _changes(before, record)
        if reason and not clean:
            raise BadRequest(
                f"{folder} has a run, and {reason}",
                key="output_dir",
                value=folder.parent,
                fix="Choose another, or start such runs over with --clean (deletes them).",
            )
        if reason:
            DirectoryPlan(folder, clean=True).apply()
            record.outcome, record.failure = "", ""


def _changes(before: RunRecord, now: RunRecord) -> str:
    found = differences([before.settings, now.settings])
    return ", ".join(f"{key} was {_shown(was)}, now {_shown(asked)}" for key, (was, asked) in found.items())


def _shown(value: Any) -> str:
    return "default" if value is None else str(value)


def state_of(record: RunRecord, directory: Path) -> State:
    """Where a run stands, by its folder and by how it ended last."""
    folder = directory / record.name
    if in_use(folder):
        return "running"
    if not is_run(folder):
        return "failed" if record.outcome == "failed" else "waiting"
    return record.outcome or "unfinished"
