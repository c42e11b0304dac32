"""What a probe would fix, from what it has seen: reports with one thing wrong each."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.tools.probe.findings import Finding, findings
from headrace.tools.probe.prompts import TINY
from headrace.tools.probe.report import Episode, Opening, Problem, Prompts, Report, Sampled
from headrace.tools.probe.signal import Prediction, predict

HEALTHY = {"gold": 1.0, "mistake": 0.0, "empty": 0.0, "random bytes": 0.0, "gold among 20 wrong": 0.0}


def seen(earned: dict[str, float | list[float]] | None = None, *others: Episode, **changes: Any) -> Report:
    """A report on two tasks in which completions earned so much."""
    episodes = [
        Episode(name, task, {"right": reward}, reward)
        for name, rewards in {**HEALTHY, **(earned or {})}.items()
        for task, reward in enumerate(rewards if isinstance(rewards, list) else [rewards, rewards])
    ]
    opening = Opening(0.1, 0.1, 0.1, 2, 100, False, "")
    report = Report("probed", {}, opening, ["a", "b"], [0, 1], 0, None, [*episodes, *others], [], None)
    for name, value in changes.items():
        setattr(report, name, value)
    return report


def only(report: Report) -> Finding:
    (finding,) = findings(report)
    return finding


def failed(completion: str, reason: str, place: str = "", **times: float) -> Episode:
    return Episode(completion, 0, problem=Problem(reason, "in words", place), **times)


def test_a_healthy_environment_has_nothing_to_fix():
    assert findings(seen()) == []


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("empty", "error"),
        ("random bytes", "error"),
        ("gold among 20 wrong", "error"),
        ("forged feedback", "error"),
        ("unknown tool", "error"),
        ("mistake", "warning"),
        ("gold in an open thought", "warning"),
        ("gold 1,000 times", "note"),
    ],
)
def test_what_earns_as_much_as_gold_is_as_bad_as_it_is_wrong(name: str, severity: str):
    finding = only(seen({name: 1.0}))
    assert (finding.severity, finding.seen) == (severity, f"{name!r} earns as much as gold")


def test_a_completion_that_says_what_gold_says_may_earn_as_much():
    assert findings(seen({}, Episode("prompt echoed", 0, {"right": 1.0}, 1.0, says_gold=True))) == []


def test_where_candidates_are_tool_calls_to_try_many_may_be_fair():
    finding = only(
        seen({"gold among 20 wrong": 1.0}, Episode("unknown tool", 0, {"right": 0.0}, 0.0, offers_tools=True))
    )
    assert finding.severity == "warning"
    assert finding.do.startswith("if calls are guesses, count them")


def test_what_earns_more_than_gold_is_an_error():
    finding = only(seen({"mistake": 1.5}))
    assert (finding.severity, finding.seen) == ("error", "'mistake' earns more than gold")


def test_several_completions_with_one_remedy_are_one_finding():
    finding = only(seen(dict.fromkeys(["prompt echoed", "forged feedback", "deep nesting", "power tower"], 1.0)))
    assert finding.seen == "'prompt echoed', 'forged feedback', 'deep nesting' and 1 more earn as much as gold"


def test_rubbish_may_earn_a_little_but_not_much():
    assert findings(seen({"random bytes": 0.05})) == []
    finding = only(seen({"random bytes": 0.3}))
    assert (finding.severity, finding.seen) == ("warning", "'random bytes' earns 30% of what gold does")


def test_near_misses_may_earn_something():
    assert findings(seen({"mistake": 0.8, "prompt echoed": 0.5, "gold 1,000 times": 0.9})) == []


def test_a_cheat_must_not_earn_more_than_half():
    finding = only(seen({"gold among 20 wrong": 0.9}))
    assert (finding.severity, finding.seen) == ("warning", "'gold among 20 wrong' earns 90% of what gold does")


def test_what_earns_as_much_as_gold_on_single_tasks_is_a_note():
    finding = only(seen({"forged feedback": [0.0, 1.0]}))
    assert (finding.severity, finding.seen) == (
        "note",
        "'forged feedback' earns as much as gold on 1 of 2 tasks: [1]",
    )
    assert findings(seen({"mistake": [0.0, 1.0]})) == []  # a mistake may be right
    assert findings(seen({"gold": [1.0, 0.5], "forged feedback": [0.0, 0.4]})) == []


def test_where_several_agents_are_trained_rewards_are_not_judged():
    game = [Episode(name, 0, {"won": 0.0}, 0.0, [1.0, -1.0]) for name in ("gold", "empty", "forged feedback")]
    report = seen(unstable=["gold"])
    report.episodes = game
    unstable, note = findings(report)
    assert unstable.severity == "warning"
    assert (note.severity, note.seen[:42]) == ("note", "2 agents are trained in an episode, and co")


def test_shares_count_from_the_lowest_reward_and_on_the_same_tasks():
    # from -1 to 1: an empty answer at -0.9 has earned 5%, one at 0 half
    assert findings(seen({"mistake": -1.0, "empty": -0.9, "random bytes": -1.0, "gold among 20 wrong": -1.0})) == []
    assert "'empty' earns 50%" in only(seen(dict.fromkeys(HEALTHY, -1.0) | {"gold": 1.0, "empty": 0.0})).seen
    # played on the first task only, where gold earns .5 of its 1.0
    assert "'empty' earns as much as gold" in only(seen({"gold": [0.5, 1.0], "empty": [0.5]})).seen


def test_gold_that_earns_no_more_than_the_rest_is_the_only_error_told():
    finding = only(seen({"gold": 0.0}))
    assert (finding.severity, finding.seen) == ("error", "gold earns 0, and nothing earns less")


def test_gold_that_earns_little_on_some_tasks_is_told_with_the_task():
    finding = only(seen({"gold": [1.0, 0.2]}))
    assert finding.severity == "warning"
    assert finding.seen == "gold earns less than half of its best, 1, on 1 of 2 tasks: [1]"


def test_no_gold_is_a_warning_and_then_rubbish_must_not_earn_at_all():
    report = seen({"random bytes": 0.5})
    report.episodes = [episode for episode in report.episodes if episode.completion in ("empty", "random bytes")]
    assert [finding.seen for finding in findings(report)] == [
        "no gold(): nobody knows whether a right answer earns the most",
        "'random bytes' earns 0.5",
    ]


def test_an_exception_is_told_once_for_each_place():
    crashes = [failed(name, "exception", "env.py:7") for name in ("empty", "128 KB", "128 KB")]
    first, second = findings(seen({}, *crashes, failed("10 MB", "exception", "env.py:9")))
    assert first.severity == second.severity == "error"
    assert first.seen == "'empty', '128 KB': exception at env.py:7: in words"
    assert second.seen == "'10 MB': exception at env.py:9: in words"


def test_a_failing_gold_and_a_refusal_of_the_environments_own_are_told_apart():
    gold, refusal = findings(seen({}, failed("gold", "gold_failed"), failed("128 KB", "not_for_me")))
    assert (gold.severity, gold.do) == ("error", "fix gold() or mistake()")
    assert refusal.severity == "warning"


def test_a_reward_that_is_no_number_is_an_error():
    assert only(seen({}, failed("128 KB", "invalid_reward"))).severity == "error"


def test_blocking_the_event_loop_is_told_with_how_long():
    held = [Episode("128 KB", task, {"right": 0.0}, 0.0, blocked_seconds=0.25) for task in range(3)]
    finding = only(seen({}, *held))
    assert (finding.severity, finding.seen) == ("warning", "'128 KB' blocks the event loop for 250 ms")
    assert "in_sandbox" in finding.do


def test_an_episode_without_an_end_is_an_error_unless_no_run_could_sample_its_answer():
    stuck = only(seen({}, failed("bait for regexes", "blocked", "env.py:7", blocked_seconds=10.0)))
    assert stuck.severity == "error"
    assert stuck.seen == "'bait for regexes' blocks the event loop for more than 10 s, at env.py:7"
    assert only(seen({}, failed("10 MB", "blocked", blocked_seconds=10.0))).severity == "warning"
    assert only(seen({}, failed("empty", "timeout"))).seen == "'empty': in words"
    stubborn = only(seen({}, failed("empty", "not_cancelled")))
    assert (stubborn.severity, stubborn.seen) == ("error", "'empty' in words")
    assert "CancelledError" in stubborn.do


def test_replies_without_end_are_told():
    assert "after 64 replies" in only(seen({}, Episode("unknown tool", 0, {"right": 0.0}, 0.0, endless=True))).seen


def test_tasks_that_change_are_an_error_and_repeated_ones_a_note():
    changed, repeated = findings(seen(first_difference=3, duplicates=1))
    assert (changed.severity, repeated.severity) == ("error", "note")
    assert "from task 3 on" in changed.seen
    assert repeated.seen == "1 of 2 tasks are repetitions"


def test_rewards_that_change_and_a_close_that_fails_are_told():
    closing, unstable = findings(seen(unstable=["gold"], closing=Problem("exception", "in words", "env.py:9")))
    assert (closing.severity, closing.seen) == ("error", "close(): exception at env.py:9: in words")
    assert (unstable.severity, unstable.seen) == ("warning", "the second time 'gold' earned something else")


def test_prompts_that_do_not_fit_are_an_error_and_conversations_a_warning():
    long = Prompts("model", [], [10, 64, 70], [20, 80, 90])
    assert only(seen(prompts=long, seq_len=64)).seen == "2 of 3 prompts have 64 tokens or more (the longest 70)"
    assert findings(seen(prompts=long)) == []
    cut = only(seen(prompts=long, seq_len=85))
    assert (cut.severity, cut.seen[:23]) == ("warning", "1 of 3 gold conversatio")
    assert only(seen(prompts=Prompts("model", [], [], [], problem="task 0: no such role"))).severity == "error"


def test_without_a_model_prompts_that_do_not_fit_are_a_warning_that_asks_for_one():
    long = Prompts(TINY, [], [10, 64, 70], [20, 80, 90])
    finding = only(seen(prompts=long, seq_len=64))
    assert (finding.severity, "--model" in finding.do) == ("warning", True)


def sampled(rewards: list[list[float]], size: int = 4, **changes: Any) -> Sampled:
    earned = [[[reward] for reward in task] for task in rewards]
    predictions: list[Prediction] = [predict(earned, g) for g in (2, 4, 8)] if any(rewards) else []
    given = {"problems": [], "episodes": sum(map(len, rewards)), "truncated": 0, **changes}
    return Sampled("m", size, earned, given["problems"], given["episodes"], given["truncated"], 1.0, predictions)


def test_groups_without_signal_are_told_with_what_would_help():
    assert findings(seen(sampled=sampled([[0, 1, 0, 1]] * 4))) == []
    hard = only(seen(sampled=sampled([[0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 1]])))
    assert hard.seen == "75% of groups of 4 would have no signal"
    assert hard.do.startswith("easier tasks")
    easy = only(seen(sampled=sampled([[1] * 4, [1] * 4, [1] * 4, [0, 1, 0, 1]])))
    assert easy.do.startswith("harder tasks")
    both = only(seen(sampled=sampled([[1] * 4, [0] * 4, [1] * 4, [0, 1, 0, 1], [0] * 4])))
    assert both.do.startswith("tasks in between")
    # of pairs of one right in four half are equal; of groups of four none
    larger = only(seen(sampled=sampled([[0, 0, 0, 1]] * 3 + [[0, 0, 0, 0]], size=2)))
    assert "; group_size 4 would leave 25%" in larger.do


def test_where_groups_are_larger_than_what_was_sampled_only_a_bound_is_told():
    finding = only(seen(sampled=sampled([[0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 1]], size=8)))
    assert finding.severity == "note"
    assert finding.seen.startswith("at most 75% of groups of 8 would have no signal")
    assert finding.do == "--sample 4x8 would tell"


def test_cut_off_and_failed_episodes_are_told():
    cut, lost = findings(
        seen(sampled=sampled([[0, 1, 0, 1]] * 2, truncated=4, episodes=10, problems=[Problem("endpoint", "busy")] * 2))
    )[::-1]
    assert cut.seen == "40% of sampled episodes were cut off"
    assert (lost.severity, lost.seen) == ("warning", "2 of 10 sampled episodes failed: endpoint: busy")
    all_lost = only(seen(sampled=sampled([[]], episodes=1, problems=[Problem("endpoint", "gone")])))
    assert all_lost.severity == "error"
