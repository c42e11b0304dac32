"""`headrace pairs`: write preference pairs from the rollouts of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.cli.common import choose_steps, format_steps, positive, step_span
from headrace.errors import BadInput
from headrace.launch.errors import notify
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.saved_config import read_rl_run, run_directory
from headrace.tools.pairs import Choice, add_tools, is_held_out, make_pairs
from headrace.transport.files import write_atomically
from headrace.transport.rollout_files import RolloutFiles


def configure_pairs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run directory")
    add("--output", metavar="FILE", type=Path, help="where to write the pairs [RUN/pairs.jsonl]")
    add("--steps", metavar="A:B", type=step_span, default=(None, None), help="only these steps [all]")
    add("--env", metavar="NAME", help="only this environment of the run")
    add("--min-gap", metavar="R", type=float, default=0.0, help="least difference of the two rewards [any]")
    add("--per-group", metavar="N", type=positive, default=1, help="most pairs of a group [1]")
    add("--held-out", metavar="SHARE", type=float, help="share of the tasks whose pairs go to a second file [none]")


def run_pairs(arguments: argparse.Namespace) -> int:
    share: float | None = arguments.held_out
    if share is not None and not 0 < share < 1:
        raise BadInput("must be between 0 and 1", key="--held-out", value=share)
    config = read_rl_run(arguments.run)
    run = run_directory(config)
    names = [env.name for env in config.orchestrator.train.env]
    if arguments.env is not None and arguments.env not in names:
        raise BadInput("not an environment of the run", key="--env", value=arguments.env, fix=f"It has {names}.")
    files = RolloutFiles(run.rollouts)
    steps = choose_steps(files, arguments.steps)
    pairs = make_pairs(files, steps, Choice(arguments.min_gap, arguments.per_group, arguments.env))
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in pairs.left_out.items())
    source = f"{pairs.rollouts:,} rollouts in {pairs.groups:,} groups of {format_steps(steps)}"
    if not pairs.rows:
        fix = "Lower --min-gap, or read more steps."
        raise BadInput(f"no pair in {source}: {reasons or 'no rollouts'}", key="RUN", value=run.root, fix=fix)
    add_code_folders_of(run)
    notify(*add_tools(pairs.rows, config.orchestrator.train.env))
    path = arguments.output or run.root / "pairs.jsonl"
    parts = {path: pairs.rows}
    if share is not None:
        held_out = [row for row in pairs.rows if is_held_out(row, share)]
        parts = {
            path: [row for row in pairs.rows if not is_held_out(row, share)],
            path.with_name(f"{path.stem}-held-out{path.suffix}"): held_out,
        }
        if not all(parts.values()):
            tasks = len({(row["env"], row["task_key"]) for row in pairs.rows})
            fact = f"of {tasks} tasks with pairs {'none' if not held_out else 'every one'} is held out"
            raise BadInput(fact, key="--held-out", value=share, fix="Choose another share, or read more steps.")
    for file, rows in parts.items():
        write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        print(f"{len(rows):,} pairs of {len({(row['env'], row['task_key']) for row in rows}):,} tasks: {file}")
    print(f"from {source}" + (f"; not used: {reasons}" if reasons else ""))
    return 0
