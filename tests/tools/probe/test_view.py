"""The tables of a probe's report."""

from __future__ import annotations

from rich.console import Console

from headrace.tools.probe.report import (
    TINY,
    EpisodeProblem,
    LoadResult,
    OfferedTool,
    ProbeEpisode,
    ProbeReport,
    Prompts,
    SampledEpisodes,
)
from headrace.tools.probe.sampling import predict_signal
from headrace.tools.probe.view import render_report


def shown(
    *episodes: ProbeEpisode, sampled: SampledEpisodes | None = None, prompts: Prompts | None = None
) -> list[list[str]]:
    """The words of each line."""
    opening = LoadResult(0.1, 0.1, 0.1, 2, 100, False, "")
    report = ProbeReport("probed", {}, opening, ["a", "b"], [0, 1], 0, None, list(episodes), [], None, prompts)
    report.sampled = sampled
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(render_report(report, []))
    return [line.split() for line in captured.get().splitlines()]


def test_larger_groups_than_were_sampled_are_shown_with_a_bound():
    rewards = [[[0.0]] * 4, [[0.0], [1.0]] * 2]
    predictions = [predict_signal(rewards, size) for size in (4, 8)]
    lines = shown(sampled=SampledEpisodes("m", 8, rewards, [], 8, 0, 1.0, predictions))
    # one of two tasks, and two of either kind: .5 +- 1.96 sqrt(.25 / 6)
    assert ["4", "50%", "10%", "to", "90%", "50%", "0%"] in lines
    most = ["at", "most"]
    assert ["8", "(yours)", *most, "50%", *most, "90%", *most, "50%", *most, "0%"] in lines


def test_the_range_is_that_of_all_agents_and_the_time_of_a_killed_process_is_unknown():
    game = ProbeEpisode("gold", 0, {"won": 0.0}, 0.0, [1.0, -1.0], seconds=0.002, cpu_seconds=0.001)
    killed = ProbeEpisode("empty", 0, problem=EpisodeProblem("blocked", "in words"), seconds=1.0, cpu_seconds=None)
    lines = shown(game, killed)
    assert ["gold", "0.000", "-1.00", "to", "1.00", "2.0", "1.0"] in lines
    assert ["empty", "-", "1,000", "-", "1", "blocked"] in lines


def test_tools_and_the_tokenizer_are_named():
    parameters = {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}}
    tools = [OfferedTool("press", "Press it.", parameters, 1.0), OfferedTool("wait", "Wait.", {}, 0.25)]
    lines = shown(prompts=Prompts("org/model", [], [565], [600], tools))
    assert ["press(word:", "string,", "times:", "integer):", "Press", "it."] in lines
    assert ["wait()", "[in", "25%", "of", "the", "prompts]:", "Wait."] in lines
    assert ["tokenizer", "and", "chat", "format:", "org/model"] in lines
    tiny = shown(prompts=Prompts(TINY, [], [565], [600]))
    assert any("init-model" in " ".join(line) for line in tiny)
