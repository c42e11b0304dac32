"""Findings of a probe: what is wrong with an environment, how severe it is, and how to fix it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from headrace.tools.probe.completions import BY_NAME, HUGE_CHARS, ScriptedCompletion, Severity
from headrace.tools.probe.report import (
    TINY,
    EpisodeProblem,
    ProbeEpisode,
    ProbeReport,
    Prompts,
    SampledEpisodes,
    SignalPrediction,
)
from headrace.tools.probe.runner import LATE
from headrace.tools.probe.worker import GOLD_FAILED, MAX_REPLIES

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EQUAL_SHARE = 0.999
"""Share of gold's reward (above the lowest reward) from which a completion counts as equal to gold."""
MAX_GARBAGE_SHARE = 0.1
MAX_HOSTILE_SHARE = 0.5
MAX_BLOCKED_S = 0.1
"""Time for which an episode may block the event loop, and with it all other episodes."""
SLOW_LOAD_S = 30.0
LARGE_TASKS_BYTES = 256 << 20
SEVERAL_CALLS: dict[str, Severity] = {"gold among 20 wrong": "warning", "gold 1,000 times": "note"}
"""Completions that make many tool calls in one reply, which may be legitimate."""
BEYOND_RUNS = f"{HUGE_CHARS >> 20} MB"
"""The completion that is longer than a run can sample."""


class ProbeFinding(msgspec.Struct, frozen=True):
    """A problem of an environment: what was seen, and what to do about it."""

    severity: Severity
    seen: str
    do: str


