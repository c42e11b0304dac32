"""`headrace push`: a run, a model, a checkpoint or a dataset to a repository on the Hugging Face hub."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.tools.hub.contents import Contents


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="PATH", type=Path, help="a run, a sweep, a checkpoint, a model directory, or data"
    )
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository; made if it is not there")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--dataset", action="store_true", help="PATH is a file, or a folder that goes up whole")
    data.add_argument("--rollouts", action="store_true", help="what the run sampled, as a dataset")
    run = parser.add_argument_group("what of a run goes up beside its final model, settings and metrics")
    run.add_argument("--checkpoint", metavar="step-N", action="append", default=[], type=_step, help="this one, too")
    run.add_argument("--permanent", action="store_true", help="every permanent checkpoint")
    run.add_argument("--resume-state", action="store_true", help="all that it takes to continue the run elsewhere")
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        action="append",
        default=[],
        help="of a dataset: leave out paths or names like this",
    )
    add_hub_options(parser)
    parser.add_argument(
        "--private", action=argparse.BooleanOptionalAction, default=True, help="who may read a new repository [private]"
    )
    parser.add_argument("--replace", action="store_true", help="delete what else is in the repository")
    parser.epilog = "Doing it again uploads only what has changed. See docs/how-to/hub.md."


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="BRANCH", default="main", help="[main]")
    parser.add_argument("--token-var", metavar="VAR", default="HF_TOKEN", help="the variable with the token [HF_TOKEN]")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and how large it is")


def run(arguments: argparse.Namespace) -> int:
    from headrace.errors import BadInput
    from headrace.tools.hub.push import described, plan_push, push, read_manifest
    from headrace.tools.hub.repository import Repository, RepoType, token_in
    from headrace.tools.sweep.record import FILE as SWEEP

    token = token_in(arguments.token_var)
    arguments.dataset |= (arguments.target / SWEEP).is_file()
    kind: RepoType = "dataset" if arguments.dataset or arguments.rollouts else "model"
    with contents_of(arguments) as contents:
        for path, reason in contents.left_out.items():
            print(f"left out: {path} ({reason})")
        if arguments.dry_run and token is None:
            print(described(plan_push(contents, None, None, arguments.repo, replace=arguments.replace)))
            print(f"{arguments.token_var} is not set: the hub was not asked what it has already")
            return 0
        if token is None:
            raise BadInput(
                "not set, and a push needs a token", key=arguments.token_var, fix="Make one that may write on the hub."
            )
        repository = Repository(arguments.repo, kind, token, arguments.token_var)
        if arguments.dry_run:
            there = repository.snapshot(arguments.revision)
            before = read_manifest(repository, there)
            print(described(plan_push(contents, there, before, arguments.repo, replace=arguments.replace)))
            return 0
        options = {"private": arguments.private, "replace": arguments.replace}
        push(repository, contents, arguments.revision, **options, tell=lambda line: print(line, flush=True))
    return 0


@contextmanager
def contents_of(arguments: argparse.Namespace) -> Iterator[Contents]:
    """What is meant. A checkpoint is written as a model first, which is gone afterwards."""
    import tempfile

    from headrace.errors import BadInput
    from headrace.launch.run_directory import is_run
    from headrace.tools.hub.contents import (
        Parts,
        contents_of_dataset,
        contents_of_model,
        contents_of_rollouts,
        contents_of_run,
    )
    from headrace.transport.files import MARKER

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
        from headrace.trainer.export import export

        with tempfile.TemporaryDirectory(prefix="headrace-push-") as folder:
            export(target, Path(folder) / "model")
            yield contents_of_model(Path(folder) / "model", _name_of_checkpoint(target), arguments.repo)
    elif (target / "config.json").is_file():
        yield contents_of_model(target, target.resolve().name, arguments.repo)
    else:
        raise BadInput(
            "neither a run nor a sweep, a checkpoint or a model directory",
            key="PATH",
            value=str(target),
            fix="Push data, or any folder, with --dataset.",
        )


def _name_of_checkpoint(checkpoint: Path) -> str:
    """That of its run, where it is in one: a later step is a newer state of the same model."""
    from headrace.launch.run_directory import is_run

    return next((parent.name for parent in checkpoint.resolve().parents if is_run(parent)), checkpoint.resolve().name)


def _step(text: str) -> int:
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write step-N")
    return int(number)
