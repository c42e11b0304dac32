"""The bars of a waterfall add up to the credit that was recorded, for every algorithm that ships."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace.runfile.run  # noqa: F401  (registers the algorithms)
from headrace.algorithms.base import CreditTerm, RolloutView
from headrace.config.algorithms import ALGORITHMS
from headrace.rollout.routing import GradientShare, gradient_shares
from headrace.rollout.types import Rollout, Sample
from headrace.tools.check_algorithm.fixtures import (
    TEACHER,
    Case,
    FakeModel,
    Fixtures,
    algorithm_config,
    make_cases,
    make_fixtures,
)
from headrace.tools.check_algorithm.runner import CaseResult, HookFailed, Session, make_factory
from headrace.tools.view.waterfall import Waterfall, component_shares, explain

SHIPPED = [{"type": name} for name in ALGORITHMS.names if name != "custom"]
VARIANTS = [
    {"type": "grpo", "normalize": "std", "length_penalty": {"type": "linear"}},
    {
        "type": "grpo",
        "length_weighted_baseline": True,
        "length_penalty": {"type": "linear", "gate_by_correctness": True},
    },
    {"type": "grpo", "length_penalty": {"type": "overlong", "max_tokens": 30, "cache_tokens": 20}},
    {"type": "grpo", "length_penalty": {"type": "tokens"}},
    {"type": "grpo", "length_penalty": {"type": "turns"}, "normalize": "std"},
    {"type": "grpo", "terms": [{"import_path": "tests.tools.view.test_waterfall:brief"}]},
    {"type": "hierarchical_grpo", "episode_agents": ["b"]},
    {"type": "rlcsd", "normalization": "rollout_mean", "length_penalty": {"type": "linear"}},
    {"type": "rae", "decay": 0.5},
    {"type": "grpo", "normalize": "std", "kl": {"coef": 0.1}},
    {"type": "grpo", "kl": {"coef": 0.1, "reference": TEACHER}},
    {"type": "max_rl", "kl": {"coef": 0.1, "place": "reward", "reference": TEACHER}},
]
CHANGES_TOKENS = ("rlcsd",)
Explained = tuple[CaseResult, list[CreditTerm]]


def brief(group: list[RolloutView]) -> list[float]:
    """A term of a user: a bonus for few tokens."""
    return [-0.01 * view.completion_length for view in group]


@pytest.fixture(scope="module")
def fixtures() -> Fixtures:
    return make_fixtures()


@pytest.fixture(scope="module")
def cases(fixtures: Fixtures) -> list[Case]:
    return make_cases(fixtures, {}, seed=7)


async def terms_before(session: Session, result: CaseResult, state: Any) -> list[CreditTerm]:
    """Return the terms that the algorithm names in the state before it credited a group."""
    algorithm, after = session.algorithm, session.algorithm.state()
    if algorithm.keeps_state():
        algorithm.load_state(state)
    views = [RolloutView(rollout, result.credited.task) for rollout in result.credited.rollouts]
    terms = algorithm.credit_terms([algorithm.with_penalty(view) for view in views])
    if algorithm.keeps_state():
        algorithm.load_state(after)
    return terms


async def credit(section: dict[str, Any], fixtures: Fixtures, cases: list[Case], credited: list[Explained]) -> None:
    """Credit random groups in one batch; append each, with the terms that the algorithm named before.

    Nothing is returned: Python 3.11 formats the result of `asyncio.run`, which takes seconds for this one.
    """
    config, model = algorithm_config(section, "test"), FakeModel()
    async with Session.open(make_factory(config), model, fixtures.host(model)) as session:
        for case in cases:
            state = session.algorithm.state()
            try:
                result = await session.credit(case)
            except HookFailed:
                continue  # a case that this algorithm refuses
            credited.append((result, await terms_before(session, result, state)))
        await session.ship([result for result, _ in credited])


def shipped(credited: list[Explained]) -> Iterator[tuple[int, Rollout, list[CreditTerm], CaseResult]]:
    for result, terms in credited:
        for index, rollout in enumerate(result.credited.rollouts):
            if not result.drops[index]:
                yield index, rollout, terms, result


def whole_step(rollouts: list[Rollout]) -> dict[str, GradientShare]:
    step: dict[str, GradientShare] = {}
    for rollout in rollouts:
        for name, share in gradient_shares(rollout).items():
            before = step.get(name, GradientShare(0.0, 0))
            step[name] = GradientShare(before.total + share.total, before.members + share.members)
    return step


def check_sums(waterfall: Waterfall) -> None:
    """Every total is the sum of the changes of its stage, and every change moves the running sum by its value."""
    running: dict[str, float] = {}
    for bar in waterfall.bars:
        if bar.kind == "delta":
            running[bar.stage] = running.get(bar.stage, 0.0) + bar.value
            assert bar.total == pytest.approx(running[bar.stage], rel=1e-9, abs=1e-9)
        elif bar.stage in running and bar.stage != "weight":  # weights of several components are not added up
            assert bar.total == pytest.approx(running[bar.stage], rel=1e-5, abs=1e-5 * largest(waterfall))
        running[bar.stage] = bar.total


def largest(waterfall: Waterfall) -> float:
    return max(abs(bar.value) for bar in waterfall.bars)


def total(waterfall: Waterfall, stage: str) -> float | None:
    return next((bar.total for bar in reversed(waterfall.bars) if bar.stage == stage), None)


@pytest.mark.parametrize("section", [*SHIPPED, *VARIANTS], ids=str)
def test_bars_add_up_to_the_recorded_stream_and_shares_to_one(
    section: dict[str, Any], fixtures: Fixtures, cases: list[Case]
):
    credited: list[Explained] = []
    asyncio.run(credit(section, fixtures, cases, credited))
    entries = list(shipped(credited))
    step = whole_step([rollout for _, rollout, _, _ in entries])
    shares = 0.0
    for index, rollout, terms, result in entries:
        waterfall = explain(rollout, index, terms, section["type"], step=step)
        check_sums(waterfall)
        recorded, scale = rollout.mean_advantage, largest(waterfall)
        if recorded is not None:
            assert total(waterfall, "tokens") == pytest.approx(recorded)
            of_group = [
                streams["advantages"][sample.mask]
                for streams, sample in zip(result.after_group[index], rollout.samples, strict=True)
            ]
            # Credit below 1e-12 of the group's largest reward counts as rounding, and is 0.
            slack = max(1e-6 * scale, 2e-12 * max((np.abs(term.raw).max() for term in terms), default=0.0))
            credit_total = float(np.concatenate(of_group).astype(np.float64).mean())
            assert total(waterfall, "credit") == pytest.approx(credit_total, rel=1e-5, abs=slack)
            if section["type"] not in CHANGES_TOKENS:
                assert abs(waterfall.unexplained) <= slack
                assert total(waterfall, "credit") == pytest.approx(recorded, rel=1e-5, abs=slack)
        shares += sum(component_shares(rollout, step).values())
        assert total(waterfall, "gradient") == pytest.approx(sum(component_shares(rollout, step).values()))
    assert shares == pytest.approx(1.0)


def sampled(reward: float, advantage: float) -> Rollout:
    sample = Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0], 1)
    sample.set_stream("advantages", [0.0, advantage, advantage])
    return Rollout(reward=reward, rewards={"exact": reward}, samples=[sample])


def test_each_bar_of_a_standardized_reward_names_its_formula_and_key():
    terms = [CreditTerm("reward", np.array([1.0, 0.0]), 0.5, np.array([1.0, -1.0]), "(r - mean) / std", "normalize")]
    bars = [bar for bar in explain(sampled(1.0, 1.0), 0, terms, "grpo").bars if bar.stage == "credit"]
    assert [(bar.name, bar.value, bar.total) for bar in bars] == [
        ("reward", 1.0, 1.0),
        ("baseline of the reward", -0.5, 0.5),
        ("scale of the reward", 0.5, 1.0),
        ("advantage", 1.0, 1.0),
    ]
    assert {bar.key for bar in bars[:3]} == {"orchestrator.algo.normalize"}


def test_credit_that_no_term_explains_is_a_bar_of_its_own():
    waterfall = explain(sampled(1.0, 0.25), 0, [], "my_package:Mine")
    assert waterfall.unexplained == 0.25
    assert total(waterfall, "credit") == 0.25


def test_parts_of_a_reward_that_are_not_named_are_a_bar():
    rollout = sampled(1.0, 0.5)
    rollout.rewards = {"format": 0.25, "exact": 0.5}
    bars = [(bar.name, bar.value) for bar in explain(rollout, 0, [], "grpo").bars if bar.stage == "reward"]
    assert bars == [("format", 0.25), ("exact", 0.5), ("other parts", 0.25), ("reward", 1.0)]
