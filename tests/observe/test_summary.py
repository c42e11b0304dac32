"""The numbers that a run is reported by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.observe.metrics import MetricsLog
from headrace.observe.status import duration
from headrace.observe.summary import EnvironmentReport, end_means, format_summary, summarize, write_summary
from headrace.rollout.types import Rollout, RolloutError
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import Draw, Entries, Outcome, Totals
from headrace.transport.rollout_files import write_eval_rollouts, write_rollouts
from headrace.transport.run_dir import RolloutKind, RunDir


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


def test_without_evaluation_reward_is_the_mean_of_train_steps_at_either_end(run: RunDir) -> None:
    summary = summarize(run)
    assert summary.reward_from == "train"
    assert summary.reward_start == pytest.approx(0.2)  # mean of .1 to .3, the first three of seven
    assert summary.reward_end == pytest.approx(0.6)  # mean of .5 to .7


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, (1.0, 1.0)), (2, (1.0, 2.0)), (4, (1.5, 3.5)), (10, (3.0, 8.0)), (12, (3.0, 10.0))]
)
def test_no_step_counts_for_both_ends(steps: int, expected: tuple[float, float]) -> None:
    assert end_means([(step, float(step)) for step in range(1, steps + 1)]) == expected


def test_failed_episodes_of_an_evaluation_and_skipped_steps_are_reported(run: RunDir) -> None:
    MetricsLog(run.metrics, "orchestrator").log(7, {"eval/reverse-text/avg@2": 0.1, "eval/reverse-text/errors": 0.75})
    MetricsLog(run.metrics, "trainer").log(8, {"loss": None, "optim/skipped": 3})
    shown = format_summary(run, summarize(run))
    assert "3 of these had no update" in shown
    assert "reverse-text: 75% of the episodes of its last evaluation failed, and are left out of its mean" in shown
    failed = Rollout(env="reverse-text", error=RolloutError("environment", "ValueError: no such tool"))
    write_eval_rollouts(RolloutKind.EVAL.path(run.rollouts, 7), 7, [failed, Rollout(env="reverse-text", reward=0.4)])
    (entry,) = summarize(run).environments
    assert entry.eval_error == "environment: ValueError: no such tool" and entry.error is None
    assert entry.eval_error in format_summary(run, summarize(run))


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


@pytest.mark.parametrize(
    ("section", "share", "key"),
    [
        ("max_async_level = 0", 0.3, "max_async_level"),
        ("max_inflight_rollouts = 64", 0.3, "max_inflight_rollouts"),
        ("max_inflight_rollouts = 64", 0.6, None),
        ("batch_size = 8", 0.3, None),  # a choice for learning, not for speed
    ],
)
def test_unused_engine_slots_are_reported_with_the_setting_that_limits_them(
    run: RunDir, section: str, share: float, key: str | None
) -> None:
    run.config.write_text(f"[orchestrator]\n{section}\n")
    for step in (5, 6, 7):
        MetricsLog(run.metrics, "orchestrator").log(step, {"progress/rollouts": 1, "perf/slots_used": share})
    summary = summarize(run)
    assert summary.slots_used == pytest.approx(share)
    assert (key in (summary.slots_advice or "")) if key else summary.slots_advice is None
    assert ("engine slots" in format_summary(run, summary)) == bool(key)


def test_for_people_it_prints_a_table_and_writes_page_and_plot(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.final_model.mkdir()
    assert main(["summary", str(run.root)]) == 0
    out = capsys.readouterr().out
    assert "0.200 → 0.600 (+0.400)" in out
    assert str(run.plot) in out
    assert str(run.final_model) in out
    page = run.summary.read_text()
    assert "| train reward | 0.200 → 0.600 (+0.400) |" in page
    assert "(reward.svg)" in page
    assert "7 zero_advantage" in page
    assert run.plot.read_text().startswith("<svg")


CONFIG = """
[orchestrator.algo]
type = "grpo"
[[orchestrator.train.env]]
name = "words"
[[orchestrator.train.env]]
name = "maze"
algo = { type = "max_rl" }
"""


@pytest.fixture
def mixture(run: RunDir) -> RunDir:
    """`words` is trained on and gets better, of `maze` every episode fails, `heldout` is only evaluated."""
    run.config.write_text(CONFIG)
    log = MetricsLog(run.metrics, "orchestrator")
    for step in range(8, 15):
        progress = {"progress/rollouts": 16 * step, "reward/all/mean": 0.5}
        log.log(step, {**progress, "rollouts/words": 8, "reward/words/mean": step / 100})
    log.log(0, {"eval/words/avg@1": 0.25, "eval/heldout/avg@1": 0.5})
    log.log(14, {"eval/words/avg@1": 0.75, "eval/heldout/avg@1": 0.5})
    journal = Journal(run.journal)
    drawn = [Draw(0, "words", "a", 0), Draw(1, "maze", "b", 0), Draw(2, "words", "c", 1)]
    outcomes = [Outcome(0, "gated", 8, 80, {"gated": 8}), Outcome(1, "environment", 4, 0, {"environment": 4})]
    journal.commit(Entries(drawn, outcomes, Totals()))
    journal.close()
    broken, once = (RolloutError("environment", text) for text in ("KeyError: 'question'", "ZeroDivisionError"))
    lost = [(Rollout(env="maze", error=error), "environment") for error in (broken, once, broken)]
    lost.append((Rollout(env="words", error=RolloutError("on_policy")), "on_policy"))  # cancelled: nothing to tell
    write_rollouts(run.rollouts, 14, [], lost)
    return run


def test_every_environment_has_its_own_numbers_and_the_commonest_error(mixture: RunDir) -> None:
    words, maze, heldout = summarize(mixture).environments
    assert words == EnvironmentReport(
        "words", "grpo", 2, 56, {"gated": 8}, None, pytest.approx(0.09), pytest.approx(0.13), 0.25, 0.75
    )  # seven steps of eight rollouts; the means of .08 to .10 and of .12 to .14
    message = "KeyError: 'question'"
    assert maze == EnvironmentReport(
        "maze", "max_rl", 1, 0, {"environment": 4}, f"environment: {message}", errors={"environment": message}
    )
    assert heldout == EnvironmentReport("heldout", eval_start=0.5, eval_end=0.5)


def test_an_environment_that_always_fails_is_named_with_its_reason_once(
    mixture: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(mixture.root)]) == 0
    sentence = "maze: nothing was trained on, its episodes failed, most often with environment: KeyError: 'question'"
    out = capsys.readouterr().out
    assert out.count(sentence) == 1
    row = next(line for line in out.splitlines() if line.strip().startswith("words"))
    assert row.split() == ["words", "grpo", "2", "56", "0.090", "→", "0.130", "0.250", "→", "0.750", "8", "gated"]
    assert "| maze | max_rl | 1 | 0 | - | - | 4 environment |" in mixture.summary.read_text()


def test_every_reason_for_failures_is_reported_with_its_message(
    mixture: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = [("reward_failed", "reward 'a': KeyError: 1")] * 2 + [("reward_timeout", "reward 'b': it took too long")]
    lost = [(Rollout(env="words", error=RolloutError(*reason)), reason[0]) for reason in reasons]
    write_rollouts(mixture.rollouts, 13, [], lost)
    assert main(["summary", str(mixture.root)]) == 0
    message = [line.strip() for line in capsys.readouterr().out.splitlines() if " failed" in line and "words" in line]
    assert message == [
        "words: some episodes failed, most often with reward_failed: reward 'a': KeyError: 1",
        "words: others failed with reward_timeout: reward 'b': it took too long",
    ]


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
