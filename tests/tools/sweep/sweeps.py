"""Sweeps as they lie in a folder, with the numbers that a test gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.evaluate.completions import Correctness, ScoredEpisode
from headrace.tools.evaluate.report import write_report
from headrace.tools.evaluate.results import ModelResult, compute_result
from headrace.tools.sweep.plan import PlannedRun
from headrace.tools.sweep.record import SweepRecord, name_runs, revise_record, write_record
from headrace.transport.run_dir import RunDir
from tests.observe.runs import write_run

RUN_FILE = """
max_steps = {steps}
seq_len = 64
model.name = "a-model"
[[orchestrator.train.env]]
id = "reverse-text"
"""
LR = "trainer.optim.lr"


def grid(*rates: float, seeds: Sequence[int] = (0, 1)) -> list[PlannedRun]:
    return [PlannedRun(f"lr={lr}", {LR: lr}, seed) for lr in rates for seed in seeds]


def record_of(
    directory: Path, runs: Sequence[PlannedRun], known: SweepRecord | None = None, steps: int = 7
) -> SweepRecord:
    """What a sweep of these runs would write."""
    file = directory / "rl.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(RUN_FILE.format(steps=steps))
    by_name = name_runs(runs, known or SweepRecord())
    configs = {
        name: load(
            RunConfig,
            [file],
            [f"--output_dir={directory / name}", *(f"--{key}={value}" for key, value in run.overrides({}).items())],
        )[0]
        for name, run in by_name.items()
    }
    return revise_record(known or SweepRecord(), by_name, configs, [file])


def write_sweep(directory: Path, ends: Mapping[tuple[float, int], float]) -> SweepRecord:
    """A finished sweep over learning rates and seeds: seven steps each, the last five of which come to `ends`."""
    record = record_of(directory, [run for (lr, seed) in ends for run in grid(lr, seeds=[seed])])
    for run, ((lr, seed), end) in zip(record.planned, ends.items(), strict=True):
        write_run(directory / run.name, [0.0, 0.1, *[end] * 5], {0: 0.1, 7: end}, keys={LR: lr, "seed": seed})
        run.outcome = "finished"
    write_record(directory, record)
    return record


def write_evaluation(directory: Path, lengths: Mapping[str, tuple[Sequence[bool], int]]) -> None:
    """What `headrace eval` leaves about the runs: which answers are right, and how long thoughts are."""
    results: list[ModelResult] = []
    for name, (right, length) in lengths.items():
        scored = [
            ScoredEpisode(
                f"task-{n}", 0, reward=float(correct), correct=correct, tokens=length + 5, thinking_tokens=length
            )
            for n, correct in enumerate(right)
        ]
        results.append(compute_result(name, str(RunDir(directory / name).final_model), scored, 1, Correctness()))
    write_report(directory / "eval", "sums", {"environment": "sums"}, results)


def results_of(directory: Path) -> dict[str, object]:
    return msgspec.json.decode((directory / "results.json").read_bytes())
