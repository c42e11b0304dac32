"""`headrace push` and `headrace pull`: exchange runs, models and datasets with the Hugging Face hub."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from headrace.errors import BadInput
from headrace.launch.run_directory import in_use, is_run
from headrace.observe.summary import write_summary
from headrace.tools.hub.contents import (
    Contents,
    Parts,
    contents_of_dataset,
    contents_of_model,
    contents_of_rollouts,
    contents_of_run,
)
from headrace.tools.hub.layout import read_manifest
from headrace.tools.hub.repository import Repository, RepoType, read_token
from headrace.tools.hub.transfer import plan_pull, plan_push, pull, push
from headrace.tools.sweep.record import FILE as SWEEP_FILE
from headrace.transport.files import MARKER
from headrace.transport.run_dir import RunDir


def configure_push(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="PATH", type=Path, help="a run, a sweep, a checkpoint, a model directory, or data")
    add("repo", metavar="OWNER/NAME", help="the repository; created if it does not exist")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--dataset", action="store_true", help="upload PATH, a file or a folder, as a dataset")
    data.add_argument("--rollouts", action="store_true", help="upload the rollouts of the run as a dataset")
    run = parser.add_argument_group("parts of a run, in addition to its final model, settings and metrics")
    run.add_argument("--checkpoint", metavar="step-N", action="append", default=[], type=_step, help="a checkpoint")
    run.add_argument("--permanent", action="store_true", help="every permanent checkpoint")
    run.add_argument("--resume-state", action="store_true", help="all that is needed to continue the run elsewhere")
    add(
        "--exclude",
        metavar="GLOB",
        action="append",
        default=[],
        help="of a dataset: leave out paths or names that match",
    )
    _add_hub_options(parser)
    add(
        "--private", action=argparse.BooleanOptionalAction, default=True, help="who may read a new repository [private]"
    )
    add("--replace", action="store_true", help="delete everything else in the repository")
    parser.epilog = "Doing it again uploads only what has changed. See docs/how-to/hub.md."


def _add_hub_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="BRANCH", default="main", help="[main]")
    parser.add_argument("--token-var", metavar="VAR", default="HF_TOKEN", help="the variable with the token [HF_TOKEN]")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, with sizes, and stop")


def run_push(arguments: argparse.Namespace) -> int:
    token = read_token(arguments.token_var)
    arguments.dataset |= (arguments.target / SWEEP_FILE).is_file()
    with _contents(arguments) as contents:
        for path, reason in contents.left_out.items():
            print(f"left out: {path} ({reason})")
        if token is None and not arguments.dry_run:
            fact = "not set, and a push needs a token"
            raise BadInput(fact, key=arguments.token_var, fix="Make one that may write on the hub.")
        if token is None:
            print(plan_push(contents, None, None, arguments.repo, replace=arguments.replace))
            print(f"{arguments.token_var} is not set: the hub was not asked what it has already")
            return 0
        kind: RepoType = "dataset" if arguments.dataset or arguments.rollouts else "model"
        repository = Repository(arguments.repo, kind, arguments.token_var)
        if arguments.dry_run:
            remote = repository.snapshot(arguments.revision)
            manifest = read_manifest(repository, remote)
            print(plan_push(contents, remote, manifest, arguments.repo, replace=arguments.replace))
            return 0
        options = {"private": arguments.private, "replace": arguments.replace}
        push(repository, contents, arguments.revision, **options, report=partial(print, flush=True))
    return 0


@contextmanager
def _contents(arguments: argparse.Namespace) -> Iterator[Contents]:
    """Yield the files to upload. A checkpoint is exported to a temporary model directory."""
    target: Path = arguments.target
    parts = Parts(arguments.checkpoint, arguments.permanent, arguments.resume_state)
    if not target.exists():
        raise BadInput("no such file or directory", key="PATH", value=str(target))
    if any(parts) and (not is_run(target) or arguments.dataset or arguments.rollouts):
        options = zip(("--checkpoint", "--permanent", "--resume-state"), parts, strict=True)
        raise BadInput("only a run has such parts", key=next(name for name, part in options if part))
    if arguments.exclude and not arguments.dataset:
        raise BadInput("only a dataset is a selection of files", key="--exclude", fix="Leave it out, or add --dataset.")
    if arguments.rollouts and not is_run(target):
        raise BadInput(f"{target} is not a run", key="--rollouts")
    if arguments.dataset:
        yield contents_of_dataset(target, arguments.repo, arguments.exclude)
    elif arguments.rollouts:
        yield contents_of_rollouts(target, arguments.repo)
    elif is_run(target):
        yield contents_of_run(target, arguments.repo, parts)
    elif (target / MARKER).is_file():
        from headrace.trainer.learner import export

        # A checkpoint has the name of its run: a later step is a newer state of the same model.
        checkpoint = target.resolve()
        name = next((parent.name for parent in checkpoint.parents if is_run(parent)), checkpoint.name)
        with tempfile.TemporaryDirectory(prefix="headrace-push-") as folder:
            export(target, Path(folder) / "model")
            yield contents_of_model(Path(folder) / "model", name, arguments.repo)
    elif (target / "config.json").is_file():
        yield contents_of_model(target, target.resolve().name, arguments.repo)
    else:
        fact = "neither a run nor a sweep, a checkpoint or a model directory"
        raise BadInput(fact, key="PATH", value=str(target), fix="Push data, or any folder, with --dataset.")


def _step(text: str) -> int:
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write step-N")
    return int(number)


def configure_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository")
    parser.add_argument("target", metavar="DIR", type=Path, help="a new directory, or that of an earlier pull")
    parser.add_argument("--dataset", action="store_true", help="the repository is a dataset")
    _add_hub_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="overwrite local files that differ")
    parser.epilog = "Doing it again downloads only what has changed. See docs/how-to/hub.md."


def run_pull(arguments: argparse.Namespace) -> int:
    target: Path = arguments.target
    if target.exists() and not target.is_dir():
        raise BadInput("a file, not a directory", key="DIR", value=str(target))
    if in_use(target):
        raise BadInput("a run is at work there", key="DIR", value=str(target), fix="Stop it, or choose another DIR.")
    repository = Repository(arguments.repo, "dataset" if arguments.dataset else "model", arguments.token_var)
    plan = plan_pull(repository, arguments.revision, target, overwrite=arguments.overwrite)
    if arguments.dry_run:
        print(plan)
        return 0
    pull(repository, plan, target, partial(print, flush=True))
    if plan.kind == "run" and RunDir(target).metrics.is_file():
        write_summary(RunDir(target))  # not uploaded, because it contains the path of the run
    return 0
