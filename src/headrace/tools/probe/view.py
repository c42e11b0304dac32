"""Tables of a probe's report: prompts, completions, sampled rewards and findings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.observe.console import plain_table
from headrace.tools.probe.findings import ProbeFinding
from headrace.tools.probe.report import TINY, ProbeEpisode, ProbeReport, Prompts, SampledEpisodes

MAX_PROMPT_CHARS = 800
"""Characters of a prompt that are shown, from its beginning and its end."""
MIN_SHARED_CHARS = 200
"""Length of a prefix shared with the first prompt from which it is not repeated."""
TINY_TOKENIZER = "those of `headrace init-model tiny`, where a byte is a token; --model DIR|NAME selects a model's own"
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def render_report(report: ProbeReport, findings: Sequence[ProbeFinding]) -> RenderableType:
    parts: list[RenderableType] = [Text(_headline(report)), Text()]
    if report.prompts is not None:
        parts += _prompts(report.prompts)
    parts += [_completions(report), Text()]
    names = list(dict.fromkeys(name for episode in report.episodes for name in episode.rewards))
    if len(names) > 1:
        parts += [_components(report, names), Text()]
    if report.sampled is not None:
        parts += [_sampled(report.sampled), Text()]
    parts.append(_findings(findings))
    return Group(*parts)


def _headline(report: ProbeReport) -> str:
    opening = report.opening
    loading = opening.import_seconds + opening.load_seconds + opening.tasks_seconds
    count = opening.task_bytes
    size = f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"
    tasks = f"{opening.tasks:,} tasks ({size} of JSON, {report.duplicates:,} repeated)"
    return (
        f"{report.environment}: {tasks}\n"
        f"loaded in {loading:.2f} s: import {opening.import_seconds:.2f}, constructor {opening.load_seconds:.2f}, "
        f"tasks {opening.tasks_seconds:.2f}"
    )


def _prompts(prompts: Prompts) -> Iterator[RenderableType]:
    for number, shown in enumerate(prompts.shown, 1):
        title = f"prompt {number}, task {shown.task} ({shown.key}): {shown.tokens} tokens"
        yield Text(title, "bold")
        text, first = shown.text, prompts.shown[0].text
        pairs = zip(text.splitlines(keepends=True), first.splitlines(keepends=True), strict=False)
        same = sum(len(line) for line, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if number > 1 and same >= MIN_SHARED_CHARS:
            text = f"[as in prompt 1]\n{text[same:]}"
        if (omitted := len(text) - MAX_PROMPT_CHARS) > 0:
            half = MAX_PROMPT_CHARS // 2
            text = f"{text[:half]}\n[... {omitted:,} characters ...]\n{text[-half:]}"
        yield Padding(Text(text.rstrip()), (0, 0, 1, 2))
    if prompts.tools:
        yield Text("tools that the prompts offer", "bold")
        lines = []
        for tool in prompts.tools:
            types = {name: schema.get("type", "any") for name, schema in tool.parameters.get("properties", {}).items()}
            arguments = ", ".join(f"{name}: {kind}" for name, kind in types.items())
            share = "" if tool.share > 0.999 else f" [in {tool.share:.0%} of the prompts]"
            lines.append(f"{tool.name}({arguments}){share}: {tool.description}")
        yield Padding(Text("\n".join(lines)), (0, 0, 1, 2))
    if prompts.lengths:
        longest, conversation = max(prompts.lengths), max(prompts.conversation_lengths)
        yield Text(f"longest of {len(prompts.lengths)} prompts: {longest} tokens; longest conversation: {conversation}")
        yield Text(f"tokenizer and chat format: {TINY_TOKENIZER if prompts.tokenizer == TINY else prompts.tokenizer}")
        yield Text()


def _completions(report: ProbeReport) -> Table:
    titles = ("completion", "reward", "range", "ms (max)", "cpu ms (max)", "failed")
    table = plain_table(*titles, left=["failed"], gap=1)
    for name in dict.fromkeys(episode.completion for episode in report.episodes):
        table.add_row(*map(Text, _row(name, report.of(name))))
    return table


def _row(name: str, episodes: Sequence[ProbeEpisode]) -> tuple[str, ...]:
    rewards = [reward for episode in episodes for reward in episode.earned]
    mean = f"{fmean(rewards):.3f}" if rewards else "-"
    least, most = (f"{extreme(rewards):.2f}" if rewards else "" for extreme in (min, max))
    failed = Counter(episode.problem.reason for episode in episodes if episode.problem is not None)
    reasons = ", ".join(f"{count} {reason}" for reason, count in failed.items())
    wall = [episode.seconds for episode in episodes]
    cpu = [episode.cpu_seconds for episode in episodes if episode.cpu_seconds is not None]
    return name, mean, "" if least == most else f"{least} to {most}", _times(wall), _times(cpu), reasons


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    middle, most = _milliseconds(median(seconds)), _milliseconds(max(seconds))
    return middle if middle == most else f"{middle} ({most})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:,.0f}"


def _components(report: ProbeReport, names: Sequence[str]) -> Table:
    """Return a table of mean rewards by component, for the completions with any reward."""
    table = plain_table("by component", *names)
    for completion in dict.fromkeys(episode.completion for episode in report.episodes):
        scored = [episode.rewards for episode in report.of(completion) if episode.reward is not None]
        if any(any(rewards.values()) for rewards in scored):
            means = (f"{fmean(rewards.get(name, 0.0) for rewards in scored):.3f}" for name in names)
            table.add_row(completion, *means)
    return table


def _sampled(sampled: SampledEpisodes) -> RenderableType:
    rewards = [reward for task in sampled.rewards for episode in task for reward in episode]
    if not rewards:
        return Text(f"{sampled.episodes} sampled episodes: all failed")
    values = Counter(f"{reward:.2f}" for reward in rewards).most_common(4)
    common = ", ".join(f"{value} ({count / len(rewards):.0%})" for value, count in values)
    lines = Text(
        f"{sampled.episodes} episodes of {sampled.model} in {sampled.seconds:.0f} s: reward {fmean(rewards):.3f}; "
        f"most often {common}\n"
        f"truncated {sampled.truncated / sampled.episodes:.0%}, failed {len(sampled.problems) / sampled.episodes:.0%}"
    )
    table = plain_table("group size", "no signal", "95%", "too hard", "too easy")
    for p in sampled.predictions:
        size = f"{p.group_size}{' (yours)' if p.group_size == sampled.group_size else ''}"
        at_most = "at most " if p.is_bound else ""
        shares = (
            f"{at_most}{p.without_signal:.0%}",
            f"{at_most}{p.high:.0%}" if p.is_bound else f"{p.low:.0%} to {p.high:.0%}",
            f"{at_most}{p.too_hard:.0%}",
            f"{at_most}{p.too_easy:.0%}",
        )
        table.add_row(size, *shares)
    return Group(lines, table)


def _findings(findings: Sequence[ProbeFinding]) -> RenderableType:
    if not findings:
        return Text("nothing to fix", "green")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        text = Text(finding.seen)
        table.add_row(Text(finding.severity, COLOURS[finding.severity]), Text.assemble(text, "\n", (finding.do, "dim")))
    return table
