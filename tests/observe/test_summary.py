"""The numbers that a run is reported by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.observe.metrics import MetricsLog
from headrace.observe.summary import duration, summarize, write_summary
from headrace.transport.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Seven steps, rewards .1 to .7."""
    run = RunDir(tmp_path / "my-run")
    orchestrator, trainer = MetricsLog(run.metrics, "orchestrator"), MetricsLog(run.metrics, "trainer")
    for step in range(1, 8):
        orchestrator.log(
            step,
            {
                "reward/all/mean": step / 10,
                "progress/rollouts": 16 * step,
                "progress/tokens_sampled": 1000 * step,
                "progress/seconds": 2.0 * step,
                "progress/dropped/zero_advantage": step,
                "progress/dropped/off_policy": 0,
            },
        )
        trainer.log(step, {"loss": 0.5, "progress/tokens_trained": 900 * step})
    return run


def test_without_evaluation_reward_is_the_mean_of_five_train_steps_at_either_end(run: RunDir) -> None:
    summary = summarize(run)
    assert summary.reward_from == "train"
    assert summary.reward_start == pytest.approx(0.3)  # mean of .1 to .5
    assert summary.reward_end == pytest.approx(0.5)  # mean of .3 to .7


def test_with_evaluations_reward_is_held_out_first_and_last(run: RunDir) -> None:
    log = MetricsLog(run.metrics, "orchestrator")
    for version, value in ((0, 0.4), (5, 0.6), (7, 0.9)):
        log.log(version, {"eval/reverse-text/avg@2": value, "eval/reverse-text/pass@2": 1.0})
    summary = summarize(run)
    assert (summary.reward_from, summary.reward_start, summary.reward_end) == ("held-out", 0.4, 0.9)


def test_json_has_the_promised_keys(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run.root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["steps"] == 7
    assert printed["seconds"] == 14.0
    assert printed["rollouts"] == 112
    assert printed["tokens_sampled"] == 7000
    assert printed["tokens_trained"] == 6300
    assert printed["dropped"] == {"zero_advantage": 7}
    assert {"reward_start", "reward_end"} <= printed.keys()


def test_for_people_it_prints_a_table_and_writes_page_and_plot(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.final_model.mkdir()
    assert main(["summary", str(run.root)]) == 0
    out = capsys.readouterr().out
    assert "0.300 → 0.500 (+0.200)" in out
    assert str(run.plot) in out
    assert str(run.final_model) in out
    page = run.summary.read_text()
    assert "| train reward | 0.300 → 0.500 (+0.200) |" in page
    assert "(reward.svg)" in page
    assert "7 zero_advantage" in page
    assert run.plot.read_text().startswith("<svg")


def test_an_sft_run_is_summarized_by_its_loss(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = MetricsLog(run.metrics, "trainer")
    for step in (1, 2, 3):
        log.log(step, {"loss": 3.0 / step, "progress/tokens_trained": 10 * step})
    summary = write_summary(run)
    assert (summary.steps, summary.loss_end, summary.reward_end, summary.rollouts) == (3, 1.0, None, 0)
    assert "| loss at the end | 1.0000 |" in run.summary.read_text()


def test_a_directory_without_metrics_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (0.4, 59, 60, 187, 7387)] == ["0 s", "59 s", "1:00", "3:07", "2:03:07"]
