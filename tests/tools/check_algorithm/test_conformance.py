"""The conformance kit: shipped algorithms pass, and an algorithm that breaks one invariant fails that check only."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms import max_rl
from headrace.algorithms.base import Algorithm
from headrace.rollout.types import Sample
from headrace.tools.check_algorithm.fixtures import algorithm_config, make_fixtures
from headrace.tools.check_algorithm.invariants import CHECKS, check_algorithm
from headrace.tools.check_algorithm.results import ConformanceReport
from tests.refusals import refused
from tests.tools.check_algorithm import broken

FIXTURES = make_fixtures()
TEACHER = {"name": "teacher", "base_url": "http://nowhere.invalid/v1"}
SETTINGS: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"type": "grpo", "length_penalty": {"type": "linear"}, "length_weighted_baseline": True},
    {"type": "grpo", "length_penalty": {"type": "tokens", "tool_response_weight": 0.5}},
    {"type": "grpo", "length_penalty": {"type": "overlong", "max_tokens": 40, "cache_tokens": 20}},
    {
        "type": "grpo",
        "terms": [{"import_path": "tests.tools.check_algorithm.test_conformance:brevity", "kwargs": {"weight": 2}}],
    },
    {"type": "max_rl"},
    {"type": "reward"},
    {"type": "echo", "roles": {"user": {"alpha": 1.0}, "tool": {"alpha": 0.01}}, "normalize": "std"},
    {"type": "grpo_distill", "rl_weight": 2.0, "ref_kl_weight": 0.5, "length_penalty": {"type": "linear"}},
    {"type": "opd"},
    {"type": "opsd", "demo_key": "worked"},
    {"type": "sft"},
    {"type": "rlcsd"},
    {"type": "rlcsd", "length_penalty": "linear"},
    {"type": "rlcsd", "length_penalty": {"type": "overlong", "max_tokens": 40, "cache_tokens": 20}},
    {"type": "rae"},
    {"type": "hierarchical_grpo", "episode_agents": ["b"]},
    {"type": "custom", "import_path": "tests.tools.check_algorithm.test_conformance:ranks"},
    {"type": "tests.end_to_end.algorithms:RunningBaseline", "kwargs": {"decay": 0.9}},
]
MORE_SETTINGS: list[dict[str, Any]] = [
    {"type": "grpo", "normalize": "std", "length_weighted_baseline": True},
    {"type": "grpo", "length_penalty": {"type": "linear", "normalize_by": "group_max", "gate_by_correctness": True}},
    {"type": "grpo", "length_penalty": {"type": "turns"}},
    {"type": "echo"},
    {"type": "opsd", "teacher": TEACHER, "max_concurrent": 1},
    {"type": "rlcsd", "normalization": "rollout_mean", "teacher": TEACHER, "num_negative_hints": 1},
]


def brevity(group, weight):
    return [-weight * rollout.completion_length for rollout in group]


def ranks(group):
    """Per token: the share of siblings that did worse."""
    rewards = [rollout.reward for rollout in group]
    return [[sum(r < rollout.reward for r in rewards) / len(group)] * rollout.completion_length for rollout in group]


def check(settings: dict[str, Any]) -> ConformanceReport:
    return asyncio.run(check_algorithm(algorithm_config(settings, "test"), FIXTURES))


def verdicts(report: ConformanceReport) -> dict[str, str]:
    return {row.check: row.verdict.kind for row in report.checks}


def detail(report: ConformanceReport, name: str) -> str:
    return next(row.verdict.detail for row in report.checks if row.check == name)


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, *(pytest.param(settings, marks=pytest.mark.full) for settings in MORE_SETTINGS)],
    ids=lambda settings: settings["type"],
)
def test_shipped_algorithms_pass_in_many_settings(settings: dict[str, Any]):
    report = check(settings)
    assert report.passed, [row for row in report.checks if row.verdict.kind == "fails"]
    assert [row.check for row in report.checks] == ["worked numbers", *(name for name, _, _ in CHECKS)]
    sends_requests = settings["type"] in ("grpo_distill", "opd", "opsd", "rlcsd")
    assert verdicts(report)["failing model"] == ("holds" if sends_requests else "does not apply")


@pytest.mark.parametrize(
    ("name", "broken_check", "problem"),
    [
        ("Uncentered", "shift", "'right and wrong': with +0.25 on every reward, 1 becomes 1.25"),
        ("NotSummingToZero", "zero sum", "'right and wrong': credit sums to -4"),
        ("NotANumber", "every group", "score_group on 'one member': ValueError: nan as an advantage of task "),
        ("Rounding", "equal rewards", "'six rewards of 0.3' leave 3e-08"),
        ("RoundingMadeLarge", "equal rewards", "'seven alike' leave 0.0001"),
        ("FirstCome", "order", "'right and wrong': members in another order have other advantages"),
        ("Dice", "repeatable", "'right and wrong': another instance wrote other advantages"),
        ("LonelyFails", "every group", "score_group on 'one member': IndexError: index 1 is out of bounds"),
        ("OfAnotherLength", "alignment", "stream 'advantages' has shape (3,)"),
        ("OnPrompts", "alignment", "advantages are not 0 on the prompt"),
        ("Nothing", "alignment", "tokens in the rl loss but no advantages"),
        ("NoReference", "alignment", "tokens have ref_kl_weights but no ref_logprobs"),
        ("NoSuchLoss", "routing", "action_loss_type is 'dpo'"),
        ("Meddling", "read only", "'right and wrong': rollouts[0].reward was changed"),
        ("Adviser", "failing model", "a model that fails always: score_batch: ReferenceFailed: "),
        (
            "Inventive",
            "failing model",
            "rollout 0 is shipped with ref_logprobs that no model returned",
        ),
        ("CountingOnAll", "filters", "with every other member of each group left: score_batch: KeyError: "),
        ("SignsTurned", "signs", "score_batch flips the sign of a token of rollout "),
        ("Counting", "state", "after load_state, it has other advantages"),
        ("CountingBatches", "state", "score_batch changes the state; only score_group may"),
        ("HiddenBaseline", "state", "'partial rewards': credited after other groups, it has other advantages"),
        ("FirstOfTask", "state", "'right and wrong': after another group of its task, it has other advantages"),
        ("Interrupted", "state", ": credited at the same time as other groups, it has other advantages"),
        ("SmallerFromBatchToBatch", "state", "'right and wrong': after another group of its task, it has other adv"),
    ],
)
def test_an_algorithm_that_breaks_one_invariant_fails_that_check_only(name: str, broken_check: str, problem: str):
    report = check({"type": f"tests.tools.check_algorithm.broken:{name}"})
    assert [row.check for row in report.checks if row.verdict.kind == "fails"] == [broken_check], report
    assert problem in detail(report, broken_check)


def test_invariants_that_hold_without_a_promise_are_noted():
    report = check({"type": "tests.tools.check_algorithm.broken:Sound"})
    assert report.passed
    kinds = verdicts(report)
    assert (kinds["shift"], kinds["zero sum"], kinds["signs"]) == ("noted", "noted", "does not apply")
    assert detail(report, "shift") == "holds, not promised"


def test_a_state_may_be_none_at_first():
    report = check({"type": "tests.tools.check_algorithm.broken:CountingLate"})
    assert report.passed, report
    assert verdicts(report)["state"] == "holds"


@pytest.mark.parametrize("name", ["LastToken", "SeededByTask"])
def test_an_unusual_but_correct_algorithm_passes(name: str):
    report = check({"type": f"tests.tools.check_algorithm.broken:{name}"})
    assert report.passed, report


def test_order_dependence_without_a_promise_is_noted():
    report = check({"type": "tests.tools.check_algorithm.broken:RandomSibling"})
    assert report.passed, report
    assert verdicts(report)["order"] == "noted"
    assert detail(report, "order").startswith(
        "does not hold and is not promised: 'right and wrong': members in another order"
    )


def test_a_failure_on_huge_rewards_only_is_noted():
    report = check({"type": "tests.tools.check_algorithm.broken:Exponential"})
    assert report.passed, report
    assert verdicts(report)["every group"] == "noted"
    assert detail(report, "every group").startswith(
        "except for rewards as large as 1e+06: score_group on 'huge rewards': OverflowError: "
    )


def test_a_written_zero_that_routing_fills_is_found(monkeypatch: pytest.MonkeyPatch):
    def fill(sample: Sample, component: str) -> None:
        sample.set_stream("rl_weights", np.zeros(len(sample)))
        written = sample.streams["ce_weights"]
        sample.set_stream("ce_weights", np.where(sample.mask & (written == 0), 1.0, written))

    monkeypatch.setattr("headrace.tools.check_algorithm.runner.route_actions", fill)
    report = check({"type": "tests.tools.check_algorithm.broken:LastToken"})
    assert [row.check for row in report.checks if row.verdict.kind == "fails"] == ["routing"]
    assert detail(report, "routing").startswith("'right and wrong': routing overwrote the algorithm's ce_weights")


def test_an_exception_names_the_line_in_the_users_file():
    report = check({"type": "tests.tools.check_algorithm.broken:LonelyFails"})
    lines = Path(broken.__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "may not exist" in text)
    assert detail(report, "every group").endswith(f", at tests/tools/check_algorithm/broken.py:{line}")


def test_an_exception_in_the_constructor_is_reported():
    report = check({"type": "tests.tools.check_algorithm.broken:Unconstructible"})
    assert not report.passed
    assert detail(report, "every group").startswith(
        "the constructor: KeyError: 'model', at tests/tools/check_algorithm/broken.py:"
    )


def test_an_unknown_promise_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broken.Sound, "promises", ("centred",), raising=False)
    with refused(key="Sound.promises", value="centred"):
        check({"type": "tests.tools.check_algorithm.broken:Sound"})


def test_worked_numbers_detect_a_wrong_implementation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(max_rl, "MaxRl", broken.Sound)
    report = check({"type": "max_rl"})
    assert [row.check for row in report.checks if row.verdict.kind == "fails"] == ["worked numbers"]
    assert detail(report, "worked numbers") == (
        "rewards [1.0, 0.0, 0.0, 0.0], settings {}: rollout 0 has advantages [0.75], not 3"
    )


def test_checks_that_do_not_apply_give_the_reason():
    report = check({"type": "grpo", "length_penalty": {"type": "linear"}})
    assert detail(report, "shift") == "a linear penalty grows with the mean reward"
    assert detail(report, "signs") == "credit is final once the group is scored"
    assert detail(report, "filters") == "it has no score_batch, the only hook after filters"
    assert detail(report, "failing model") == "it sends no request to another model"
    assert detail(check({"type": "max_rl"}), "shift") == "it divides by the mean reward"


def test_a_hook_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch):
    class Hanging(Algorithm):
        async def score_group(self, group):
            await asyncio.sleep(3600)

    monkeypatch.setattr("headrace.tools.check_algorithm.runner.HOOK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(broken, "Sound", Hanging)
    report = check({"type": "tests.tools.check_algorithm.broken:Sound"})
    assert "score_group on 'right and wrong': took longer than 0.01 s" in detail(report, "every group")
    assert verdicts(report)["zero sum"] == "does not apply"
