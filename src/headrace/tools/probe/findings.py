"""What a probe would fix: one line for each thing, how bad it is, what was seen and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from headrace.tools.probe.completions import BY_NAME, HUGE, Completion, Severity
from headrace.tools.probe.probing import LATE
from headrace.tools.probe.prompts import TINY
from headrace.tools.probe.report import Episode, Problem, Prompts, Report, Sampled
from headrace.tools.probe.signal import Prediction
from headrace.tools.probe.stage import GOLD_FAILED, MOST_REPLIES

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EQUAL = 0.999
"""Share of what gold earns, above the lowest, from which on a completion earns as much as gold."""
SOME = 0.1
"""Share from which on rubbish earns too much."""
MUCH = 0.5
"""Share from which on a cheat earns too much."""
HELD = 0.1
"""Seconds that an episode may hold the event loop: all others wait meanwhile."""
SLOW_LOAD = 30.0
LARGE = 256 << 20
"""Bytes of tasks, which every process of a run keeps."""
SEVERAL_CALLS: dict[str, Severity] = {"gold among 20 wrong": "warning", "gold 1,000 times": "note"}
"""Completions that, where there are tools, call many at once: that may be fair."""
BEYOND_RUNS = f"{HUGE >> 20} MB"
"""The completion that is longer than what a run can sample."""


class Finding(msgspec.Struct, frozen=True):
    severity: Severity
    seen: str
    do: str


def findings(report: Report) -> list[Finding]:
    """The worst first."""
    found = [
        *_of_tasks(report),
        *_of_prompts(report.prompts, report.seq_len),
        *_of_gold(report),
        *_of_rewards(report),
        *_of_problems(report),
        *_of_times(report),
        *_of_closing(report.closing),
        *(_of_samples(report.sampled) if report.sampled is not None else ()),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_tasks(report: Report) -> Iterator[Finding]:
    opening = report.opening
    if report.first_difference is not None:
        yield Finding(
            "error",
            f"tasks() gave other tasks in a second process, from task {report.first_difference} on",
            "seed what is random and sort what comes from a set: a resumed run draws tasks by their place",
        )
    if report.duplicates:
        yield Finding(
            "note",
            f"{report.duplicates:,} of {opening.tasks:,} tasks are repetitions",
            "leave them out, unless they are meant to be drawn more often",
        )
    if opening.task_bytes > LARGE:
        yield Finding(
            "warning",
            f"the tasks are {opening.task_bytes >> 20:,} MB of JSON, which each process of a run keeps",
            "keep large data in files, and their names in the tasks",
        )
    seconds = opening.import_seconds + opening.load_seconds + opening.tasks_seconds
    if seconds > SLOW_LOAD:
        yield Finding("note", f"loading takes {seconds:.0f} s, in each process of a run", "prepare the data once")


def _of_prompts(prompts: Prompts | None, seq_len: int | None) -> Iterator[Finding]:
    if prompts is None:
        return
    if prompts.problem:
        yield Finding("error", f"a conversation cannot be rendered: {prompts.problem}", "see [renderer], and --model")
    if seq_len is None or not prompts.lengths:
        return
    total = len(prompts.lengths)
    tokens = "tokens of the tiny model" if prompts.tokenizer == TINY else "tokens"
    if too_long := sum(length >= seq_len for length in prompts.lengths):
        seen = f"{too_long} of {total} prompts have {seq_len} {tokens} or more (the longest {max(prompts.lengths)})"
        do = "raise seq_len, or leave long tasks out: these episodes fail"
        if prompts.tokenizer == TINY:  # its tokens are bytes, so that most models have fewer
            yield Finding("warning", seen, f"name the run's model (--model) to count its tokens, or {do}")
        else:
            yield Finding("error", seen, do)
    elif cut := sum(length > seq_len for length in prompts.conversation_lengths):
        longest = max(prompts.conversation_lengths)
        seen = f"{cut} of {total} gold conversations are longer than seq_len {seq_len} (the longest {longest} {tokens})"
        yield Finding("warning", seen, "raise seq_len: nobody can finish these")


def _of_gold(report: Report) -> Iterator[Finding]:
    if report.agents > 1:
        yield Finding(
            "note",
            f"{report.agents} agents are trained in an episode, and completions speak for all: rewards were not judged",
            "see the table for failures and times, and have a model play (--endpoint) to see what is earned",
        )
        return
    rewards = {episode.task: episode.reward for episode in report.of("gold") if episode.reward is not None}
    if not report.of("gold"):
        yield Finding(
            "warning",
            "no gold(): nobody knows whether a right answer earns the most",
            "implement gold(task, messages); it also makes demonstrations for SFT",
        )
        return
    if not rewards:
        return
    best = max(rewards.values())
    poor = [task for task, reward in rewards.items() if best > 0 and reward < best / 2]
    if poor:
        seen = f"gold earns less than half of its best, {best:.3g}, on {len(poor)} of {len(rewards)} tasks: {poor[:3]}"
        yield Finding("warning", seen, "see whether the scorer or the gold answer is wrong there")


def _of_rewards(report: Report) -> Iterator[Finding]:
    if report.unstable:
        seen = f"the second time {_listed(report.unstable)} earned something else"
        yield Finding("warning", seen, "seed what is random; of a judge, ask for temperature 0")
    if report.agents <= 1:  # several may earn at each other's cost
        yield from _of_shares(report)


def _of_shares(report: Report) -> Iterator[Finding]:
    earned = [episode.reward for episode in report.episodes if episode.reward is not None]
    gold = [episode.reward for episode in report.of("gold") if episode.reward is not None]
    floor = min([0.0, *earned])
    if gold and fmean(gold) <= floor:
        yield Finding("error", f"gold earns {fmean(gold):.3g}, and nothing earns less", "see rewards and gold()")
        return
    alike: dict[tuple[Severity, str, str], list[str]] = defaultdict(list)
    offers_tools = any(episode.offers_tools for episode in report.episodes)
    for name, shares in _shares(report, floor).items():
        if verdict := _verdict(BY_NAME[name], shares, offers_tools):
            alike[verdict].append(name)
    for (severity, much, remedy), names in alike.items():
        verb = "earn" if len(names) > 1 else "earns"
        yield Finding(severity, f"{_listed(names)} {verb} {much}", remedy)
    if not gold:
        for name in ("empty", "random bytes"):
            rewards = [episode.reward for episode in report.of(name) if episode.reward is not None]
            if rewards and fmean(rewards) > 0:
                yield Finding("warning", f"{name!r} earns {fmean(rewards):.3g}", "see what it earns that for")


def _verdict(completion: Completion, shares: Shares, offers_tools: bool) -> tuple[Severity, str, str] | None:
    """How bad it is that a completion earns these shares of what gold does, in words, and what to do."""
    remedy, share = _REMEDY[completion.kind], shares.together
    if share > 2 - EQUAL:
        return "error", "more than gold", remedy
    if share >= EQUAL and offers_tools and completion.name in SEVERAL_CALLS:
        return SEVERAL_CALLS[completion.name], "as much as gold", "if calls are guesses, count them"
    if share >= EQUAL:
        return completion.as_good_as_gold, "as much as gold", remedy
    if completion.kind == "mistake" or completion.as_good_as_gold == "note":
        return None  # it may be nearly right
    if share > (MUCH if completion.kind == "hostile" else SOME):
        return "warning", f"{share:.0%} of what gold does", remedy
    if shares.equal:
        return "note", f"as much as gold on {len(shares.equal)} of {shares.tasks} tasks: {shares.equal[:3]}", remedy
    return None


_REMEDY = {
    "gold": "",
    "mistake": "see whether the scorer reads the whole answer; if mistakes may be right, implement mistake()",
    "empty": "an answer that says nothing must earn the least",
    "garbage": "an answer that says nothing must earn the least",
    "hostile": "score one answer, from one place: a model will find that",
    "tool call": "a call that cannot be run must earn nothing",
}


def _listed(names: Sequence[str]) -> str:
    """The first few."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class Shares(NamedTuple):
    """What a completion earned above the lowest, as a share of what gold earned on the same tasks."""

    together: float
    equal: list[int]
    """The tasks on which it earned as much as gold, which earned something there."""
    tasks: int


