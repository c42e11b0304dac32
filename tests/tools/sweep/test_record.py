"""What a sweep remembers: which runs are kept, added, refused, started over, and where each stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.launch.errors import BadRequest
from headrace.launch.run_directory import hold
from headrace.tools.sweep.plan import PlannedRun
from headrace.tools.sweep.record import (
    SweepRecord,
    check_settings,
    name_runs,
    read_record,
    settings_of_run,
    state_of,
    write_record,
)
from tests.config.run_files import run
from tests.observe.runs import write_run
from tests.refusals import refused
from tests.tools.sweep.sweeps import LR, grid, record_of, write_sweep


def test_what_is_written_is_read_back(tmp_path: Path):
    record = record_of(tmp_path, grid(1e-5, 0.5))
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "elsewhere") == SweepRecord()


def test_a_damaged_or_newer_record_is_refused(tmp_path: Path):
    (tmp_path / "sweep.json").write_text("{")
    with refused(BadInput, file=tmp_path / "sweep.json"):
        read_record(tmp_path)
    (tmp_path / "sweep.json").write_text('{"schema": 2}')
    with refused(BadInput, file=tmp_path / "sweep.json"):
        read_record(tmp_path)


def test_a_run_that_is_known_keeps_its_folder_whatever_it_would_be_called_now(tmp_path: Path):
    known = record_of(tmp_path, grid(0.1, 0.2, seeds=[0]))
    renamed = [PlannedRun("slow", {LR: 0.1}, 0), PlannedRun("fast", {LR: 0.3}, 0)]
    assert list(name_runs(renamed, known)) == ["lr=0.1,seed=0", "fast,seed=0"]


def test_a_changed_plan_keeps_what_is_done_and_what_it_no_longer_asks_for(tmp_path: Path):
    known = record_of(tmp_path, grid(0.1, 0.2, seeds=[0]))
    known.runs["lr=0.1,seed=0"].outcome = "finished"
    record = record_of(tmp_path, grid(0.1, 0.3, seeds=[0]), known)
    assert record.plan == ["lr=0.1,seed=0", "lr=0.3,seed=0"]
    assert record.planned[0].outcome == "finished"
    assert set(record.runs) == {"lr=0.1,seed=0", "lr=0.2,seed=0", "lr=0.3,seed=0"}


def test_a_run_of_other_settings_is_refused_by_name_with_what_differs(tmp_path: Path):
    known = write_sweep(tmp_path, {(0.1, 0): 0.5})
    asked = record_of(tmp_path, grid(0.1, seeds=[0]), known, steps=9)
    with pytest.raises(BadRequest, match=r"lr=0.1,seed=0 .* max_steps was 7, now 9"):
        check_settings(tmp_path, known, asked, clean=False)
    assert (tmp_path / "lr=0.1,seed=0" / "metrics.jsonl").is_file()


def test_clean_starts_over_what_differs_and_nothing_else(tmp_path: Path):
    known = write_sweep(tmp_path, {(0.1, 0): 0.5, (0.2, 0): 0.5})
    known.runs["lr=0.2,seed=0"].settings["max_steps"] = 8
    asked = record_of(tmp_path, grid(0.1, 0.2, seeds=[0]), known)
    check_settings(tmp_path, known, asked, clean=True)
    assert [state_of(each, tmp_path) for each in asked.planned] == ["finished", "waiting"]


def test_where_a_run_is_kept_and_how_it_uses_the_machine_is_no_other_setting():
    here, there = run(launch={"threads": 3}, inference={"port": 80}), run(output_dir="elsewhere")
    assert settings_of_run(here) == settings_of_run(there)
    assert settings_of_run(here) != settings_of_run(run(seq_len=32))


def test_a_run_that_the_sweep_did_not_start_is_refused(tmp_path: Path):
    write_run(tmp_path / "lr=0.1,seed=0", [0.5])
    asked = record_of(tmp_path, grid(0.1, seeds=[0]))
    with pytest.raises(BadRequest, match="it is not one that this sweep has started"):
        check_settings(tmp_path, SweepRecord(), asked, clean=False)


def test_where_a_run_stands_is_read_off_its_folder(tmp_path: Path):
    record = write_sweep(tmp_path, {(0.1, 0): 0.5})
    (known,) = record.planned
    assert state_of(known, tmp_path) == "finished"
    known.outcome = ""
    assert state_of(known, tmp_path) == "unfinished"
    known.outcome = "failed"
    assert state_of(known, tmp_path) == "failed"
    with hold(tmp_path / known.name):
        assert state_of(known, tmp_path) == "running"
    (fresh,) = record_of(tmp_path, grid(0.9, seeds=[0])).planned
    assert state_of(fresh, tmp_path) == "waiting"


def test_a_finished_run_whose_folder_was_deleted_is_run_again(tmp_path: Path):
    known = write_sweep(tmp_path, {(0.1, 0): 0.5})
    (tmp_path / "lr=0.1,seed=0").rename(tmp_path / "elsewhere")
    asked = record_of(tmp_path, grid(0.1, seeds=[0]), known)
    check_settings(tmp_path, known, asked, clean=False)
    assert asked.planned[0].outcome == ""
    assert state_of(asked.planned[0], tmp_path) == "waiting"
