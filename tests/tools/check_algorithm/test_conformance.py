"""The conformance kit: what ships passes in many settings, and who breaks one thing fails that check alone."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms import max_rl
from headrace.algorithms.base import Algorithm
from headrace.rollout.types import Sample
from headrace.tools.check_algorithm.checking import check_algorithm
from headrace.tools.check_algorithm.invariants import CHECKS
from headrace.tools.check_algorithm.report import Report
from headrace.tools.check_algorithm.settings import algorithm_config
from headrace.tools.check_algorithm.stage import make_stage
from tests.refusals import refused
from tests.tools.check_algorithm import broken

STAGE = make_stage()
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


def check(settings: dict[str, Any]) -> Report:
    return asyncio.run(check_algorithm(algorithm_config(settings, "test"), STAGE))


def verdicts(report: Report) -> dict[str, str]:
    return {row.check: row.verdict.kind for row in report.rows}


def detail(report: Report, name: str) -> str:
    return next(row.verdict.detail for row in report.rows if row.check == name)


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, *(pytest.param(settings, marks=pytest.mark.full) for settings in MORE_SETTINGS)],
    ids=lambda settings: settings["type"],
)
def test_what_ships_holds_in_many_settings(settings: dict[str, Any]):
    report = check(settings)
    assert report.passed, [row for row in report.rows if row.verdict.kind == "fails"]
    assert [row.check for row in report.rows] == ["worked numbers", *(name for name, _, _ in CHECKS)]
    asks = settings["type"] in ("opd", "opsd", "rlcsd")
    assert verdicts(report)["failing model"] == ("holds" if asks else "does not apply")


@pytest.mark.parametrize(
    ("name", "broken_check", "told"),
    [
        ("Uncentered", "shift", "'right and wrong': with +0.25 on every reward, 1 becomes 1.25"),
        ("NotSummingToZero", "zero sum", "'right and wrong': it sums to -4"),
        ("NotANumber", "every group", "score_group on 'one member': ValueError: nan as an advantage of task "),
        ("Rounding", "equal rewards", "'six rewards of 0.3' leave 3e-08"),
        ("RoundingMadeLarge", "equal rewards", "'seven alike' leave 0.0001"),
        ("FirstCome", "order", "'right and wrong': members in another order have other advantages"),
        ("Dice", "repeatable", "'right and wrong': another instance gave other advantages"),
        ("LonelyFails", "every group", "score_group on 'one member': IndexError: index 1 is out of bounds"),
        ("OfAnotherLength", "alignment", "stream 'advantages' has shape (3,)"),
        ("OnPrompts", "alignment", "its advantages are not 0 on the prompt"),
        ("Nothing", "alignment", "tokens in the rl loss but no advantages"),
        ("NoReference", "alignment", "tokens have ref_kl_weights but no ref_logprobs"),
        ("NoSuchLoss", "routing", "action_loss_type is 'dpo'"),
        ("Meddling", "read only", "'right and wrong': rollouts[0].reward is not what it was"),
        ("Adviser", "failing model", "a model that fails always: score_batch: ReferenceFailed: "),
        ("Inventive", "failing model", "'right and wrong': rollout 0 is shipped with ref_logprobs that no model gave"),
        ("CountingOnAll", "filters", "with every other member of each group left: score_batch: KeyError: "),
        ("SignsTurned", "signs", "score_batch turns the sign of a token of rollout "),
        ("Counting", "state", "once the state is loaded, it has other advantages"),
        ("CountingBatches", "state", "score_batch changes the state, which score_group alone may"),
        ("HiddenBaseline", "state", "'partial rewards': credited after other groups, it has other advantages"),
        ("FirstOfTask", "state", "'right and wrong': after another group of its task, it has other advantages"),
        ("Interrupted", "state", ": credited at the same time as other groups, it has other advantages"),
        ("SmallerFromBatchToBatch", "state", "'right and wrong': after another group of its task, it has other adv"),
    ],
)
def test_who_breaks_one_thing_fails_that_check_alone(name: str, broken_check: str, told: str):
    report = check({"type": f"tests.tools.check_algorithm.broken:{name}"})
    assert [row.check for row in report.rows if row.verdict.kind == "fails"] == [broken_check], report
    assert told in detail(report, broken_check)


def test_a_sound_algorithm_is_told_what_it_might_promise():
    report = check({"type": "tests.tools.check_algorithm.broken:Sound"})
    assert report.passed
    kinds = verdicts(report)
    assert (kinds["shift"], kinds["zero sum"], kinds["signs"]) == ("noted", "noted", "does not apply")
    assert detail(report, "shift") == "it is so, though not promised"


def test_a_state_may_begin_as_nothing():
    report = check({"type": "tests.tools.check_algorithm.broken:CountingLate"})
    assert report.passed, report
    assert verdicts(report)["state"] == "holds"


@pytest.mark.parametrize("name", ["LastToken", "SeededByTask"])
def test_who_is_right_in_an_unusual_way_passes(name: str):
    report = check({"type": f"tests.tools.check_algorithm.broken:{name}"})
    assert report.passed, report


def test_the_order_may_matter_to_who_has_not_promised_otherwise():
    report = check({"type": "tests.tools.check_algorithm.broken:RandomSibling"})
    assert report.passed, report
    assert verdicts(report)["order"] == "noted"
    assert detail(report, "order").startswith("not promised, and not so: 'right and wrong': members in another order")


def test_who_fails_on_huge_rewards_alone_is_told_so():
    report = check({"type": "tests.tools.check_algorithm.broken:Exponential"})
    assert report.passed, report
    assert verdicts(report)["every group"] == "noted"
    assert detail(report, "every group").startswith(
        "but for rewards as large as 1e+06: score_group on 'huge rewards': OverflowError: "
    )


def test_a_written_zero_that_routing_fills_is_found(monkeypatch: pytest.MonkeyPatch):
    def fill(sample: Sample, component: str) -> None:
        sample.set_stream("rl_weights", np.zeros(len(sample)))
        written = sample.streams["ce_weights"]
        sample.set_stream("ce_weights", np.where(sample.mask & (written == 0), 1.0, written))

    monkeypatch.setattr("headrace.tools.check_algorithm.playing.route_actions", fill)
    report = check({"type": "tests.tools.check_algorithm.broken:LastToken"})
    assert [row.check for row in report.rows if row.verdict.kind == "fails"] == ["routing"]
    assert detail(report, "routing").startswith("'right and wrong': the ce_weights that it wrote are gone")


def test_an_exception_names_the_line_of_the_user_and_not_ours():
    report = check({"type": "tests.tools.check_algorithm.broken:LonelyFails"})
    lines = Path(broken.__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "there may be none" in text)
    assert detail(report, "every group").endswith(f", at tests/tools/check_algorithm/broken.py:{line}")


def test_what_cannot_be_constructed_is_a_finding():
    report = check({"type": "tests.tools.check_algorithm.broken:Unconstructible"})
    assert not report.passed
    assert detail(report, "every group").startswith(
        "the constructor: KeyError: 'model', at tests/tools/check_algorithm/broken.py:"
    )


def test_a_promise_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broken.Sound, "promises", ("centred",), raising=False)
    with refused(key="Sound.promises", value="centred"):
        check({"type": "tests.tools.check_algorithm.broken:Sound"})


def test_worked_numbers_find_an_algorithm_that_is_not_what_its_name_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(max_rl, "MaxRl", broken.Sound)
    report = check({"type": "max_rl"})
    assert [row.check for row in report.rows if row.verdict.kind == "fails"] == ["worked numbers"]
    assert detail(report, "worked numbers") == (
        "rewards [1.0, 0.0, 0.0, 0.0], settings {}: rollout 0 has advantages [0.75], not 3"
    )


def test_what_does_not_apply_says_why():
    report = check({"type": "grpo", "length_penalty": {"type": "linear"}})
    assert detail(report, "shift") == "a linear penalty grows with the mean reward"
    assert detail(report, "signs") == "credit is final once the group is scored"
    assert detail(report, "filters") == "it has no score_batch, which alone sees it"
    assert detail(report, "failing model") == "it asks no other model"
    assert detail(check({"type": "max_rl"}), "shift") == "it divides by the mean reward"


def test_an_algorithm_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    class Hanging(Algorithm):
        async def score_group(self, group):
            await asyncio.sleep(3600)

    monkeypatch.setattr("headrace.tools.check_algorithm.playing.LONGEST_HOOK", 0.01)
    monkeypatch.setattr(broken, "Sound", Hanging)
    report = check({"type": "tests.tools.check_algorithm.broken:Sound"})
    assert "score_group on 'right and wrong': it took longer than 0.01 s" in detail(report, "every group")
    assert verdicts(report)["zero sum"] == "does not apply"
