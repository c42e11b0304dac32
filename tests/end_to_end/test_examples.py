"""The examples learn; and turns of a conversation reach the trainer as the one sequence that was sampled."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, headrace, write_run_file

RENDERER = """
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
thinking_retention = "all"
"""


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("example", ["arithmetic", "alphabet-sort", "calculator"])
def test_an_example_at_least_doubles_its_held_out_reward(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    code, output = headrace("rl", REPOSITORY / f"examples/{example}/rl.toml", "--output_dir", run, timeout=3000)
    assert code == 0, output
    summary = json.loads(headrace("summary", run, "--json")[1])
    assert summary["reward_end"] >= 2 * summary["reward_start"]


@pytest.mark.full  # test_agent has two turns among the fast ones
@pytest.mark.timeout(400)
def test_two_turns_are_one_sample_that_engine_and_trainer_score_alike(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    file.write_text(file.read_text().replace("Letters", "Talk").replace("seq_len = 48", "seq_len = 96") + RENDERER)
    code, output = headrace("rl", file, "--max_steps", "2", timeout=300)
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    rollouts = [row for file in run.rollouts.iterdir() for row in pq.read_table(file).to_pylist()]
    assert len(rollouts) >= 32
    for rollout in rollouts:
        assert rollout["num_turns"] == 2
        (sample,) = rollout["samples"]
        sampled = sample["mask"]
        first = sampled.index(True)
        assert first == sample["prompt_length"]
        assert [sampled[n] != sampled[n - 1] for n in range(1, len(sampled))].count(True) == 3  # F T F T
    drift = [record["drift/engine"] for record in read_metrics(run.metrics) if "drift/engine" in record]
    assert drift
    assert max(drift) < 1e-6
