"""Agents written against OpenAI's client are trained as they are: `examples/agent`, and one that asks twice."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, headrace

EXAMPLE = REPOSITORY / "examples/agent"
RUN_FILE = """
output_dir = "{run}"
max_steps = 2
seq_len = 128

[model]
name = "{model}"

[orchestrator]
batch_size = 16
group_size = 4

[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
thinking_retention = "all"

[orchestrator.train.sampling]
max_tokens = 8

[[orchestrator.train.env]]
id = "agent"
name = "example"
ratio = 1

[orchestrator.train.env.args]
agent = "calculator_training:run"
tasks = "calculator_training:tasks"
reward = "tests.environments.agents.rows:printable"
describe_tools = false

[[orchestrator.train.env]]
id = "agent"
name = "twice"
ratio = 1
workers = 1

[orchestrator.train.env.args]
agent = "tests.environments.agents.agents:ask_twice"
tasks = "tests.environments.agents.rows:tasks"
task_args = {{ count = 64 }}
reward = "tests.environments.agents.rows:printable"
"""


@pytest.mark.timeout(400)
def test_agents_are_trained_on_the_tokens_that_their_calls_were_answered_with(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    file = tmp_path / "rl.toml"
    file.write_text(RUN_FILE.format(run=tmp_path / "run", model=tiny_model))
    code, output = headrace("rl", file, timeout=300)
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    rollouts = [row for file in run.rollouts.iterdir() for row in pq.read_table(file).to_pylist()]
    assert {rollout["env"] for rollout in rollouts} == {"example", "twice"}
    for rollout in rollouts:
        if rollout["drop_reason"]:
            continue  # perhaps before it had a sample
        (sample,) = rollout["samples"]
        sampled = sample["mask"]
        turns = [sampled[n] and not sampled[n - 1] for n in range(1, len(sampled))].count(True)
        assert turns == rollout["num_turns"]
        assert turns == 2 or rollout["env"] == "example"
    drift = [record["drift/engine"] for record in read_metrics(run.metrics) if "drift/engine" in record]
    assert drift
    assert max(drift) < 1e-6


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_example_agent_at_least_doubles_its_held_out_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    code, output = headrace("rl", EXAMPLE / "rl.toml", "--output_dir", run, timeout=3000)
    assert code == 0, output
    summary = json.loads(headrace("summary", run, "--json")[1])
    assert summary["reward_end"] >= 2 * summary["reward_start"]
