"""`headrace rescore`: compute the credit of a run's saved rollouts with another algorithm; samples nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.text import Text

from headrace.cli.common import add_format, choose_steps, format_steps, output_console, progress_line, step_span
from headrace.errors import BadInput
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.saved_config import read_rl_run, run_directory
from headrace.observe.chart_export import check_format, convert_plots
from headrace.tools.rescore.options import algorithms_of, check_rescorable, describe_all, short_name, with_algorithm
from headrace.tools.rescore.report import comparison_tables, rescore_chart
from headrace.tools.rescore.rescoring import RescoreResult, rescore_run
from headrace.transport.files import write_atomically
from headrace.transport.journal import Journal
from headrace.transport.rollout_files import RolloutFiles

PIPE_WIDTH = 120


def configure_rescore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument(
        "--steps", metavar="A:B", type=step_span, default=(None, None), help="only these steps [all saved]"
    )
    parser.add_argument("--algo", metavar="TYPE", help="the algorithm [the run's own: then nothing may differ]")
    parser.add_argument("--length-penalty", metavar="TYPE", help="its length penalty: linear, tokens, turns, overlong")
    parser.add_argument("--env", metavar="NAME", help="only this environment of the run")
    parser.add_argument("--output", metavar="DIR", type=Path, help="where to write the plot [RUN]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_format(parser)
    parser.epilog = (
        "Keys of the algorithm: --algo.key value, for example --algo.length_penalty.coef 0.5 or "
        "--algo.teacher.name NAME --algo.teacher.base_url http://host:port/v1"
    )


def run_rescore(arguments: argparse.Namespace) -> int:
    check_format(arguments.format)
    env: str | None = arguments.env
    config = read_rl_run(arguments.run)
    run = run_directory(config)
    add_code_folders_of(run)
    altered, penalties = with_algorithm(config, arguments.algo, arguments.length_penalty, arguments.overrides, env)
    before, after = algorithms_of(config, env), algorithms_of(altered, env)
    for name, algo in after.items():
        check_rescorable(name, before[name], algo, penalties.get(name))
    files = RolloutFiles(run.rollouts)
    steps = choose_steps(files, arguments.steps)
    journal = Journal(run.journal, read_only=True) if run.journal.is_file() else None
    with progress_line() as progress:
        outcome = asyncio.run(rescore_run(altered.orchestrator, files, steps, env, progress, penalties, journal))
    if not outcome.comparison.rollouts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in outcome.left_out.items()) or "there were none"
        raise BadInput(f"no rollout was credited with its group: {reasons}", key="--steps", value=format_steps(steps))
    is_own = before == after and not penalties
    labels = describe_all(before, {}), describe_all(after, penalties)
    title = f"{run.root.resolve().name}: credit of {format_steps(steps)}"
    names = dict.fromkeys(short_name(algo, penalties.get(env)) for env, algo in after.items())
    plot = (arguments.output or run.root) / f"rescore-{'-'.join(names)}.svg"
    write_atomically(plot, rescore_chart(title, labels, outcome.comparison, outcome.advantages).encode())
    convert_plots([plot], arguments.format)
    if arguments.json:
        _print_json(run.root, steps, labels, outcome, plot)
    else:
        _print_tables(title, labels, outcome, is_own, plot)
        for name in penalties:
            print(
                f"{after[name].type} takes no length penalty in a run, grpo and echo do: here it is added to its credit"
            )
    return 1 if is_own and not outcome.comparison.same else 0


def _print_tables(title: str, labels: tuple[str, str], outcome: RescoreResult, is_own: bool, plot: Path) -> None:
    comparison = outcome.comparison
    lines = [
        f"{title}: {comparison.rollouts:,} rollouts in {comparison.groups:,} groups",
        f"then: {labels[0]}",
        f"now:  {labels[1]}",
    ]
    if outcome.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(outcome.left_out.items()))
        lines.append(f"left out on both sides: {reasons}")
    console = output_console(PIPE_WIDTH)
    console.print(Text("\n".join([*lines, ""])))
    console.print(comparison_tables(comparison))
    console.print(Text("\n".join(["", *_remarks(outcome, is_own), f"plot: {plot}"])), soft_wrap=True)


def _remarks(outcome: RescoreResult, is_own: bool) -> list[str]:
    """Return tallies, rollouts that the algorithm would drop, and whether the credit is the same."""
    comparison = outcome.comparison
    lines = [f"{name}: {value:.6g}" for name, value in sorted(outcome.counted.items())]
    lines += [f"{count:,} rollouts would not be trained on: {why}" for why, count in outcome.not_trained.items()]
    if comparison.same:
        whose = "the run's own algorithm: " if is_own else ""
        lines.append(f"{whose}no difference: every token has the credit that it had, and the same rollouts train")
    elif is_own:
        lines.append(
            f"the run's own algorithm gives other credit than was saved, by up to {comparison.largest_difference:.3g}; "
            f"{comparison.changed_sides:,} rollouts train on one side alone. Either it keeps a state from group to "
            "group, or its code has changed since"
        )
    return lines


def _print_json(root: Path, steps: Sequence[int], labels: tuple[str, str], outcome: RescoreResult, plot: Path) -> None:
    content = {
        "run": str(root),
        "steps": [steps[0], steps[-1]],
        "num_steps": len(steps),
        "algorithms": {"then": labels[0], "now": labels[1]},
        **msgspec.to_builtins(outcome.comparison),
        "left_out": outcome.left_out,
        "not_trained": outcome.not_trained,
        "counted": outcome.counted,
        "plot": str(plot),
    }
    print(json.dumps(content))