def _shares(report: Report, floor: float) -> dict[str, Shares]:
    """By completion, where gold earned something on the tasks that it was played on."""
    gold = {episode.task: episode.reward for episode in report.of("gold") if episode.reward is not None}
    shares = {}
    for name in dict.fromkeys(episode.completion for episode in report.episodes):
        others = [episode for episode in report.of(name) if not episode.says_gold and episode.task in gold]
        both = {
            episode.task: (episode.reward - floor, gold[episode.task] - floor)
            for episode in others
            if episode.reward is not None
        }
        wanted = sum(best for _, best in both.values())
        if name != "gold" and wanted > 0:
            equal = [task for task, (reward, best) in both.items() if best > 0 and reward >= EQUAL * best]
            shares[name] = Shares(sum(reward for reward, _ in both.values()) / wanted, equal, len(both))
    return shares


def _of_problems(report: Report) -> Iterator[Finding]:
    """Each place or reason once, with the completions that led there."""
    found: dict[tuple[str, str], list[tuple[Episode, Problem]]] = defaultdict(list)
    for episode in report.episodes:
        if episode.problem is not None and episode.problem.reason not in LATE:
            found[episode.problem.reason, episode.problem.place or episode.problem.text].append(
                (episode, episode.problem)
            )
    for cases in found.values():
        names = list(dict.fromkeys(episode.completion for episode, _ in cases))
        problem = cases[0][1]
        where = f" at {problem.place}" if ":" in problem.place else ""  # a reward names its timeouts, too
        seen = f"{_listed(names)}: {problem.reason}{where}: {problem.text}"
        if problem.reason == GOLD_FAILED:
            yield Finding("error", seen, "fix gold() or mistake()")
        elif problem.reason == "no_gold":
            yield Finding("warning", seen, "have gold() answer every task")
        elif problem.reason in ("exception", "reward_failed", "invalid_reward", "process", "no_rollout"):
            yield Finding("error", seen, "whatever a model says must be scored: 0 for what cannot be read")
        else:
            yield Finding("warning", seen, "failed episodes are dropped: give a reward if the answer was at fault")


