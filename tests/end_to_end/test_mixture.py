"""A mixture in one real run: four environments, three algorithms, a curriculum, a teacher that dies, and an environment
that always fails. Each costs what is its own, and the run says which was which.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, start, wait_until, write_run_file
from tests.end_to_end.test_algorithms import ENVIRONMENTS, LETTERS, count, served, trained_components
from tests.observe.metrics_page import undocumented
from tests.observe.test_prometheus import scrape

BROKEN = """
[[orchestrator.train.env]]
id = "tests.end_to_end.environments:Broken"
name = "broken"
ratio = 1.0
"""
CURRICULUM = """
[orchestrator.train.curriculum]
sampler = { type = "difficulty_pool", hard_max = 0.4 }
gate = "advantage_range"
"""
FAILURE = "KeyError: 'no such column: question'"


@pytest.mark.timeout(400)
def test_in_a_mixture_a_dead_teacher_and_a_broken_environment_cost_their_own_rollouts_alone(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    run = RunDir(tmp_path / "run")
    with served(tiny_model) as (teacher, url):
        overlay = tmp_path / "mixture.toml"
        overlay.write_text(ENVIRONMENTS.format(letters=LETTERS, url=url) + BROKEN + CURRICULUM + "[prometheus]\n")
        launcher = start("rl", write_run_file(tmp_path, tiny_model), overlay, "--max_steps", 8)
        wait_until(lambda: count(run, "algo/scored/prefills") >= 2 or launcher.poll() is not None, "two scored batches")
        _check_scraped(run)
        teacher.send_signal(signal.SIGKILL)
        code, output = finish(launcher, timeout=300)
    assert code == 0, output
    assert trained_components(run) == {"rewarded": {"rl"}, "scored": {"ref_kl"}, "imitated": {"ce"}}
    _check_reported_once(run, url)
    assert main(["summary", str(run.root), "--json"]) == 0
    _check_report(run, json.loads(capsys.readouterr().out), output)
    assert not run.prometheus_targets.exists()
    assert main(["audit", str(run.root)]) == 0


def _check_scraped(run: RunDir) -> None:
    assert {path.stem for path in run.prometheus_targets.iterdir()} == {
        "launcher", "inference", "orchestrator", "trainer"
    }  # fmt: skip
    assert scrape(run, "launcher")["headrace_process_running", "trainer"] == 1
    assert scrape(run, "inference")["headrace_tokens_sampled_total",] > 0
    assert scrape(run, "trainer")["headrace_waiting_seconds",] >= 0
    assert scrape(run, "orchestrator")["headrace_completion_tokens_count",] > 0
    assert json.loads(run.grafana_dashboard.read_text())["panels"]


def _check_reported_once(run: RunDir, url: str) -> None:
    log = (run.root / "logs" / "orchestrator.log").read_text()
    assert f"no_reference: teacher at {url} did not score a sequence" in log
    assert log.count("an episode of broken failed") == 1
    assert f"environment 'broken' only fails (environment: {FAILURE}" in log
    records = list(read_metrics(run.metrics))
    assert any("progress/dropped/no_reference" in record for record in records)
    assert undocumented(records) == []
    pools = [record["curriculum/rewarded/unseen"] for record in records if "curriculum/rewarded/unseen" in record]
    assert len(pools) == 8
    assert pools[0] > pools[-1]


def _check_report(run: RunDir, summary: dict[str, Any], output: str) -> None:
    report = {entry["name"]: entry for entry in summary["environments"]}
    algorithms = {name: entry["algorithm"] for name, entry in report.items()}
    assert algorithms == {"rewarded": "grpo", "scored": "opd", "imitated": "sft", "broken": "grpo", "letters": None}
    for name in ("rewarded", "scored", "imitated"):
        assert report[name]["rollouts_trained"] > 0
        assert report[name]["reward_end"] > 0
        assert "environment" not in report[name]["dropped"]
    assert report["broken"]["rollouts_trained"] == 0
    assert report["broken"]["dropped"].keys() <= {"environment", "off_policy", "max_steps"}
    assert report["broken"]["draws"] < min(report[name]["draws"] for name in ("rewarded", "scored"))
    sentence = f"broken: nothing was trained on, its episodes failed, most often with environment: {FAILURE}"
    assert output.count(sentence) == 1
    assert sentence in run.summary.read_text()
