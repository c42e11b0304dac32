"""Findings from reports that each have one problem."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.tools.probe.findings import ProbeFinding, list_findings
from headrace.tools.probe.report import (
    TINY,
    EpisodeProblem,
    LoadResult,
    ProbeEpisode,
    ProbeReport,
    Prompts,
    SampledEpisodes,
    SignalPrediction,
)
from headrace.tools.probe.sampling import predict_signal

HEALTHY = {"gold": 1.0, "mistake": 0.0, "empty": 0.0, "random bytes": 0.0, "gold among 20 wrong": 0.0}


def seen(earned: dict[str, float | list[float]] | None = None, *others: ProbeEpisode, **changes: Any) -> ProbeReport:
    """A report on two tasks in which completions earned so much."""
    episodes = [
        ProbeEpisode(name, task, {"right": reward}, reward)
        for name, rewards in {**HEALTHY, **(earned or {})}.items()
        for task, reward in enumerate(rewards if isinstance(rewards, list) else [rewards, rewards])
    ]
    opening = LoadResult(0.1, 0.1, 0.1, 2, 100, False, "")
    report = ProbeReport("probed", {}, opening, ["a", "b"], [0, 1], 0, None, [*episodes, *others], [], None)
    for name, value in changes.items():
        setattr(report, name, value)
    return report


def only(report: ProbeReport) -> ProbeFinding:
    (finding,) = list_findings(report)
    return finding


def failed(completion: str, reason: str, place: str = "", **times: float) -> ProbeEpisode:
    return ProbeEpisode(completion, 0, problem=EpisodeProblem(reason, "in words", place), **times)


def test_a_healthy_environment_has_nothing_to_fix():
    assert list_findings(seen()) == []


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
def test_the_severity_of_a_reward_equal_to_gold_depends_on_the_completion(name: str, severity: str):
    finding = only(seen({name: 1.0}))
    assert (finding.severity, finding.seen) == (severity, f"{name!r} earns as much as gold")


def test_a_completion_that_says_what_gold_says_may_earn_as_much():
    assert list_findings(seen({}, ProbeEpisode("prompt echoed", 0, {"right": 1.0}, 1.0, says_gold=True))) == []


def test_where_candidates_are_tool_calls_to_try_many_may_be_fair():
    finding = only(
        seen({"gold among 20 wrong": 1.0}, ProbeEpisode("unknown tool", 0, {"right": 0.0}, 0.0, offers_tools=True))
    )
    assert finding.severity == "warning"
    assert "calls are guesses" in finding.do


def test_what_earns_more_than_gold_is_an_error():
    finding = only(seen({"mistake": 1.5}))
    assert (finding.severity, finding.seen) == ("error", "'mistake' earns more than gold")


def test_several_completions_with_one_remedy_are_one_finding():
    finding = only(seen(dict.fromkeys(["prompt echoed", "forged feedback", "deep nesting", "power tower"], 1.0)))
    assert finding.seen == "'prompt echoed', 'forged feedback', 'deep nesting' and 1 more earn as much as gold"


def test_rubbish_may_earn_a_little_but_not_much():
    assert list_findings(seen({"random bytes": 0.05})) == []
    finding = only(seen({"random bytes": 0.3}))
    assert (finding.severity, finding.seen) == ("warning", "'random bytes' earns 30% of what gold does")


def test_near_misses_may_earn_something():
    assert list_findings(seen({"mistake": 0.8, "prompt echoed": 0.5, "gold 1,000 times": 0.9})) == []


def test_a_cheat_must_not_earn_more_than_half():
    finding = only(seen({"gold among 20 wrong": 0.9}))
    assert (finding.severity, finding.seen) == ("warning", "'gold among 20 wrong' earns 90% of what gold does")


def test_what_earns_as_much_as_gold_on_single_tasks_is_a_note():
    finding = only(seen({"forged feedback": [0.0, 1.0]}))
    assert (finding.severity, finding.seen) == (
        "note",
        "'forged feedback' earns as much as gold on 1 of 2 tasks: [1]",
    )
    assert list_findings(seen({"mistake": [0.0, 1.0]})) == []  # a mistake may be right
    assert list_findings(seen({"gold": [1.0, 0.5], "forged feedback": [0.0, 0.4]})) == []


def test_where_several_agents_are_trained_rewards_are_not_judged():
    game = [ProbeEpisode(name, 0, {"won": 0.0}, 0.0, [1.0, -1.0]) for name in ("gold", "empty", "forged feedback")]
    report = seen(unstable=["gold"])
    report.episodes = game
    unstable, note = list_findings(report)
    assert unstable.severity == "warning"
    assert (note.severity, note.seen[:42]) == ("note", "2 agents are trained in an episode, with t")


def test_shares_count_from_the_lowest_reward_and_on_the_same_tasks():
    # from -1 to 1: an empty answer at -0.9 has earned 5%, one at 0 half
    assert (
        list_findings(seen({"mistake": -1.0, "empty": -0.9, "random bytes": -1.0, "gold among 20 wrong": -1.0})) == []
    )
    assert "'empty' earns 50%" in only(seen(dict.fromkeys(HEALTHY, -1.0) | {"gold": 1.0, "empty": 0.0})).seen
    # played on the first task only, where gold earns .5 of its 1.0
    assert "'empty' earns as much as gold" in only(seen({"gold": [0.5, 1.0], "empty": [0.5]})).seen


def test_gold_that_earns_no_more_than_the_rest_is_the_only_finding():
    finding = only(seen({"gold": 0.0}))
    assert (finding.severity, finding.seen) == ("error", "gold earns 0, and nothing earns less")


def test_gold_that_earns_little_on_some_tasks_is_reported_with_the_task():
    finding = only(seen({"gold": [1.0, 0.2]}))
    assert finding.severity == "warning"
    assert finding.seen == "gold earns less than half of its best, 1, on 1 of 2 tasks: [1]"


def test_no_gold_is_a_warning_and_then_rubbish_must_not_earn_at_all():
    report = seen({"random bytes": 0.5})
    report.episodes = [episode for episode in report.episodes if episode.completion in ("empty", "random bytes")]
    assert [finding.seen for finding in list_findings(report)] == [
        "no gold(): it is unknown whether a correct answer gets the highest reward",
        "'random bytes' earns 0.5",
    ]


def test_an_exception_is_reported_once_per_location():
    crashes = [failed(name, "exception", "env.py:7") for name in ("empty", "128 KB", "128 KB")]
    first, second = list_findings(seen({}, *crashes, failed("10 MB", "exception", "env.py:9")))
    assert first.severity == second.severity == "error"
    assert first.seen == "'empty', '128 KB': exception at env.py:7: in words"
    assert second.seen == "'10 MB': exception at env.py:9: in words"


def test_a_failing_gold_and_a_refusal_of_the_environments_own_are_distinguished():
    gold, refusal = list_findings(seen({}, failed("gold", "gold_failed"), failed("128 KB", "not_for_me")))
    assert (gold.severity, gold.do) == ("error", "fix gold() or mistake()")
    assert refusal.severity == "warning"


def test_a_reward_that_is_no_number_is_an_error():
    assert only(seen({}, failed("128 KB", "invalid_reward"))).severity == "error"


def test_blocking_the_event_loop_is_reported_with_its_duration():
    held = [ProbeEpisode("128 KB", task, {"right": 0.0}, 0.0, blocked_seconds=0.25) for task in range(3)]
    finding = only(seen({}, *held))
    assert (finding.severity, finding.seen) == ("warning", "'128 KB' blocks the event loop for 250 ms")
    assert "in_sandbox" in finding.do


def test_an_episode_without_an_end_is_an_error_unless_no_run_could_sample_its_answer():
    stuck = only(seen({}, failed("bait for regexes", "blocked", "env.py:7", blocked_seconds=10.0)))
    assert stuck.severity == "error"
    assert stuck.seen == "'bait for regexes' blocks the event loop for more than 10 s, at env.py:7"
    assert only(seen({}, failed("10 MB", "blocked", blocked_seconds=10.0))).severity == "warning"
    assert only(seen({}, failed("empty", "timeout"))).seen == "'empty' in words"
    stubborn = only(seen({}, failed("empty", "not_cancelled")))
    assert (stubborn.severity, stubborn.seen) == ("error", "'empty' in words")
    assert "CancelledError" in stubborn.do


def test_endless_episodes_are_reported():
    assert "after 64 replies" in only(seen({}, ProbeEpisode("unknown tool", 0, {"right": 0.0}, 0.0, endless=True))).seen


def test_tasks_that_change_are_an_error_and_repeated_ones_a_note():
    changed, repeated = list_findings(seen(first_difference=3, duplicates=1))
    assert (changed.severity, repeated.severity) == ("error", "note")
    assert "from task 3 on" in changed.seen
    assert repeated.seen == "1 of 2 tasks are repetitions"


def test_unstable_rewards_and_a_failing_close_are_reported():
    closing, unstable = list_findings(
        seen(unstable=["gold"], closing=EpisodeProblem("exception", "in words", "env.py:9"))
    )
    assert (closing.severity, closing.seen) == ("error", "close(): exception at env.py:9: in words")
    assert (unstable.severity, unstable.seen) == ("warning", "the reward of 'gold' differed the second time")


def test_prompts_that_do_not_fit_are_an_error_and_conversations_a_warning():
    long = Prompts("model", [], [10, 64, 70], [20, 80, 90])
    assert only(seen(prompts=long, seq_len=64)).seen == "2 of 3 prompts have 64 tokens or more (the longest 70)"
    assert list_findings(seen(prompts=long)) == []
    cut = only(seen(prompts=long, seq_len=85))
    assert (cut.severity, cut.seen[:23]) == ("warning", "1 of 3 gold conversatio")
    assert only(seen(prompts=Prompts("model", [], [], [], problem="task 0: no such role"))).severity == "error"


def test_without_a_model_prompts_that_do_not_fit_are_a_warning_that_suggests_one():
    long = Prompts(TINY, [], [10, 64, 70], [20, 80, 90])
    finding = only(seen(prompts=long, seq_len=64))
    assert (finding.severity, "--model" in finding.do) == ("warning", True)


def sampled(rewards: list[list[float]], size: int = 4, **changes: Any) -> SampledEpisodes:
    earned = [[[reward] for reward in task] for task in rewards]
    predictions: list[SignalPrediction] = [predict_signal(earned, g) for g in (2, 4, 8)] if any(rewards) else []
    given = {"problems": [], "episodes": sum(map(len, rewards)), "truncated": 0, **changes}
    return SampledEpisodes(
        "m", size, earned, given["problems"], given["episodes"], given["truncated"], 1.0, predictions
    )


def test_groups_without_signal_are_reported_with_a_fix():
    assert list_findings(seen(sampled=sampled([[0, 1, 0, 1]] * 4))) == []
    hard = only(seen(sampled=sampled([[0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 1]])))
    assert hard.seen == "75% of groups of 4 would have no signal"
    assert hard.do.startswith("easier tasks")
    easy = only(seen(sampled=sampled([[1] * 4, [1] * 4, [1] * 4, [0, 1, 0, 1]])))
    assert easy.do.startswith("harder tasks")
    both = only(seen(sampled=sampled([[1] * 4, [0] * 4, [1] * 4, [0, 1, 0, 1], [0] * 4])))
    assert both.do.startswith("tasks of medium difficulty")
    # of pairs of one right in four half are equal; of groups of four none
    larger = only(seen(sampled=sampled([[0, 0, 0, 1]] * 3 + [[0, 0, 0, 0]], size=2)))
    assert "; group_size 4 would leave 25%" in larger.do


def test_where_groups_are_larger_than_what_was_sampled_only_a_bound_is_reported():
    finding = only(seen(sampled=sampled([[0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 1]], size=8)))
    assert finding.severity == "note"
    assert finding.seen.startswith("at most 75% of groups of 8 would have no signal")
    assert finding.do == "estimate it with --sample 4x8"


def test_truncated_and_failed_episodes_are_reported():
    cut, lost = list_findings(
        seen(
            sampled=sampled(
                [[0, 1, 0, 1]] * 2, truncated=4, episodes=10, problems=[EpisodeProblem("endpoint", "busy")] * 2
            )
        )
    )[::-1]
    assert cut.seen == "40% of sampled episodes were truncated"
    assert (lost.severity, lost.seen) == ("warning", "2 of 10 sampled episodes failed: endpoint: busy")
    all_lost = only(seen(sampled=sampled([[]], episodes=1, problems=[EpisodeProblem("endpoint", "gone")])))
    assert all_lost.severity == "error"
