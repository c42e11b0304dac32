"""`headrace pull`: a run, a model or a dataset from a repository on the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.push import add_hub_options


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository")
    parser.add_argument("target", metavar="DIR", type=Path, help="where to: a new directory, or an earlier pull's")
    parser.add_argument("--dataset", action="store_true", help="the repository is one of a dataset")
    add_hub_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="files that are there already and differ")
    parser.epilog = "Doing it again downloads only what has changed. See docs/how-to/hub.md."


def run(arguments: argparse.Namespace) -> int:
    from headrace.errors import BadInput
    from headrace.launch.run_directory import in_use
    from headrace.observe.summary import write_summary
    from headrace.tools.hub.pull import described, plan_pull, pull
    from headrace.tools.hub.repository import Repository, RepoType, token_in
    from headrace.transport.run_dir import RunDir

    target: Path = arguments.target
    if target.exists() and not target.is_dir():
        raise BadInput("a file, not a directory", key="DIR", value=str(target))
    if in_use(target):
        raise BadInput("a run is at work there", key="DIR", value=str(target), fix="Stop it, or choose another DIR.")
    kind: RepoType = "dataset" if arguments.dataset else "model"
    repository = Repository(arguments.repo, kind, token_in(arguments.token_var), arguments.token_var)
    plan, there = plan_pull(repository, arguments.revision, target, overwrite=arguments.overwrite)
    if arguments.dry_run:
        print(described(plan))
        return 0
    pull(repository, plan, there.commit, target, lambda line: print(line, flush=True))
    if plan.kind == "run" and RunDir(target).metrics.is_file():
        write_summary(RunDir(target))  # it names the place of the run, and so is none of what is carried
    return 0
