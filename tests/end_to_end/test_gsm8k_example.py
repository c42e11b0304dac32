"""examples/hackable-gsm8k in miniature: brevity is learned by as much as it is paid for, and being right with it."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from headrace.observe.metrics import read_metrics
from tests.end_to_end.runs import REPOSITORY, headrace, processes_of, start, wait_until

EXAMPLE = REPOSITORY / "examples" / "hackable-gsm8k"
NUMBERS_ALONE = "reward_kwargs={gsm8k_correctness_reward={symbolic=false}}"
SUMS = (
    *("--env", "hackable", "--env-args", "provider=thoughts:sums", NUMBERS_ALONE),
    *("--temperature", "1", "--max-tokens", "72"),
)
"""What the miniature is evaluated on, as its page has it."""
STEPS = 30
EPOCH = 11.5
"""Steps of 16 prompts in a pass over its 184 sums."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]


@pytest.fixture(autouse=True)
def one_start_for_all(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that all runs begin with is made once."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def sweep_of(name: str, output: Path, *options: object) -> list[object]:
    """The command."""
    files = EXAMPLE / f"{name}.yaml", EXAMPLE / "miniature" / "sweep.yaml"
    return ["sweep", *files, "--output_dir", output, *options]


def swept(command: list[object], output: Path) -> dict[str, dict[str, Any]]:
    """By run, what the report says about it, once all runs are finished."""
    code, said = headrace(*command, timeout=7000)
    assert code == 0, said
    assert (output / "report.html").is_file()
    runs = json.loads((output / "results.json").read_text())["runs"]
    assert {run["state"] for run in runs} == {"finished"}
    assert {run["steps"] for run in runs} == {STEPS}
    return {run["name"]: run for run in runs}


def measured(runs: dict[str, dict[str, Any]], measure: str, variant: str = "") -> float:
    """Of the evaluated models of a variant, or of all, in the mean."""
    return mean(run["evaluation"][measure]["value"] for name, run in runs.items() if name.startswith(variant))


def column(run: Path, metric: str) -> list[float]:
    """A metric step by step."""
    return [record[metric] for record in read_metrics(run / "metrics.jsonl") if metric in record]


def test_thoughts_are_the_shorter_the_more_brevity_is_paid_and_as_right_even_if_the_sweep_is_killed(tmp_path: Path):
    output = tmp_path / "lambda"
    command = sweep_of("lambda-sweep", output)
    killed = start(*command)
    second = output / "length_penalty_lambda=0.25,seed=1"
    wait_until((second / "checkpoints" / "step-00000010").is_dir, "the second run has a checkpoint", 3600)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    wait_until(lambda: not processes_of(second), "the run of a killed sweep ends by itself")
    runs = swept(command, output)

    weights = ("0.25", "0.5", "0.75", "1.0")
    tokens = [measured(runs, "thinking_tokens", f"length_penalty_lambda={weight},") for weight in weights]
    right = [measured(runs, "avg@4", f"length_penalty_lambda={weight},") for weight in weights]
    assert tokens[-1] < 0.75 * tokens[0]
    assert all(after < 1.1 * before for before, after in pairwise(tokens))
    assert max(right) - min(right) < 0.1
    assert min(right) > 0.6

    code, said = headrace(
        "eval", second, "--checkpoints", "permanent", *SUMS, "--output", tmp_path / "eval", timeout=1200
    )
    assert code == 0, said
    models = json.loads((tmp_path / "eval" / "results.json").read_text())["models"]
    assert [model["name"] for model in models] == ["step-10", "step-20", "step-30"]
    first, *_, last = (model["estimates"]["thinking_tokens"]["value"] for model in models)
    assert last < first


def test_thoughts_shrink_from_the_second_stage_on_the_less_the_more_being_right_counts(tmp_path: Path):
    output = tmp_path / "two-stage"
    runs = swept(sweep_of("two-stage", output, "--seeds", "[0]"), output)
    left = {}
    for name in runs:
        weights = column(output / name, "metrics/all/length_penalty_lambda")
        assert set(weights[: int(EPOCH)]) == {0.0}
        assert set(weights[-10:]) == {1.0}
        tokens = column(output / name, "metrics/all/thinking_tokens")
        left[name] = mean(tokens[-5:]) / mean(tokens[: int(EPOCH)])
    assert left["correctness_weight=1.0,seed=0"] < 0.85
    assert left["correctness_weight=1.0,seed=0"] < left["correctness_weight=5.0,seed=0"] < 0.97


def test_what_is_malformed_costs_something_with_the_gate_alone(tmp_path: Path):
    output = tmp_path / "gate"
    runs = swept(sweep_of("interaction-and-gate", output, "--seeds", "[0]"), output)
    assert len(runs) == 4
    for name in runs:
        lowest = min(column(output / name, "reward/all/min"))
        assert lowest == (-1.0 if "gated" in name else 0.0)
        assert measured(runs, "format", name) > 0.95


def test_token_utilisation_is_paid_by_the_record_of_the_first_model(tmp_path: Path):
    base, record, output = tmp_path / "base", tmp_path / "zero-shot.jsonl", tmp_path / "utilisation"
    code, said = headrace("sft", EXAMPLE / "miniature" / "sft.toml", "--output_dir", base, timeout=1800)
    assert code == 0, said
    evaluation = ["eval", base, *SUMS, "--samples", 4, "--zero-shot", record, "--output", tmp_path / "eval"]
    code, said = headrace(*evaluation, timeout=1200)
    assert code == 0, said
    assert len(record.read_text().splitlines()) == 184
    path = "--overrides.rewards.kwargs.token_utilisation_reward.zero_shot_path"
    runs = swept(sweep_of("utilisation", output, "--seeds", "[0]", path, record), output)
    used = {name: column(output / name, "metrics/all/token_utilisation_reward") for name in runs}
    assert not used["enable_token_utilisation=false,seed=0"]
    paid = used["enable_token_utilisation=true,seed=0"]
    assert len(paid) == STEPS
    assert any(paid)
    assert max(map(abs, paid)) <= 0.1


def test_without_the_length_penalty_thoughts_stay_long(tmp_path: Path):
    output = tmp_path / "ablation"
    runs = swept(sweep_of("length-ablation", output, "--seeds", "[0]"), output)
    for mode in ("additive", "weighted"):
        without, with_it = (measured(runs, "thinking_tokens", f"{mode}{kind},") for kind in ("", "-with-length"))
        assert with_it < 0.85 * without


def test_every_level_is_learned(tmp_path: Path):
    output = tmp_path / "levels"
    runs = swept(sweep_of("math-levels", output), output)
    assert len(runs) == 5
    for name in runs:
        right = column(output / name, "metrics/all/correct")
        assert mean(right[-5:]) > mean(right[:5])
