"""Two ways to credit the same rollouts: shares by hand, and a picture that is whole."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from headrace.rollout.types import Rollout
from headrace.tools.rescore.comparison import Collector, split_by_correctness, split_in_quarters
from headrace.tools.rescore.credit import Rescored, uncredited
from headrace.tools.rescore.report import rescore_chart
from tests.rollout.strategies import sample


def rescored(
    group: str, reward: float, tokens: int, then: float, now: float | None, *, env: str = "env", trained: bool = True
) -> Rescored:
    """One sample with the same advantage at every token; it trains now unless that is zero."""
    before = Rollout(env=env, group_id=group, reward=reward, samples=[sample(1, tokens)])
    before.samples[0].set_stream("advantages", [0.0] + [then] * tokens)
    after = uncredited(before)
    if now is not None:
        after.samples[0].set_stream("advantages", [0.0] + [now] * tokens)
    else:
        after.samples[0].set_stream("rl_weights", [0.0] * (1 + tokens))
        after.samples[0].set_stream("ce_weights", [0.0] + [0.5] * tokens)
    return Rescored(before, after, trained, now is None or now != 0)


def collect(*steps: list[Rescored]) -> Collector:
    collector = Collector()
    for step in steps:
        collector.add_step(step)
    return collector


def test_every_step_weighs_by_its_own_mean_over_tokens():
    one = [rescored("a", 1, 3, 0.75, 3), rescored("a", 0, 1, -0.25, -1)]
    two = [rescored("b", 1, 2, 1, 1, env="other")]
    found = collect(one, two).comparison()
    # then: (3 * .75) / 4 = .5625, .25 / 4 = .0625, and 1; now: 9/4, 1/4, and 1
    assert [(s.name, s.then, s.now) for s in found.by_environment] == [
        ("env", pytest.approx(0.625 / 1.625), pytest.approx(2.5 / 3.5)),
        ("other", pytest.approx(1 / 1.625), pytest.approx(1 / 3.5)),
    ]
    assert [(s.name, s.then) for s in found.by_reward] == [
        ("0", pytest.approx(0.0625 / 1.625)),
        ("1", pytest.approx(1.5625 / 1.625)),
    ]
    assert [(s.name, s.rollouts, s.tokens) for s in found.by_environment] == [
        ("env", pytest.approx(2 / 3), pytest.approx(4 / 6)),
        ("other", pytest.approx(1 / 3), pytest.approx(2 / 6)),
    ]


def test_signal_size_and_agreement_of_both_sides():
    found = collect(
        [
            rescored("a", 1, 1, 0.5, 1),
            rescored("a", 0, 3, -0.5, -1),
            rescored("b", 1, 1, 0.0, 0.25, trained=False),  # had no signal, and has one
            rescored("b", 1, 1, 0.0, -0.25, trained=False),
        ]
    ).comparison()
    assert (found.groups, found.rollouts) == (2, 4)
    assert (found.then.groups_with_signal, found.now.groups_with_signal) == (1, 2)
    assert (found.then.rollouts_that_train, found.now.rollouts_that_train) == (2, 4)
    assert found.then.mean_abs_advantage == pytest.approx(2 / 6)
    assert found.now.mean_abs_advantage == pytest.approx(4.5 / 6)
    assert (found.now.advantages["lowest"], found.now.advantages["highest"]) == (-1, 1)
    assert found.same_sign == 0.5
    # two points on a line through the origin, two beside it: sum(xy) / sqrt(sum(xx) * sum(yy))
    assert found.correlation == pytest.approx(1 / np.sqrt(0.5 * 2.125))
    assert (found.same, found.changed_sides, found.largest_difference) == (False, 2, 0.5)


def test_nothing_differs_where_the_credit_is_the_same():
    found = collect([rescored("a", 1, 2, 0.5, 0.5), rescored("a", 0, 2, -0.5, -0.5)]).comparison()
    assert found.same
    assert (found.largest_difference, found.changed_sides, found.same_sign) == (0, 0, 1)


def test_a_side_without_advantages_has_shares_but_no_correlation():
    collector = collect([rescored("a", 1, 1, 0.75, None), rescored("a", 0, 3, -0.25, None)])
    found = collector.comparison()
    assert (found.now.mean_abs_advantage, found.correlation, found.same_sign) == (None, None, None)
    assert (found.then.components, found.now.components) == ({"rl": 1.0}, {"ce": 1.0})
    assert [(s.name, s.then, s.now) for s in found.by_reward] == [("0", 0.5, 0.75), ("1", 0.5, 0.25)]
    assert "no advantages" in rescore_chart("run", ("a", "b"), found, collector.advantages)


@pytest.mark.parametrize(
    ("rewards", "names"),
    [
        ([0, 1, 1, 0.5], ["0", "between", "1"]),
        ([1, 1], ["1"]),
        ([0.1, 0.2, 0.3, 0.4], ["0.1", "0.2", "0.3", "0.4"]),
        ([0, 2, 0, 1], ["0", "1", "2"]),  # not a matter of right and wrong
    ],
)
def test_rewards_are_parted_by_right_and_wrong_or_by_quarters(rewards: list[float], names: list[str]):
    parts = split_by_correctness(np.array(rewards))
    assert [name for name, _ in parts] == names
    assert sum(inside.sum() for _, inside in parts) == len(rewards)


def test_equal_lengths_stay_together():
    parts = split_in_quarters(np.array([5, 5, 5, 5, 5, 7, 1000, 2000]), "{:,.0f}")
    assert [(name, inside.sum()) for name, inside in parts] == [("5", 5), ("7 to 1,000", 2), ("2,000", 1)]
    rare = split_in_quarters(np.array([1.2] * 9 + [0.0, 0.2]), "{:.3g}")
    assert [(name, inside.sum()) for name, inside in rare] == [("0 to 0.2", 2), ("1.2", 9)]
    even = split_in_quarters(np.arange(1001.0), "{:.0f}")
    assert [inside.sum() for _, inside in even] == [251, 251, 251, 248]
    assert split_in_quarters(np.array([]), "{}") == []


def test_the_picture_is_whole_whatever_it_shows():
    collector = collect([rescored("a", 1, 1, 0.75, 3, env="a <b> & c"), rescored("a", 0, 1, -0.25, -1, env="x" * 50)])
    svg = rescore_chart("a <b>", ("grpo", "max_rl"), collector.comparison(), collector.advantages)
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    drawn = ElementTree.fromstring(svg)
    circles = [(float(c.get("cx", "nan")), float(c.get("cy", "nan"))) for c in drawn.findall("svg:circle", namespace)]
    assert len(circles) == 2
    (left, low), (right, high) = sorted(circles)
    assert left < right and low > high  # upwards on the page is a smaller y
    assert "nan" not in svg
