"""A real run with a KL penalty to its start: a large coefficient keeps the policy there."""

from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import start

RUN_FILE = """
max_steps = 12
seq_len = 64
output_dir = "{output}"
model = {{ init = "tiny" }}
[trainer.optim]
lr = 1e-4
[orchestrator]
batch_size = 32
group_size = 4
algo = {{ type = "grpo", kl = {{ coef = {coef} }} }}
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
thinking_retention = "all"
[orchestrator.train.sampling]
max_tokens = 16
[[orchestrator.train.env]]
id = "reverse-text"
"""


def distances(directory: Path, coef: float) -> list[float]:
    """Return k3 at each step of a run."""
    directory.mkdir()
    (directory / "rl.toml").write_text(RUN_FILE.format(output=directory / "run", coef=coef))
    assert start("rl", directory / "rl.toml").wait(300) == 0
    records = read_metrics(RunDir(directory / "run").metrics)
    return [record["kl/k3"] for record in records if "kl/k3" in record]


@pytest.mark.full
def test_a_large_coefficient_keeps_a_run_at_its_start(tmp_path: Path):
    """At this learning rate: the penalty has no gradient at the start, so the first update is not held back by it."""
    held, free = distances(tmp_path / "held", 100.0), distances(tmp_path / "free", 1e-6)
    assert len(held) == len(free) == 12
    assert max(held) < 0.01
    assert free[-1] > 0.03
