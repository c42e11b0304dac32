"""The frame of the science benchmarks: intervals, verdicts and what a report contains. No model is run."""

import json
from pathlib import Path

import pytest
from benchmarks.science.__main__ import NAMES
from benchmarks.science.distillation import STEPS, measure, steps_to_teacher
from benchmarks.science.frame import Claim, Experiment, Interval, report
from benchmarks.science.miniature import Setting, run


def run_of(*values: float) -> dict[str, object]:
    return {"curves": {"reward": [[step, value] for step, value in enumerate(values)]}, "seconds": 1.0}


def test_the_interval_is_students_over_five_seeds() -> None:
    interval = Interval.of([1, 2, 3, 4, 5])
    # std = sqrt(2.5), t(.975, 4) = 2.7764: 2.7764 * sqrt(2.5 / 5) = 1.9632
    assert interval.mean == 3
    assert interval.low == pytest.approx(3 - 1.9632, abs=1e-4)
    assert interval.high == pytest.approx(3 + 1.9632, abs=1e-4)


@pytest.mark.parametrize(
    ("sign", "margin", "low", "high", "verdict"),
    [
        (1, 0, 0.1, 0.3, "reproduced"),
        (1, 0, -0.1, 0.3, "undecided"),
        (1, 0, -0.3, -0.1, "not reproduced"),
        (-1, 0, -0.3, -0.1, "reproduced"),
        (-1, 0, 0.1, 0.3, "not reproduced"),
        (1, 0.05, -0.04, 0.3, "reproduced"),
        (1, 0.05, -0.06, 0.3, "undecided"),
        (1, 0.05, -0.3, -0.06, "not reproduced"),
        (1, 0, 0.0, 0.0, "undecided"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(
    sign: int, margin: float, low: float, high: float, verdict: str
) -> None:
    assert Claim("reward", "a", "b", sign, margin).verdict(Interval((low + high) / 2, low, high)) == verdict


def test_differences_are_paired_by_seed_and_every_number_is_written(tmp_path: Path) -> None:
    claim = Claim("reward", "new", "old")
    experiment = Experiment("a title", {"new": Setting(()), "old": Setting(())}, lambda played: {}, (claim,), "reward")
    gains = {1: 0.10, 2: 0.12, 3: 0.08, 4: 0.11, 5: 0.09}
    # The seeds differ more from each other than the contenders do.
    runs = {
        "new": {seed: run_of(0, seed + gain) for seed, gain in gains.items()},
        "old": {seed: run_of(0, seed) for seed in reversed(gains)},
    }
    assert experiment.differences(claim, runs) == pytest.approx(list(gains.values()))
    report(experiment, runs, tmp_path, "name")
    written = json.loads((tmp_path / "name.json").read_text())
    assert written["verdict"] == "reproduced"
    assert written["claims"][0]["mean"] == pytest.approx(0.1)
    assert written["runs"]["new"]["3"]["curves"]["reward"] == [[0, 0], [1, 3.08]]
    assert "a title" in (tmp_path / "name.svg").read_text()


def test_steps_to_the_teacher_count_to_the_first_evaluation_at_its_level() -> None:
    teacher = {"teacher": run_of(1.0, 0.0)}
    assert steps_to_teacher(run_of(0.2, 0.86, 0.8), teacher) == {STEPS: 1}
    assert steps_to_teacher(run_of(0.2, 0.3, 0.84), teacher) == {STEPS: 2}


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_names_contenders_of_a_valid_run_file(name: str) -> None:
    from importlib import import_module

    experiment = import_module(f"benchmarks.science.{name}").EXPERIMENT
    for claim in experiment.claims:
        assert {claim.better, claim.worse} <= experiment.contenders.keys()
    for setting in experiment.contenders.values():
        assert setting.load(seed=7).seed == 7


def miniature(staleness: int = 0, retention: float | None = None, **more: object) -> dict[str, list[list[float]]]:
    """Return the curves of three steps of an untrained model."""
    keys = {
        "model": "null",
        "model.init": "tiny",
        "max_steps": 3,
        "trainer.optim.lr": 1e-3,
        "orchestrator.batch_size": 16,
        "orchestrator.group_size": 8,
        "orchestrator.eval.interval": 3,
        "orchestrator.eval.num_examples": 4,
        **more,
    }
    setting = Setting(("examples/reverse-text/rl.toml",), keys, staleness=staleness, retention=retention)
    curves: dict[str, list[list[float]]] = run(setting, 7, measure)["curves"]
    return curves


def test_a_batch_is_exactly_as_stale_as_configured_and_a_seed_repeats_a_run() -> None:
    fresh, repeated, stale = miniature(0), miniature(0), miniature(2)
    assert [step for step, _ in fresh["reward"]] == [0, 3]
    assert fresh == repeated
    # The third batch is sampled by the weights that train on it, or by those of two updates before.
    assert abs(fresh["mismatch_kl"][-1][1]) < 1e-5 < stale["mismatch_kl"][-1][1]


def test_latents_are_trained_as_they_were_sampled_and_evaluated_with_and_without() -> None:
    latents = {"model.latents.type": "hybrid", "orchestrator.max_async_level": 0, "trainer.loss.type": "reinforce"}
    curves = miniature(retention=0.3, **latents)
    assert [step for step, _ in curves["reward without latents"]] == [0, 3]
    assert curves["latents/embeds_ratio"][0][1] == pytest.approx(0.3, abs=0.02)
    assert abs(curves["mismatch_kl"][-1][1]) < 1e-5


def test_puzzles_are_solved_and_a_right_role_earns_its_share() -> None:
    from benchmarks.science.puzzles import Puzzles, right_share

    train, held_out = ({t["question"]: t["answer"] for t in Puzzles(split).tasks()} for split in ("train", "eval"))
    assert len(train.keys() | held_out.keys()) == len(train) + len(held_out) == 335
    # If P were a knave, Q would be a knight, and what Q says would be false.
    solution = (train | held_out)["P: Q knave. Q: P knight and Q knight."]
    assert solution == "P knight Q knave"
    answers = (solution, "P knight Q knight", "P knave Q knight", "Q knave P knight", "P knight", "P knight Q king", "")
    assert [right_share(answer, solution) for answer in answers] == [1, 0.5, 0, 0, 0, 0, 0]
