"""Runs as commands: supervised ones, too, each in a folder of its own that is the same from everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.sft import SftConfig
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.tools.sweep.jobs import make_jobs
from headrace.tools.sweep.plan import PlannedRun

SFT = 'max_steps = 3\nseq_len = 64\nmodel.init = "tiny"\n[data]\nenv = "reverse-text"\n'
RL = 'max_steps = 3\nseq_len = 64\nmodel.init = "tiny"\n[[orchestrator.train.env]]\nid = "reverse-text"\n'


@pytest.mark.parametrize(("kind", "text", "command"), [(SftConfig, SFT, "sft"), (RunConfig, RL, "rl")])
def test_a_job_is_the_command_that_loads_what_was_checked(
    kind: type[RunConfig] | type[SftConfig],
    text: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    runs = {"steps=5,seed=2": PlannedRun("steps=5", {"max_steps": 5}, 2)}
    (job,) = make_jobs(runs, {"seq_len": 32}, kind, [Path("run.toml")], Path("out"))
    first, file, *overrides = job.words
    assert (first, file) == (command, "run.toml")
    assert load(kind, [Path(file)], overrides)[0] == job.config
    assert (job.config.max_steps, job.config.seq_len, job.config.seed) == (5, 32, 2)
    assert job.config.output_dir == tmp_path / "out" / "steps=5,seed=2"
