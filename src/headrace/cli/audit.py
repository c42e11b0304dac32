"""`headrace audit`: what became of every prompt that a run has drawn, and whether its journal adds up."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")


def run(arguments: argparse.Namespace) -> int:
    from headrace.errors import BadInput
    from headrace.orchestrator.audit import report, violations
    from headrace.orchestrator.journal import Journal
    from headrace.transport.run_dir import RunDir

    run = RunDir(arguments.run)
    if not run.journal.is_file():
        raise BadInput(f"{run.journal}: there is no journal; is {run.root} the directory of an RL run?")
    journal = Journal(run.journal, read_only=True)
    problems = violations(run, journal)
    print(report(journal.states(), problems))
    return 1 if problems else 0