def list_findings(report: ProbeReport) -> list[ProbeFinding]:
    """Return all findings, the most severe first."""
    findings = [
        *_task_findings(report),
        *_prompt_findings(report.prompts, report.seq_len),
        *_gold_findings(report),
        *_reward_findings(report),
        *_problem_findings(report),
        *_time_findings(report),
        *(_sample_findings(report.sampled) if report.sampled is not None else ()),
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _task_findings(report: ProbeReport) -> Iterator[ProbeFinding]:
    opening = report.opening
    if report.first_difference is not None:
        seen = f"tasks() returned other tasks in a second process, from task {report.first_difference} on"
        do = "seed random generators and sort sets: a resumed run draws tasks by their index"
        yield ProbeFinding("error", seen, do)
    if report.duplicates:
        seen = f"{report.duplicates:,} of {opening.tasks:,} tasks are repetitions"
        yield ProbeFinding("note", seen, "remove them, unless they should be drawn more often")
    if opening.task_bytes > LARGE_TASKS_BYTES:
        seen = f"the tasks are {opening.task_bytes >> 20:,} MB of JSON, in the memory of each process of a run"
        yield ProbeFinding("warning", seen, "keep large data in files and their names in the tasks")
    seconds = opening.import_seconds + opening.load_seconds + opening.tasks_seconds
    if seconds > SLOW_LOAD_S:
        yield ProbeFinding("note", f"loading takes {seconds:.0f} s, in each process of a run", "prepare the data once")


def _prompt_findings(prompts: Prompts | None, seq_len: int | None) -> Iterator[ProbeFinding]:
    if prompts is None:
        return
    if prompts.problem:
        seen = f"a conversation cannot be rendered: {prompts.problem}"
        yield ProbeFinding("error", seen, "see [renderer], and --model")
    if seq_len is None or not prompts.lengths:
        return
    total = len(prompts.lengths)
    tokens = "tokens of the tiny model" if prompts.tokenizer == TINY else "tokens"
    if too_long := sum(length >= seq_len for length in prompts.lengths):
        seen = f"{too_long} of {total} prompts have {seq_len} {tokens} or more (the longest {max(prompts.lengths)})"
        do = "raise seq_len or remove long tasks: these episodes fail"
        if prompts.tokenizer == TINY:  # a token is a byte: most models have fewer tokens
            yield ProbeFinding("warning", seen, f"set the run's model (--model) to count its tokens, or {do}")
        else:
            yield ProbeFinding("error", seen, do)
    elif cut := sum(length > seq_len for length in prompts.conversation_lengths):
        longest = max(prompts.conversation_lengths)
        seen = f"{cut} of {total} gold conversations are longer than seq_len {seq_len} (the longest {longest} {tokens})"
        yield ProbeFinding("warning", seen, "raise seq_len: these tasks cannot be finished")


def _gold_findings(report: ProbeReport) -> Iterator[ProbeFinding]:
    if report.agents > 1:
        seen = f"{report.agents} agents are trained in an episode, with the same completion: rewards are not compared"
        do = "see the table for failures and times, and sample from a model (--endpoint) to see rewards"
        yield ProbeFinding("note", seen, do)
        return
    rewards = {episode.task: episode.reward for episode in report.of("gold") if episode.reward is not None}
    if not report.of("gold"):
        seen = "no gold(): it is unknown whether a correct answer gets the highest reward"
        yield ProbeFinding("warning", seen, "implement gold(task, messages); it also generates demonstrations for SFT")
    best = max(rewards.values(), default=0.0)
    if poor := [task for task, reward in rewards.items() if best > 0 and reward < best / 2]:
        seen = f"gold earns less than half of its best, {best:.3g}, on {len(poor)} of {len(rewards)} tasks: {poor[:3]}"
        yield ProbeFinding("warning", seen, "check the scorer and the gold answer of these tasks")


def _reward_findings(report: ProbeReport) -> Iterator[ProbeFinding]:
    if report.unstable:
        seen = f"the reward of {_join_names(report.unstable)} differed the second time"
        yield ProbeFinding("warning", seen, "seed random generators; set a judge's temperature to 0")
    if report.agents > 1:  # agents may earn at each other's cost
        return
    earned = [episode.reward for episode in report.episodes if episode.reward is not None]
    gold = [episode.reward for episode in report.of("gold") if episode.reward is not None]
    floor = min([0.0, *earned])
    if gold and fmean(gold) <= floor:
        yield ProbeFinding("error", f"gold earns {fmean(gold):.3g}, and nothing earns less", "check rewards and gold()")
        return
    names_by_verdict: dict[RewardVerdict, list[str]] = defaultdict(list)
    offers_tools = any(episode.offers_tools for episode in report.episodes)
    for name, shares in _shares(report, floor).items():
        if verdict := _verdict(BY_NAME[name], shares, offers_tools):
            names_by_verdict[verdict].append(name)
    for (severity, amount, remedy), names in names_by_verdict.items():
        verb = "earn" if len(names) > 1 else "earns"
        yield ProbeFinding(severity, f"{_join_names(names)} {verb} {amount}", remedy)
    if not gold:
        for name in ("empty", "random bytes"):
            rewards = [episode.reward for episode in report.of(name) if episode.reward is not None]
            if rewards and fmean(rewards) > 0:
                yield ProbeFinding("warning", f"{name!r} earns {fmean(rewards):.3g}", "check why it is rewarded")


RewardVerdict = tuple[Severity, str, str]
"""Severity, amount and fix."""


def _verdict(completion: ScriptedCompletion, shares: RewardShares, offers_tools: bool) -> RewardVerdict | None:
    """Compare a completion's rewards with those of gold; return None if they are fine."""
    remedy, share = _REMEDY[completion.kind], shares.total
    if share > 2 - EQUAL_SHARE:
        return "error", "more than gold", remedy
    if share >= EQUAL_SHARE and offers_tools and completion.name in SEVERAL_CALLS:
        return SEVERAL_CALLS[completion.name], "as much as gold", "if calls are guesses, limit their number"
    if share >= EQUAL_SHARE:
        return completion.as_good_as_gold, "as much as gold", remedy
    if completion.kind == "mistake" or completion.as_good_as_gold == "note":
        return None  # may be nearly correct
    if share > (MAX_HOSTILE_SHARE if completion.kind == "hostile" else MAX_GARBAGE_SHARE):
        return "warning", f"{share:.0%} of what gold does", remedy
    if shares.equal:
        return "note", f"as much as gold on {len(shares.equal)} of {shares.tasks} tasks: {shares.equal[:3]}", remedy
    return None


_REMEDY = {
    "gold": "",
    "mistake": "check that the scorer reads the whole answer; if mistakes may be correct, implement mistake()",
    "empty": "give an answer without content the lowest reward",
    "garbage": "give an answer without content the lowest reward",
    "hostile": "score one answer, from one place: a model will find this reward hack",
    "tool call": "give no reward for a call that cannot be run",
}


def _join_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class RewardShares(NamedTuple):
    """A completion's reward above the lowest reward, as a share of gold's on the same tasks."""

    total: float
    equal: list[int]
    """Tasks on which the completion earned as much as gold, and gold earned a reward."""
    tasks: int


def _shares(report: ProbeReport, floor: float) -> dict[str, RewardShares]:
    """Return shares by completion, without completions on whose tasks gold earned nothing."""
    gold = {episode.task: episode.reward for episode in report.of("gold") if episode.reward is not None}
    shares = {}
    for name in dict.fromkeys(episode.completion for episode in report.episodes):
        both = {
            episode.task: (episode.reward - floor, gold[episode.task] - floor)
            for episode in report.of(name)
            if not episode.says_gold and episode.task in gold and episode.reward is not None
        }
        gold_total = sum(best for _, best in both.values())
        if name != "gold" and gold_total > 0:
            equal = [task for task, (reward, best) in both.items() if best > 0 and reward >= EQUAL_SHARE * best]
            shares[name] = RewardShares(sum(reward for reward, _ in both.values()) / gold_total, equal, len(both))
    return shares


def _problem_findings(report: ProbeReport) -> Iterator[ProbeFinding]:
    """Yield one finding per location or reason, with the completions that caused it."""
    problems: dict[tuple[str, str], list[tuple[str, EpisodeProblem]]] = defaultdict(list)
    for episode in report.episodes:
        if (problem := episode.problem) is not None and problem.reason not in LATE:
            problems[problem.reason, problem.place or problem.text].append((episode.completion, problem))
    for cases in problems.values():
        names = list(dict.fromkeys(name for name, _ in cases))
        problem = cases[0][1]
        where = f" at {problem.place}" if ":" in problem.place else ""  # place may also be the name of a reward
        seen = f"{_join_names(names)}: {problem.reason}{where}: {problem.text}"
        if problem.reason == GOLD_FAILED:
            yield ProbeFinding("error", seen, "fix gold() or mistake()")
        elif problem.reason == "no_gold":
            yield ProbeFinding("warning", seen, "implement gold() for every task")
        elif problem.reason in ("exception", "reward_failed", "invalid_reward", "process", "no_rollout"):
            yield ProbeFinding("error", seen, "score every reply: 0 if it cannot be parsed")
        else:
            do = "failed episodes are dropped: return a reward if the answer is at fault"
            yield ProbeFinding("warning", seen, do)
    if (closing := report.closing) is not None:
        where = f" at {closing.place}" if closing.place else ""
        yield ProbeFinding("error", f"close(): {closing.reason}{where}: {closing.text}", "close only what was opened")


def _time_findings(report: ProbeReport) -> Iterator[ProbeFinding]:
    for name in dict.fromkeys(episode.completion for episode in report.episodes):
        episodes = report.of(name)
        late = [episode for episode in episodes if episode.problem is not None and episode.problem.reason in LATE]
        blocked = median(episode.blocked_seconds for episode in episodes)
        beyond = name == BEYOND_RUNS
        if late:
            yield _late_finding(late[0], beyond)
        elif blocked >= MAX_BLOCKED_S:
            seen = f"{name!r} blocks the event loop for {1000 * blocked:.0f} ms"
            fix = "truncate the text before scoring" if beyond else "set workers = N, or run the reward in_sandbox"
            yield ProbeFinding("note" if beyond else "warning", seen, fix)
    if endless := [episode for episode in report.episodes if episode.endless]:
        seen = f"an episode has no limit of turns: {endless[0].completion!r} continued after {MAX_REPLIES} replies"
        yield ProbeFinding("warning", seen, "set max_turns of Chat")


def _late_finding(episode: ProbeEpisode, beyond: bool) -> ProbeFinding:
    problem = episode.problem
    assert problem is not None, "called for late episodes"
    seen = f"{episode.completion!r} {problem.text}"
    fix = "set timeouts for what the episode waits for"
    if problem.reason == "not_cancelled":
        fix = "do not suppress asyncio.CancelledError"
    elif problem.reason == "blocked":
        where = f", at {problem.place}" if problem.place else ""
        seen = f"{episode.completion!r} blocks the event loop for more than {episode.blocked_seconds:.3g} s{where}"
        fix = "truncate the text before scoring" if beyond else "run the reward in_sandbox, which has a timeout"
    return ProbeFinding("warning" if beyond else "error", seen, fix)


def _sample_findings(sampled: SampledEpisodes) -> Iterator[ProbeFinding]:
    if sampled.problems:
        problem = sampled.problems[0]
        failed = f"{len(sampled.problems)} of {sampled.episodes} sampled episodes failed"
        seen = f"{failed}: {problem.reason}: {problem.text}"
        do = "check the server" if problem.reason == "endpoint" else "check the environment"
        yield ProbeFinding("error" if len(sampled.problems) == sampled.episodes else "warning", seen, do)
    if sampled.truncated > 0.1 * sampled.episodes:
        seen = f"{sampled.truncated / sampled.episodes:.0%} of sampled episodes were truncated"
        yield ProbeFinding("warning", seen, "raise max_tokens, or request shorter answers")
    prediction = next((p for p in sampled.predictions if p.group_size == sampled.group_size), None)
    if prediction is not None and prediction.without_signal > 0.5:
        yield _signal_finding(prediction, sampled)


def _signal_finding(prediction: SignalPrediction, sampled: SampledEpisodes) -> ProbeFinding:
    """Return how to get signal if more than half of the groups have none."""
    size, share = prediction.group_size, prediction.without_signal
    seen = f"{share:.0%} of groups of {size} would have no signal"
    if prediction.is_bound:
        tasks = len(sampled.rewards)
        bound = f"at most {seen}, estimated from {sampled.episodes // tasks} episodes of each task"
        return ProbeFinding("note", bound, f"estimate it with --sample {tasks}x{size}")
    if prediction.too_hard > 0.75 * share:
        fix = "easier tasks or partial credit: most groups earn nothing"
    elif prediction.too_easy > 0.75 * share:
        fix = "harder tasks: most groups earn everything"
    else:
        fix = "tasks of medium difficulty: many are too easy and many too hard"
    for other in sampled.predictions:
        if other.group_size > size and not other.is_bound and other.without_signal < 0.8 * share:
            fix += f"; group_size {other.group_size} would leave {other.without_signal:.0%}"
            break
    return ProbeFinding("warning", seen, fix)