def _of_times(report: Report) -> Iterator[Finding]:
    for name in dict.fromkeys(episode.completion for episode in report.episodes):
        episodes = report.of(name)
        late = [episode for episode in episodes if episode.problem is not None and episode.problem.reason in LATE]
        held = median(episode.blocked_seconds for episode in episodes)
        beyond = name == BEYOND_RUNS
        if late:
            yield _late(late[0], beyond)
        elif held >= HELD:
            seen = f"{name!r} blocks the event loop for {1000 * held:.0f} ms"
            advice = "cut the text before it is scored" if beyond else "give it workers = N, or a reward in_sandbox"
            yield Finding("note" if beyond else "warning", seen, advice)
    endless = [episode for episode in report.episodes if episode.endless]
    if endless:
        seen = (
            f"an episode does not end by itself: {endless[0].completion!r} still went on after {MOST_REPLIES} replies"
        )
        yield Finding("warning", seen, "give Chat max_turns")


def _late(episode: Episode, beyond: bool) -> Finding:
    assert episode.problem is not None, "it is late"
    where = f", at {episode.problem.place}" if episode.problem.place else ""
    if episode.problem.reason == "blocked":
        seen = f"{episode.completion!r} blocks the event loop for more than {episode.blocked_seconds:.3g} s{where}"
        advice = "cut the text before it is scored" if beyond else "give it a reward in_sandbox, which has a time limit"
    elif episode.problem.reason == "not_cancelled":
        seen, advice = f"{episode.completion!r} {episode.problem.text}", "let asyncio.CancelledError pass"
    else:
        seen, advice = f"{episode.completion!r}: {episode.problem.text}", "wait for things with a time limit"
    return Finding("warning" if beyond else "error", seen, advice)


def _of_closing(problem: Problem | None) -> Iterator[Finding]:
    if problem is not None:
        where = f" at {problem.place}" if problem.place else ""
        yield Finding("error", f"close(): {problem.reason}{where}: {problem.text}", "give back only what was opened")


def _of_samples(sampled: Sampled) -> Iterator[Finding]:
    if sampled.problems:
        problem = sampled.problems[0]
        seen = (
            f"{len(sampled.problems)} of {sampled.episodes} sampled episodes failed: {problem.reason}: {problem.text}"
        )
        do = "see the server" if problem.reason == "endpoint" else "see the environment"
        yield Finding("error" if len(sampled.problems) == sampled.episodes else "warning", seen, do)
    if sampled.truncated > 0.1 * sampled.episodes:
        seen = f"{sampled.truncated / sampled.episodes:.0%} of sampled episodes were cut off"
        yield Finding("warning", seen, "raise max_tokens, or ask for shorter answers")
    now = next((p for p in sampled.predictions if p.group_size == sampled.group_size), None)
    if now is not None and now.without_signal > 0.5:
        yield _unknown_signal(now, sampled) if now.is_bound else _without_signal(now, sampled.predictions)


def _unknown_signal(now: Prediction, sampled: Sampled) -> Finding:
    """There were fewer episodes of a task than the run's groups have."""
    seen = f"at most {now.without_signal:.0%} of groups of {now.group_size} would have no signal: that is all that "
    return Finding(
        "note",
        seen + f"{sampled.episodes // len(sampled.rewards)} episodes of each task can say",
        f"--sample {len(sampled.rewards)}x{now.group_size} would tell",
    )


def _without_signal(now: Prediction, others: Sequence[Prediction]) -> Finding:
    """Half of what is sampled, or more, would teach nothing: what would change that."""
    if now.too_hard > 0.75 * now.without_signal:
        advice = "easier tasks or partial credit: mostly nothing is earned"
    elif now.too_easy > 0.75 * now.without_signal:
        advice = "harder tasks: mostly everything is earned"
    else:
        advice = "tasks in between: many are too easy, and many too hard"
    seen = [p for p in others if p.group_size > now.group_size and not p.is_bound]
    larger = [p for p in seen if p.without_signal < 0.8 * now.without_signal]
    if larger:
        advice += f"; group_size {larger[0].group_size} would leave {larger[0].without_signal:.0%}"
    return Finding("warning", f"{now.without_signal:.0%} of groups of {now.group_size} would have no signal", advice)
