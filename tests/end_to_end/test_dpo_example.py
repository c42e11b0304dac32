"""The example of docs/how-to/dpo.md: rollouts of a run, pairs of them, and a model trained on the pairs."""

from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from tests.end_to_end.runs import headrace


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_pairs_of_a_runs_own_rollouts_teach_to_prefer_right_answers_to_held_out_tasks(tmp_path: Path):
    run, dpo = tmp_path / "rl", tmp_path / "dpo"
    files = {"--data.path": run / "pairs.jsonl", "--validation.path": run / "pairs-held-out.jsonl"}
    for command in (
        ("rl", "examples/reverse-text/rl.toml", "--max_steps", 6, "--output_dir", run),
        ("pairs", run, "--per-group", 4, "--held-out", 0.2),
        (
            "dpo",
            "examples/reverse-text/dpo.toml",
            "--output_dir",
            dpo,
            *(word for pair in files.items() for word in pair),
        ),
    ):
        code, output = headrace(*command, timeout=1200)
        assert code == 0, output
    validations = [record for record in read_metrics(dpo / "metrics.jsonl") if "val/accuracy" in record]
    assert [record["step"] for record in validations] == list(range(0, 61, 10))
    assert validations[0]["val/margin"] == pytest.approx(0.0, abs=1e-4)
    # About 107 pairs: 0.75 is five standard deviations above a coin's 0.5.
    assert validations[-1]["val/accuracy"] > 0.75
    assert validations[-1]["val/loss"] < validations[0]["val/loss"] - 0.1
