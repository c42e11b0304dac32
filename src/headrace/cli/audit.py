"""`headrace audit`: what became of every prompt that a run has drawn, and whether its journal adds up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.transport.journal import Journal
    from headrace.transport.run_dir import RunDir


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")


def run(arguments: argparse.Namespace) -> int:
    from headrace.errors import BadInput
    from headrace.launch.run_directory import find_run
    from headrace.orchestrator.audit import find_violations, format_report
    from headrace.transport.journal import Journal
    from headrace.transport.run_dir import RunDir

    run = RunDir(find_run(arguments.run))
    if not run.journal.is_file():
        raise BadInput("no journal.sqlite in it: not an RL run, or one that has not begun", key="RUN", value=run.root)
    journal = Journal(run.journal, read_only=True)
    problems = find_violations(run, journal) + _state_problems(run, journal)
    print(format_report(journal.states(), problems))
    return 1 if problems else 0


def _state_problems(run: RunDir, journal: Journal) -> list[str]:
    """Of algorithms whose state the journal can give again."""
    import asyncio

    from headrace.algorithms.rae import Rae, RaeConfig
    from headrace.launch.saved_config import read_rl_run
    from headrace.orchestrator.audit import find_state_violations

    if not run.config.is_file():
        return []
    config = read_rl_run(run.root).orchestrator
    chosen = {env.name: config.algo_of(env) for env in config.train.env}
    algorithms = {name: Rae(algo.decay) for name, algo in chosen.items() if isinstance(algo, RaeConfig)}
    return asyncio.run(find_state_violations(journal, algorithms))
